"""The weight verbs: groups, sessions, the four updates, versions, values, the checker, and memory.

Names, fields and replies are SGLang's, slime's and Miles' where they have them. Beyond those, `report` has what the
service's verb returned, and updates take `verify`, `keep_running`, `delta_check` and, for our own sender's wires,
`manifest` and `descriptions`.

An update without a session to an engine that neither is paused nor has released its KV is a set by itself: it is
committed at once. While either holds more buckets may follow, and the commit comes with continue, or with the KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ...weight_sync.session import UpdateRecord
from ..weight_verbs import GROUP_NAME
from .admin import endpoint, json_response, run, service_of, skipped, triple
from .bodies import AdminBody, Timeout, fields_of, read_object
from .errors import BadField, HttpError

router = APIRouter(tags=["weights"])

T = TypeVar("T")
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


# -- bodies -----------------------------------------------------------------------------------------------------------


class InitGroupBody(AdminBody):
    master_address: str
    master_port: Port
    rank_offset: Count
    world_size: Count
    group_name: str = GROUP_NAME
    backend: str = "nccl"


class DestroyGroupBody(AdminBody):
    group_name: str = GROUP_NAME


class BeginBody(AdminBody):
    selector: str = "all"
    weight_version: str | None = None
    coverage: str = "partial"  # a foreign trainer may freeze some
    undo: str = "tensors"
    digest: str = "now"
    lease_s: Timeout | None = None
    abort_all_requests: bool = False
    keep_running: bool = True  # a pause in_place means that


class VerifyBody(AdminBody):
    digests: dict[str, str]


class EndBody(AdminBody):
    weight_version: str | None = None


class AbortUpdateBody(AdminBody):
    why: Annotated[str, Field(max_length=4096)] = "asked for"


class UpdateBody(AdminBody):
    """What every update takes."""

    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    torch_empty_cache: bool = False
    selector: str = "all"
    keep_running: bool = True  # a pause in_place means that
    delta_check: str = "pre"


class DistributedBody(UpdateBody):
    names: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[list[Count]] | None = None
    group_name: str = GROUP_NAME
    manifest: str | None = None
    verify: dict[str, str] | None = None


class TensorBody(UpdateBody):
    serialized_named_tensors: list[str] | None = None
    descriptions: list[dict[str, Any]] | None = None
    verify: dict[str, str] | None = None


class DiskBody(UpdateBody):
    model_path: str
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: str | None = None
    verify: dict[str, str] | bool = True


class VersionBody(AdminBody):
    new_version: str
    abort_all_requests: bool = True


class ByNameBody(AdminBody):
    name: str
    truncate_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 100


class CheckerBody(AdminBody):
    action: str = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] = Field(default_factory=list)
    selector: str = "all"
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None


class MemoryBody(AdminBody):
    tags: list[str] = Field(default_factory=list)


class PostProcessBody(AdminBody):
    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


class PullBody(AdminBody):
    local_checkpoint_dir: str
    source_dir: str
    target_version: Count


class PlainBody(AdminBody):
    pass


# -- groups -----------------------------------------------------------------------------------------------------------


@endpoint(router, "/init_weights_update_group", InitGroupBody)
async def init_weights_update_group(request: Request, body: InitGroupBody) -> Response:
    """Join a process group as rank `rank_offset`; answers when all have joined."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)

    def join(seconds_left: float | None) -> None:
        service.init_weights_update_group(
            body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name, body.backend,
            timeout_s=seconds_left,
        )  # fmt: skip

    await run(request, body, join)
    return triple("Succeeded to initialize custom process group.")


@endpoint(router, "/destroy_weights_update_group", DestroyGroupBody)
async def destroy_weights_update_group(request: Request, body: DestroyGroupBody) -> Response:
    """Leave a process group, or end a rendezvous that still waits."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    if body.group_name not in service.groups.state():
        raise HttpError(400, f"The group to be destroyed does not exist. ({body.group_name!r})", param="group_name")
    await run(request, body, lambda _: service.destroy_weights_update_group(body.group_name))
    return triple("Succeeded to destroy custom process group.")


# -- sessions ---------------------------------------------------------------------------------------------------------


@endpoint(router, "/begin_weight_update", BeginBody)
async def begin_weight_update(request: Request, body: BeginBody) -> Response:
    """Open a session: nothing is sampled until it ends."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    fields = body.model_dump(exclude={"op_id", "timeout_s", "stages", "selector"})
    report = await run_update(request, body, lambda left: service.begin_weight_update(**fields, timeout_s=left))
    return triple("Success", report)


