"""GET /lockstep/rollouts: the page of the samples of the run whose engine this is. It asks for them as any client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from ...pages.policy import HEADERS, served_policy
from ...pages.rollouts import template
from ..admin.common import json_response
from ..edge.errors import HttpError

router = APIRouter(tags=["information"])

Rollouts = Callable[[int | None], dict[str, Any]]  # a step, or None for the newest -> what the page shows of it


@router.get("/lockstep/rollouts", response_class=HTMLResponse, include_in_schema=False)
async def rollouts_page(request: Request) -> HTMLResponse:
    """Show the page of a run's samples."""
    _rollouts_of(request)
    text = template()
    return HTMLResponse(text, headers={**HEADERS, "Content-Security-Policy": served_policy(text)})


@router.get(
    "/lockstep/rollouts/data", responses={404: {"description": "the engine is of no run, or the step has no samples"}}
)
async def rollouts_data(request: Request, step: int | None = None) -> Response:
    """Return the samples that a run of the job has kept of a step, by default of the newest, as its page shows them."""
    rollouts = _rollouts_of(request)
    try:
        return json_response(await request.app.state.reads.run(lambda: rollouts(step)))
    except ValueError as error:
        raise HttpError(404, str(error), param="step") from error


def _rollouts_of(request: Request) -> Rollouts:
    rollouts: Rollouts | None = request.app.state.rollouts
    if rollouts is None:
        raise HttpError(404, "this engine is of no run of the job, or the run keeps no samples")
    return rollouts
