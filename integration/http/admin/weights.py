"""Endpoints of the other weight verbs: groups, sessions, versions, values, checker, memory, pulled checkpoints.

Names, fields and replies are SGLang's, slime's and Miles' where they have them; `report` has the result of the
service's verb.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ....rollout.loop.commands import HoldReport
from ....weight_sync.delta.pull import PullRecord
from ...service import RolloutService
from ...weights.host import Commit
from ...weights.memory import MemoryReport
from ...weights.verbs import GROUP_NAME
from ..edge.bodies import AdminBody, Count, Timeout, fields_of, read_as
from ..edge.errors import HttpError
from .common import endpoint, json_response, run, run_update, service_of, skipped, triple, verb

router = APIRouter(tags=["weights"])

Port = Annotated[int, Field(ge=0, le=65535)]


# -- bodies -----------------------------------------------------------------------------------------------------------


class InitGroupBody(AdminBody):
    """Fields of init_weights_update_group."""

    master_address: str
    master_port: Port
    rank_offset: Count
    world_size: Count
    group_name: str = GROUP_NAME
    backend: str = "nccl"
    group_secret: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # of our own senders


class DestroyGroupBody(AdminBody):
    """Fields of destroy_weights_update_group."""

    group_name: str = GROUP_NAME


class BeginBody(AdminBody):
    """Fields of begin_weight_update."""

    selector: str = "all"
    weight_version: str | None = None
    coverage: str = "partial"  # another framework's trainer may freeze some parameters
    undo: str = "tensors"
    digest: str = "now"
    lease_s: Timeout | None = None
    abort_all_requests: bool = False
    keep_running: bool = True  # as a pause with mode in_place does
    continue_on_expiry: bool = False


class VerifyBody(AdminBody):
    """Fields of verify_weight_update: the sender's digests by tensor name."""

    digests: dict[str, str]


class EndBody(AdminBody):
    """Fields of end_weight_update."""

    weight_version: str | None = None
    in_flight: str | None = None  # "verify": requests that have begun are drawn again under the new weights


class AbortUpdateBody(AdminBody):
    """Fields of abort_weight_update."""

    why: Annotated[str, Field(max_length=4096)] = "asked for"


class VersionBody(AdminBody):
    """Fields of update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class ByNameBody(AdminBody):
    """Fields of get_weights_by_name."""

    name: str
    truncate_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 100


class CheckerBody(AdminBody):
    """Fields of weights_checker."""

    action: str = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] = Field(default_factory=list)
    selector: str = "all"
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None


class MemoryBody(AdminBody):
    """Fields of release_memory_occupation and resume_memory_occupation; no tags mean all."""

    tags: list[str] = Field(default_factory=list)


class PostProcessBody(AdminBody):
    """Fields of post_process_weights."""

    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class PullBody(AdminBody):
    """Fields of pull_weights."""

    local_checkpoint_dir: str
    source_dir: str
    target_version: Count


class PlainBody(AdminBody):
    """Fields of verbs without arguments of their own."""


# -- groups -----------------------------------------------------------------------------------------------------------


@verb(router, InitGroupBody, reply=lambda _, **ranks: triple("Succeeded to initialize custom process group.", **ranks))
def init_weights_update_group(service: RolloutService, body: InitGroupBody, seconds_left: float | None) -> None:
    """Join a process group as rank `rank_offset`; answers when all members have joined."""
    service.init_weights_update_group(
        body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name, body.backend,
        group_secret=body.group_secret, timeout_s=seconds_left,
    )  # fmt: skip


@verb(router, DestroyGroupBody, reply=lambda _, **ranks: triple("Succeeded to destroy custom process group.", **ranks))
def destroy_weights_update_group(service: RolloutService, body: DestroyGroupBody, _: float | None) -> None:
    """Leave a process group, or end a rendezvous that still waits for members."""
    if body.group_name not in service.groups.state():
        raise HttpError(400, f"The group to be destroyed does not exist. ({body.group_name!r})", param="group_name")
    service.destroy_weights_update_group(body.group_name)


# -- sessions ---------------------------------------------------------------------------------------------------------


def _committed(commit: Commit, **ranks: object) -> Response:
    return triple("Success", commit, weight_version=commit.version, weight_digest=commit.digest, **ranks)


def _reverted(version: str, **ranks: object) -> Response:
    return triple("Success", version, weight_version=version, **ranks)


def _digested(digest: str | None, **ranks: object) -> Response:
    return triple("Success", digest, weight_digest=digest, **ranks)


def _labelled(version: str, **ranks: object) -> Response:
    return triple(f"Weight version updated to {version}", new_version=version, **ranks)


@verb(router, BeginBody, writes=True)
def begin_weight_update(service: RolloutService, body: BeginBody, seconds_left: float | None) -> HoldReport:
    """Open a session; no token is sampled until it ends."""
    fields = body.model_dump(exclude={"op_id", "timeout_s", "stages", "selector"})
    return service.begin_weight_update(**fields, timeout_s=seconds_left)


@verb(router, VerifyBody, writes=True)
def verify_weight_update(service: RolloutService, body: VerifyBody, seconds_left: float | None) -> None:
    """Compare the tensors that the open session wrote with the sender's digests."""
    service.verify_weight_update(body.digests, timeout_s=seconds_left)


