"""vLLM's update of weights in four calls: init, start, update (any number), finish. An update is a transaction.

From /start_weight_update to /finish_weight_update nothing is published; a call that fails takes everything back. The
tensors come by broadcasts of rank 0. Where the model is on a GPU, that is the NCCL communicator of vLLM's own trainers
(`VllmRendezvous`); where it is on a CPU, a gloo group of torch.distributed, which the trainer joins as for SGLang's
/init_weights_update_group. `VllmTransport` is a sender of both. Or they come as handles of memory of this host.

| what fails | what happens |
|---|---|
| any /update_weights, but not during another one | the update is taken back, its group broken: broadcasts fail |
| the trainer ends, or falls silent | the same at the broadcast's deadline, or `update_idle_s` after its last call |
| a trainer inits again | an update that is open is taken back, and the group before it is left |
| start while an update is open, shutdown during one, finish without one | refused; nothing changes |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.errors import DeadlineExceeded, Overloaded
from ....weight_sync.errors import SessionError
from ....weight_sync.group.vllm_protocol import GROUP_NAME
from ...service import RolloutService
from ..admin.common import json_response, run, service_of
from ..edge.bodies import AdminBody, body_of, describe, read_as
from ..edge.errors import BadField, Busy, HttpError
from .transfers import Broadcasts, InitBody, Update, UpdateBody, Way, read_update, way_of, with_tensors
from .update_watch import UpdateWatch

router = APIRouter(tags=["weights"])

T = TypeVar("T")
_SOON_S = 1.0  # that an answer to wrong fields waits for a turn of the weights


class StartBody(AdminBody):
    """Fields of POST /start_weight_update."""

    is_checkpoint_format: bool = True  # of older clients
    client: str | None = None  # of our own sender: a name that its further calls have


class FinishBody(AdminBody):
    """Fields of POST /finish_weight_update."""

    weight_version: str | None = None
    keep_undo: bool = False  # of our own sender: the commit can be reverted until the next update
    client: str | None = None  # likewise: that of the start


class EmptyBody(AdminBody):
    """Fields of the calls that need none."""


@router.post("/init_weight_transfer_engine", openapi_extra=describe(InitBody), response_class=Response)
async def init_weight_transfer_engine(request: Request) -> Response:
    """Join the trainer's group; answers when all have joined. A group before it is left, and an open update of these
    calls is taken back: a trainer that starts again begins with this call."""
    body, service, state = await body_of(InitBody)(request), service_of(request), request.app.state
    way = way_of(body.init_info, has_nccl=service.communicators is not None)

    def join(seconds_left: float | None) -> None:
        _leave(request, seconds_left)
        if isinstance(way, Broadcasts) and way.place is not None:
            way.place.join(service, seconds_left)

    await run(request, body, join)
    state.weight_way, state.weights_told = way, ()
    return json_response({"message": "Weight transfer initialized"})


@router.post("/shutdown_weight_transfer_engine", openapi_extra=describe(EmptyBody), response_class=Response)
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    """Leave the group. Refused while an update is under way."""
    body, service = await body_of(EmptyBody)(request), service_of(request)

    def leave(_: float | None) -> None:
        if service.sessions.is_open:
            raise SessionError("a weight update is under way: finish it first")
        if GROUP_NAME in service.groups.state():
            service.destroy_weights_update_group(GROUP_NAME)

    await run(request, body, leave)
    return json_response({"message": "Weight transfer shut down"})


@router.post("/start_weight_update", openapi_extra=describe(StartBody), response_class=Response)
async def start_weight_update(request: Request) -> Response:
    """Begin an update. Refused while another one is under way, and where requests run: pause before."""
    body = await body_of(StartBody)(request)
    if not body.is_checkpoint_format:
        raise BadField("is_checkpoint_format", "must be true: tensors have the names and layout of checkpoints")
    await start(request, body, body.client)
    return json_response({"message": "Weight update started"})


@router.post("/start_draft_weight_update", openapi_extra=describe(EmptyBody), response_class=Response)
async def start_draft_weight_update(request: Request) -> Response:
    """Refuse an update of a draft model: this engine has none."""
    await body_of(EmptyBody)(request)
    message = "this engine has no draft model: its drafts come from the sequences themselves"
    raise HttpError(400, message, code="no_draft_model")


@router.post("/update_weights", openapi_extra=describe(UpdateBody), response_class=Response)
async def update_weights(request: Request) -> Response:
    """Receive tensors of the update that was started. A failure ends it: the weights are the old ones then."""
    update = await read(request, read_update)
    await receive(request, update)
    return json_response({"message": "Weights updated"} if update.info is not None else {"status": "ok"})


@router.post("/finish_weight_update", openapi_extra=describe(FinishBody), response_class=Response)
async def finish_weight_update(request: Request) -> Response:
    """Publish the update, under the version that is given."""
    await finish(request, await body_of(FinishBody)(request))
    return json_response({"message": "Weight update finished"})


async def read(request: Request, then: Callable[[dict[str, object]], T]) -> T:
    """Read the fields of an update. Where they are wrong, or there is no room for them, the update has failed, as
    `receive` can."""
    # Handles in base64: longer than other bodies, so the service's own limit is added.
    limit = request.app.state.config.max_body_bytes + 2 * service_of(request).config.max_pickle_bytes
    try:
        return await read_as(request, then, limit)
    except (HttpError, Overloaded):
        await run(request, EmptyBody(), lambda seconds_left: _refused(request, seconds_left))
        raise


async def start(request: Request, body: AdminBody, client: str | None = None) -> None:
    """Open the session of an update, of that client if it has a name."""

    def begin(service: RolloutService, seconds_left: float | None) -> None:
        service.begin_weight_update(coverage="partial", client=client, timeout_s=seconds_left)
        watch_of(request).begin()

    await _write(request, body, begin)


async def receive(request: Request, update: Update) -> None:
    """Receive the tensors of an update, or read a folder."""
    state = request.app.state
    way: Way = state.weight_way

    def work(service: RolloutService, seconds_left: float | None) -> None:
        if update.info is None:
            _read_folder(request, service, update.body, seconds_left)
            return
        check(service)
        try:
            whole = with_tensors(update, way, state.weights_told)
            way.receive(service, whole, seconds_left)
        except BaseException:
            _give_up(request)
            raise
        state.weights_told = whole.specs

    def check(service: RolloutService) -> None:
        if update.info is not None and not service.sessions.is_open:
            _give_up(request)
            _check_open(service)
        service.sessions.check_client(update.body.client)  # where it is not its own, that stays as it is

    await _write(request, update.body, work, check)


async def finish(request: Request, body: FinishBody) -> None:
    """Commit the session of an update."""

    def commit(service: RolloutService, _: float | None) -> None:
        service.end_weight_update(weight_version=body.weight_version, client=body.client)
        if not body.keep_undo:
            service.release_weight_undo()

    await _write(request, body, commit, _check_open)


def watch_of(request: Request) -> UpdateWatch:
    """Return the clock of updates."""
    return request.app.state.update_watch


def _read_folder(request: Request, service: RolloutService, body: UpdateBody, seconds_left: float | None) -> None:
    """Read a folder of safetensors, in the session that is open, or else as an update of its own."""
    assert body.weight_dir is not None
    service.update_weights_from_disk(
        body.weight_dir, weight_version=body.weight_version, client=body.client, timeout_s=seconds_left
    )
    if not service.sessions.is_open:
        service.commit_implicit_update()
    request.app.state.updated_from = body.weight_dir


def _check_open(service: RolloutService) -> None:
    """Check that an update is open. Raises SessionError naming the call that begins one."""
    if not service.sessions.is_open:
        raise SessionError("no weight update is under way: call /start_weight_update first")


def _give_up(request: Request) -> None:
    """Break the group after an update that failed, and take the update back. The trainer's broadcasts, which may be
    under way, fail now instead of waiting for this engine, and none of them is taken for a tensor of a later update."""
    _break_off(request)
    watch_of(request).take_back("receiving it failed")


def _break_off(request: Request) -> None:
    service_of(request).groups.break_off(GROUP_NAME, "an update over it failed: join again")


def _refused(request: Request, seconds_left: float | None) -> None:
    """Give up an update whose fields are wrong, unless another call of an update is under way. Where a trainer keeps
    the weights it is taken back at their next turn, after the answer."""
    service, watch, verb = service_of(request), watch_of(request), "update_weights"
    with contextlib.suppress(Busy), watch.call(verb):
        if not watch.is_open:
            _give_up(request)
            return
        try:
            with service.weights_turn(verb, min(seconds_left or _SOON_S, _SOON_S)):
                _give_up(request)
        except DeadlineExceeded:
            _break_off(request)
            watch.lose("receiving it failed")


def _leave(request: Request, seconds_left: float | None) -> None:
    """Take back an update whose trainer joins anew, and leave the group before it."""
    service, watch, verb = service_of(request), watch_of(request), "init_weight_transfer_engine"
    with watch.call(verb):
        if watch.is_open:
            with service.weights_turn(verb, seconds_left):
                watch.take_back("its trainer has joined anew")
        if GROUP_NAME in service.groups.state():
            service.destroy_weights_update_group(GROUP_NAME)


async def _write(
    request: Request,
    body: AdminBody,
    call: Callable[[RolloutService, float | None], T],
    check: Callable[[RolloutService], None] = lambda service: None,
) -> T:
    """Run a call of an update at its turn of the weights. check: refuses it before it waits for one."""
    service, watch, verb = service_of(request), watch_of(request), request.scope["path"].lstrip("/")

    def work(seconds_left: float | None) -> T:
        with watch.call(verb):
            check(service)
            watch.check()
            with service.weights_turn(verb, seconds_left) as still_left:
                return call(service, still_left)

    return await run(request, body, work)
