"""GET /state: the whole state report. Changes no state."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..admin.common import json_response, service_of

router = APIRouter(tags=["information"])


async def read_state(request: Request) -> dict[str, Any]:
    """Read the service's state on a thread beside the event loop."""
    return await request.app.state.reads.run(service_of(request).state)


@router.get("/state")
async def get_state(request: Request) -> Response:
    """Report the whole state: sequences, blocks, weights, groups, a pause's lease, whether it has a run's samples."""
    state, updates = await read_state(request), request.app.state.updates
    return json_response(
        {
            **state,
            "pause_seconds_left": service_of(request).pause_lease.seconds_left,
            "update_age_s": updates.age_s,
            "conversations": request.app.state.conversations.report(),
            "draining": request.app.state.is_draining,
            "rollouts": request.app.state.rollouts is not None,
        }
    )