@verb(router, EndBody, writes=True, reply=_committed)
def end_weight_update(service: RolloutService, body: EndBody, seconds_left: float | None) -> Commit:
    """Commit the open session."""
    in_flight: Any = body.in_flight
    return service.end_weight_update(weight_version=body.weight_version, in_flight=in_flight, timeout_s=seconds_left)


@verb(router, AbortUpdateBody, writes=True)
def abort_weight_update(service: RolloutService, body: AbortUpdateBody, seconds_left: float | None) -> None:
    """Abort the open session and restore every byte."""
    service.abort_weight_update(body.why, timeout_s=seconds_left)


@verb(router, PlainBody, writes=True, reply=_reverted)
def revert_weight_update(service: RolloutService, body: PlainBody, seconds_left: float | None) -> str:
    """Revert the last commit, while the bytes that it overwrote are kept."""
    return service.revert_weight_update(timeout_s=seconds_left)


@verb(router, PlainBody)
def release_weight_undo(service: RolloutService, body: PlainBody, _: float | None) -> None:
    """Free the bytes that the last commit overwrote; it cannot be reverted then."""
    service.release_weight_undo()


@verb(router, PlainBody, reply=_digested)
def finish_digest(service: RolloutService, body: PlainBody, _: float | None) -> str | None:
    """Compute the digest that a commit postponed."""
    return service.finish_digest()


# -- versions and values ----------------------------------------------------------------------------------------------


@verb(router, VersionBody, reply=_labelled)
def update_weight_version(service: RolloutService, body: VersionBody, seconds_left: float | None) -> str:
    """Set the version of the open session's weights or, without a session, of the current weights."""
    service.update_weight_version(body.new_version, body.abort_all_requests, timeout_s=seconds_left)
    return body.new_version


@router.get("/get_weights_by_name")
async def get_weights_by_name(request: Request, name: str | None = None, truncate_size: int | None = None) -> Response:
    """Return values of a parameter as nested lists. The fields are in the query, or in a body as for a POST."""
    query = {"name": name, "truncate_size": truncate_size}
    given: dict[str, object] = {key: value for key, value in query.items() if value is not None}
    return await _values(request, await read_as(request, lambda values: fields_of(ByNameBody, values | given)))


@endpoint(router, "/get_weights_by_name", ByNameBody)
async def post_weights_by_name(request: Request, body: ByNameBody) -> Response:
    """Return values of a parameter as nested lists."""
    return await _values(request, body)


async def _values(request: Request, body: ByNameBody) -> Response:
    service = service_of(request)
    values = await request.app.state.reads.run(lambda: service.get_weights_by_name(body.name, body.truncate_size))
    return json_response(values)


# -- the checker ------------------------------------------------------------------------------------------------------


@endpoint(router, "/weights_checker", CheckerBody, methods=("GET", "POST"))
async def weights_checker(request: Request, body: CheckerBody) -> Response:
    """Check the weights between two steps: checksum, snapshot, compare, reset_tensors. GET does only checksum."""
    if request.method == "GET" and body.action != "checksum":
        raise HttpError(405, f"action {body.action!r} needs POST", param="action", headers={"Allow": "POST"})
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)

    def check(seconds_left: float | None) -> dict[str, object]:
        return service.weights_checker(body.action, skip_tensor_list=body.skip_tensor_list, seed=body.seed)

    is_write = body.action == "reset_tensors"
    report = await (run_update if is_write else run)(request, body, check)
    return json_response(report, 200 if report["success"] else 400)


# -- memory and the rest ----------------------------------------------------------------------------------------------


def _null(_: object, **ranks: object) -> Response:
    return json_response(None)


@verb(router, MemoryBody, reply=_null)
def release_memory_occupation(service: RolloutService, body: MemoryBody, _: float | None) -> dict[str, MemoryReport]:
    """Free the memory of each given tag, or of all tags if none is given. Answers null."""
    return service.release_memory_occupation(body.tags)


@verb(router, MemoryBody, reply=_null)
def resume_memory_occupation(
    service: RolloutService, body: MemoryBody, seconds_left: float | None
) -> dict[str, MemoryReport]:
    """Allocate released memory again. Answers null."""
    with service.turn_to_commit("resume_memory_occupation", seconds_left):
        return service.resume_memory_occupation(body.tags)


@endpoint(router, "/post_process_weights", PostProcessBody)
async def post_process_weights(request: Request, body: PostProcessBody) -> Response:
    """Do nothing: weights that are not quantised need no post-processing."""
    return skipped(request, body) or triple("Success")


@verb(router, PullBody)
def pull_weights(service: RolloutService, body: PullBody, seconds_left: float | None) -> PullRecord:
    """Write the checkpoint of a version to a local folder, from versioned folders that may be deltas."""
    return service.pull_weights(body.local_checkpoint_dir, body.source_dir, body.target_version, timeout_s=seconds_left)
