"""The paths that AReaL's server adds to vLLM's, by which its trainers pause an engine and write its weights.

Each is the engine's own call under another name: a pause ends requests with what they have, and AReaL sends them again
with their tokens after it. An update over a group comes in two calls, the tensors' names and then the tensors; several
of them are committed together when generation continues.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..admin import control, updates, weights
from ..admin.broadcasts import ForeignUpdate, reader_of
from ..admin.common import endpoint, triple
from ..edge.bodies import AdminBody, Count, body_of
from ..edge.errors import BadField

router = APIRouter(tags=["weights"])


class FolderBody(AdminBody):
    """Fields of POST /areal_update_weights."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = True  # AReaL's server always does


class TensorsBody(AdminBody):
    """Fields of POST /areal_set_update_weight_meta; the three lists have one entry per tensor."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Count]]
    group_name: str


class PlainBody(AdminBody):
    """Fields of the calls that need none."""


@endpoint(router, "/areal_pause_generation", PlainBody, carries_data=False)
async def areal_pause_generation(request: Request, body: PlainBody) -> Response:
    """End all requests with what they have, and run no more steps until /areal_continue_generation."""
    return await control.pause_generation(request, control.PauseBody(**body.model_dump()))


@endpoint(router, "/areal_continue_generation", PlainBody, carries_data=False)
async def areal_continue_generation(request: Request, body: PlainBody) -> Response:
    """End a pause, and commit the weights that were written during it."""
    return await control.continue_generation(request, control.ContinueBody(**body.model_dump()))


@endpoint(router, "/areal_init_weights_update_group", weights.InitGroupBody)
async def areal_init_weights_update_group(request: Request, body: weights.InitGroupBody) -> Response:
    """Join a process group as rank `rank_offset`, as /init_weights_update_group does."""
    return await weights.init_weights_update_group(request, body)


@endpoint(router, "/areal_update_weights", FolderBody)
async def areal_update_weights(request: Request, body: FolderBody) -> Response:
    """Read a folder of safetensors, as /update_weights_from_disk does; requests end with what they have."""
    return await updates.update_weights_from_disk(request, updates.DiskBody(**body.model_dump()))


async def _read_tensors(request: Request) -> TensorsBody:
    request.app.state.areal_tensors = None  # where these are refused, those before are not meant any more
    return await reader_of(TensorsBody)(request)


@endpoint(router, "/areal_set_update_weight_meta", TensorsBody, read=_read_tensors)
async def areal_set_update_weight_meta(request: Request, body: TensorsBody) -> Response:
    """Note the tensors that the next /areal_update_weights_xccl receives."""
    request.app.state.areal_tensors = updates.DistributedBody(
        **body.model_dump(include={"names", "dtypes", "shapes", "group_name"}), abort_all_requests=True
    )
    return triple("Success")


async def _read_plain(request: Request) -> PlainBody:
    tensors: updates.DistributedBody | None = request.app.state.areal_tensors
    async with ForeignUpdate(request, None if tensors is None else tensors.group_name):
        body = await body_of(PlainBody)(request)
        if tensors is None:
            raise BadField("names", "no tensors were told: call /areal_set_update_weight_meta first")
        return body


@endpoint(router, "/areal_update_weights_xccl", PlainBody, read=_read_plain)
async def areal_update_weights_xccl(request: Request, body: PlainBody) -> Response:
    """Receive the tensors that were noted, from rank 0 of their group; requests end with what they have. Where that
    fails before they have arrived, the group is broken."""
    tensors: updates.DistributedBody | None = request.app.state.areal_tensors
    assert tensors is not None
    return await updates.update_weights_from_distributed(request, tensors.model_copy(update=body.model_dump()))
