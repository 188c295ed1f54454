"""Endpoints that update weights: from a process group, from memory of this host, from disk.

Names, fields and replies are SGLang's, slime's and Miles' where they have them. In addition `report` has the result of
the service's verb, and updates take `verify`, `keep_running`, `in_flight`, `delta_check` and, for Lockstep's own
senders, `manifest` and `descriptions`.

An update without a session is committed at once if the engine is not paused and has not released its KV, and taken back
where it cannot be committed. Otherwise more buckets may follow, and the commit happens when generation continues or the
KV is allocated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....weight_sync.transaction.records import UpdateRecord
from ...service import RolloutService
from ...weights.sources import OWN_FORMATS
from ...weights.verbs import GROUP_NAME
from ..edge.bodies import AdminBody, Count, fields_of, read_as
from ..edge.errors import BadField
from .broadcasts import ForeignUpdate, reader_of
from .common import endpoint, rank_results, run_update, service_of, skipped, triple

router = APIRouter(tags=["weights"])


class UpdateBody(AdminBody):
    """Fields of every update."""

    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    torch_empty_cache: bool = False
    selector: str = "all"
    keep_running: bool | None = None  # default: true, as a pause with mode in_place does, unless there is in_flight
    in_flight: str | None = None  # "verify": requests that have begun are drawn again under the new weights

    @property
    def keeps_running(self) -> bool:
        """Whether requests that are paused in_place go on with the new weights."""
        return self.in_flight is None if self.keep_running is None else self.keep_running

    delta_check: str = "pre"


class DistributedBody(UpdateBody):
    """Fields of update_weights_from_distributed; the three lists have one entry per tensor."""

    names: list[str] | None = None
    dtypes: list[str] | None = None
    shapes: list[list[Count]] | None = None
    group_name: str = GROUP_NAME
    manifest: str | None = None
    verify: dict[str, str] | None = None


class TensorBody(UpdateBody):
    """Fields of update_weights_from_tensor."""

    serialized_named_tensors: list[str] | None = None
    descriptions: list[dict[str, Any]] | None = None
    verify: dict[str, str] | None = None


class DiskBody(UpdateBody):
    """Fields of update_weights_from_disk."""

    model_path: str
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: str | None = None
    verify: dict[str, str] | bool = True


@endpoint(router, "/update_weights_from_distributed", DistributedBody, read=reader_of(DistributedBody))
async def update_weights_from_distributed(request: Request, body: DistributedBody) -> Response:
    """Receive tensors from rank 0 of a group. Where that fails before they have arrived, the group is broken."""
    service = service_of(request)
    is_foreign = body.load_format not in OWN_FORMATS
    async with ForeignUpdate(request, body.group_name, is_foreign=is_foreign) as foreign:
        for name in ("names", "dtypes", "shapes") if is_foreign else ():
            if not getattr(body, name) and not (name == "names" and body.names is not None):
                raise BadField(name, "a list with an entry for each tensor is needed")

        def update(common: dict[str, Any]) -> UpdateRecord:
            foreign.begins()
            return service.update_weights_from_distributed(
                body.names, body.dtypes, body.shapes, body.group_name, load_format=body.load_format,
                manifest=body.manifest, verify=body.verify, **common,
            )  # fmt: skip

        return await _update(request, body, "Succeeded to update parameter online.", update)


async def _read_tensor_body(request: Request) -> TensorBody:
    # Handles in base64, one per rank: longer than other bodies, so the service's own limit is added.
    limit = request.app.state.config.max_body_bytes + 2 * service_of(request).config.max_pickle_bytes
    return await read_as(request, lambda values: fields_of(TensorBody, values), limit)


@endpoint(router, "/update_weights_from_tensor", TensorBody, read=_read_tensor_body)
async def update_weights_from_tensor(request: Request, body: TensorBody) -> Response:
    """Copy tensors from memory of this host; the copy is complete when this answers."""
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
            _commit_at_once(service)  # a folder is a complete set
        state.updated_from = body.model_path
        return record

    return await _update(request, body, "Succeeded to update model weights.", update)


def _commit_at_once(service: RolloutService) -> None:
    try:
        service.commit_implicit_update(or_roll_back=True)
    except ValueError as error:
        why = "outside of a session and of a pause it is committed at once"
        raise ValueError(f"{error}; the update was taken back: {why}") from error


async def _update(
    request: Request, body: UpdateBody, message: str, update: Callable[[dict[str, Any]], UpdateRecord]
) -> Response:
    if (skip := skipped(request, body)) is not None:
        return skip
    service = service_of(request)
    has_flush = body.flush_cache and "flush_cache" in body.model_fields_set

    def work(seconds_left: float | None) -> tuple[UpdateRecord, int, dict[str, Any]]:
        engine = service.engine
        service.replica.note_outside_call()
        before: dict[str, Any] = engine.state()
        num_kept = before["num_running"] if body.keeps_running and not body.abort_all_requests else 0
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
                "keep_running": body.keeps_running,
                "in_flight": body.in_flight,
                "timeout_s": seconds_left,
            }
        )
        if not (service.sessions.is_open or engine.is_paused) and engine.kv_bytes:
            _commit_at_once(service)
        if body.flush_cache and not num_kept and body.in_flight is None:  # whose commit drops the cache
            engine.flush_cache()
        if body.torch_empty_cache and engine.model.device.type == "cuda":
            torch.cuda.empty_cache()
        num_paused = int(before["num_running"] + before["num_waiting"]) if before["paused"] else 0
        return record, num_paused, rank_results(service)

    record, num_paused, results = await run_update(request, body, work)
    if body.weight_version is not None and body.weight_version == service.engine.weight_version:
        message = f"{message} Weight version updated to {body.weight_version}."
    elif body.weight_version is not None:
        message = f"{message} Weight version stays {service.engine.weight_version} until the commit."
    return triple(
        message, record, num_paused_requests=num_paused, weight_version=service.engine.weight_version,
        weight_digest=service.engine.weight_digest, **results,
    )  # fmt: skip