@endpoint(router, "/verify_weight_update", VerifyBody)
async def verify_weight_update(request: Request, body: VerifyBody) -> Response:
    """Compare what the open session wrote with the sender's digests."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    await run_update(request, body, lambda _: service.verify_weight_update(body.digests))
    return triple("Success")


@endpoint(router, "/end_weight_update", EndBody)
async def end_weight_update(request: Request, body: EndBody) -> Response:
    """Commit the open session."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    commit = await run_update(request, body, lambda _: service.end_weight_update(weight_version=body.weight_version))
    return triple("Success", commit, weight_version=commit.version, weight_digest=commit.digest)


@endpoint(router, "/abort_weight_update", AbortUpdateBody)
async def abort_weight_update(request: Request, body: AbortUpdateBody) -> Response:
    """Give the open session up: every byte is what it was."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    await run_update(request, body, lambda _: service.abort_weight_update(body.why))
    return triple("Success")


@endpoint(router, "/revert_weight_update", PlainBody)
async def revert_weight_update(request: Request, body: PlainBody) -> Response:
    """Take the last commit back while what it overwrote is kept."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    version = await run_update(request, body, lambda _: service.revert_weight_update())
    return triple("Success", version, weight_version=version)


@endpoint(router, "/release_weight_undo", PlainBody)
async def release_weight_undo(request: Request, body: PlainBody) -> Response:
    """The last commit stands: free what it overwrote."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    await run(request, body, lambda _: service.release_weight_undo())
    return triple("Success")


@endpoint(router, "/finish_digest", PlainBody)
async def finish_digest(request: Request, body: PlainBody) -> Response:
    """Compute the digest that a commit put off."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    digest = await run(request, body, lambda _: service.finish_digest())
    return triple("Success", digest, weight_digest=digest)


# -- updates ----------------------------------------------------------------------------------------------------------


@endpoint(router, "/update_weights_from_distributed", DistributedBody)
async def update_weights_from_distributed(request: Request, body: DistributedBody) -> Response:
    """Receive tensors from rank 0 of a group."""
    if body.load_format not in ("lockstep", "delta"):
        for name in ("names", "dtypes", "shapes"):
            if not getattr(body, name) and not (name == "names" and body.names is not None):
                raise BadField(name, "a list with an entry for each tensor is needed")
    service = service_of(request)
    return await _update(
        request,
        body,
        "Succeeded to update parameter online.",
        lambda common: service.update_weights_from_distributed(
            body.names, body.dtypes, body.shapes, body.group_name, load_format=body.load_format,
            manifest=body.manifest, verify=body.verify, **common,
        ),
    )  # fmt: skip


async def _read_tensor_body(request: Request) -> TensorBody:
    # Handles in base64, and one for each rank: longer than other bodies, and bounded by the service's own limit.
    limit = request.app.state.config.max_body_bytes + 2 * service_of(request).config.max_pickle_bytes
    return fields_of(TensorBody, await read_object(request, limit))


@endpoint(router, "/update_weights_from_tensor", TensorBody, read=_read_tensor_body)
async def update_weights_from_tensor(request: Request, body: TensorBody) -> Response:
    """Take tensors from memory of this host; the copy is complete when this answers."""
    if body.serialized_named_tensors is None and body.descriptions is None:
        raise BadField("serialized_named_tensors", "a list with an entry for each rank is needed")
    service = service_of(request)
    return await _update(
        request,
        body,
        "Success",
        lambda common: service.update_weights_from_tensor(
            body.serialized_named_tensors, descriptions=body.descriptions, load_format=body.load_format,
            verify=body.verify, **common,
        ),
    )  # fmt: skip


@endpoint(router, "/update_weights_from_disk", DiskBody)
async def update_weights_from_disk(request: Request, body: DiskBody) -> Response:
    """Read a folder of safetensors, or a delta folder."""
    for name in ("is_async", "manifest"):
        if getattr(body, name):
            raise BadField(name, "is not supported")
    if body.load_format not in (None, "auto", "safetensors", "delta"):
        raise BadField("load_format", "must be auto, safetensors or delta: the folder says which it is")
    service, state = service_of(request), request.app.state

    def update(common: dict[str, Any]) -> UpdateRecord:
        record = service.update_weights_from_disk(
            body.model_path, verify=body.verify, keep_pause=body.keep_pause, **common
        )
        if not service.sessions.is_open:
            service.sessions.commit_implicit()  # a folder is a set by itself
        state.updated_from = body.model_path
        return record

    return await _update(request, body, "Succeeded to update model weights.", update)


