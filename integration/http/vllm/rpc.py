"""POST /collective_rpc for SkyRL, whose client updates weights by these names instead of vLLM's own paths.

A closed table: vLLM calls any method of its workers by name, this engine only the four of SkyRL's update.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ..admin.common import json_response, service_of
from ..edge.bodies import Body, describe, fields_of
from ..edge.errors import BadField
from .transfers import Update, read_update
from .weights import EmptyBody, FinishBody, finish, read, receive, start

router = APIRouter(tags=["weights"])

START, FINISH = "skyrl_start_weight_update", "skyrl_finish_weight_update"
UPDATES = ("update_weights_nccl", "update_weights_ipc")


class RpcBody(Body):
    """Fields of POST /collective_rpc."""

    method: str = Field(description=f"{START}, {', '.join(UPDATES)} or {FINISH}")
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


@router.post("/collective_rpc", openapi_extra=describe(RpcBody), response_class=Response)
async def collective_rpc(request: Request) -> Response:
    """Start, receive or finish an update of weights, as SkyRL's client calls it. Other methods are refused by name."""
    body, update = await read(request, _read)
    if update is not None:
        await receive(request, update)
    elif body.method == START:
        await start(request, EmptyBody())
    else:
        await finish(request, FinishBody())
    return json_response({"results": [None] * service_of(request).engine.ranks.mesh.num_ranks})


def _read(values: dict[str, object]) -> tuple[RpcBody, Update | None]:
    body = fields_of(RpcBody, values)
    if body.args:
        raise BadField("args", "is not supported: name the arguments in kwargs")
    if body.method in UPDATES:
        return body, read_update({"update_info": body.kwargs.get("update_info")})
    if body.method not in (START, FINISH):
        known = ", ".join((START, *UPDATES, FINISH))
        raise BadField("method", f"{body.method[:100]!r} is not one of {known}")
    if body.kwargs.get("is_checkpoint_format", True) is not True:
        raise BadField("kwargs.is_checkpoint_format", "must be true: tensors have the names and layout of checkpoints")
    return body, None