async def _update(
    request: Request, body: UpdateBody, message: str, update: Callable[[dict[str, Any]], UpdateRecord]
) -> Response:
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    has_flush = body.flush_cache and "flush_cache" in body.model_fields_set

    def work(seconds_left: float | None) -> tuple[UpdateRecord, int]:
        engine = service.engine
        before = engine.state()
        num_kept = before["num_running"] if body.keep_running and not body.abort_all_requests else 0
        if has_flush and before["paused"] and num_kept:
            raise BadField(
                "flush_cache", f"cannot flush the cache: {num_kept} requests hold KV; send false to keep them running, "
                "or pause with retract"
            )  # fmt: skip
        record = update(
            {
                "weight_version": body.weight_version,
                "delta_check": body.delta_check,
                "abort_all_requests": body.abort_all_requests,
                "keep_running": body.keep_running,
                "timeout_s": seconds_left,
            }
        )
        if not (service.sessions.is_open or engine.is_paused) and engine.kv_bytes:
            service.sessions.commit_implicit()
        if body.flush_cache and not num_kept:
            engine.flush_cache()
        if body.torch_empty_cache and engine.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return record, int(before["num_running"] + before["num_waiting"]) if before["paused"] else 0

    record, num_paused = await run_update(request, body, work)
    if body.weight_version is not None:
        message = f"{message} Weight version updated to {body.weight_version}."
    return triple(
        message, record, num_paused_requests=num_paused, weight_version=service.engine.weight_version,
        weight_digest=service.engine.weight_digest,
    )  # fmt: skip


async def run_update(request: Request, body: AdminBody, call: Callable[[float | None], T]) -> T:
    """Run what writes weights: one at a time, Busy for a second, and where the module is a trainer's in a rollout
    phase, for which it waits under its deadline."""
    gate, service, verb = request.app.state.updates, service_of(request), request.scope["path"].lstrip("/")

    def alone(seconds_left: float | None) -> T:
        with gate.enter(verb), service.weights_turn(verb, seconds_left) as still_left:
            return call(still_left)

    return await run(request, body, alone)


# -- versions and values ----------------------------------------------------------------------------------------------


@endpoint(router, "/update_weight_version", VersionBody)
async def update_weight_version(request: Request, body: VersionBody) -> Response:
    """Label the weights: those of the open session, or else those that stand."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    await run(request, body, lambda _: service.update_weight_version(body.new_version, body.abort_all_requests))
    return triple(f"Weight version updated to {body.new_version}", new_version=body.new_version)


@router.get("/get_weights_by_name")
async def get_weights_by_name(request: Request, name: str, truncate_size: int = 100) -> Response:
    """Values of a parameter as nested lists."""
    return await _values(request, ByNameBody(name=name, truncate_size=truncate_size))


@endpoint(router, "/get_weights_by_name", ByNameBody)
async def post_weights_by_name(request: Request, body: ByNameBody) -> Response:
    """Values of a parameter as nested lists."""
    return await _values(request, body)


async def _values(request: Request, body: ByNameBody) -> Response:
    service = service_of(request)
    values = await request.app.state.reads.run(lambda: service.get_weights_by_name(body.name, body.truncate_size))
    return json_response(values)


# -- the checker ------------------------------------------------------------------------------------------------------


@endpoint(router, "/weights_checker", CheckerBody, methods=("GET", "POST"))
async def weights_checker(request: Request, body: CheckerBody) -> Response:
    """Look at the weights between two steps: checksum, snapshot, compare, reset_tensors. GET does checksum only."""
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


@endpoint(router, "/release_memory_occupation", MemoryBody)
async def release_memory_occupation(request: Request, body: MemoryBody) -> Response:
    """Free the memory behind each tag, of all without any. Answers null."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    await run(request, body, lambda _: service.release_memory_occupation(body.tags))
    return json_response(None)


@endpoint(router, "/resume_memory_occupation", MemoryBody)
async def resume_memory_occupation(request: Request, body: MemoryBody) -> Response:
    """Allocate again what was released. Answers null."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)

    def resume(seconds_left: float | None) -> None:
        with service.turn_to_commit("resume_memory_occupation", seconds_left):
            service.resume_memory_occupation(body.tags)

    await run(request, body, resume)
    return json_response(None)


@endpoint(router, "/post_process_weights", PostProcessBody)
async def post_process_weights(request: Request, body: PostProcessBody) -> Response:
    """Nothing: there is nothing to do to weights that are not quantised."""
    return skipped(request, body) or triple("Success")


@endpoint(router, "/pull_weights", PullBody)
async def pull_weights(request: Request, body: PullBody) -> Response:
    """Bring the checkpoint of a version into a local folder from versioned folders, deltas among them."""
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    report = await run(
        request,
        body,
        lambda left: service.pull_weights(
            body.local_checkpoint_dir, body.source_dir, body.target_version, timeout_s=left
        ),
    )
    return triple("Success", report)
