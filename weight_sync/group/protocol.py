"""Weights over a process group, both ends of our own protocol.

Agree on the plan over the group's store before the first byte, broadcast from rank 0, then acknowledge:

    rank 0                                   every other rank
    <n>/plan        the plan, as JSON   ->   compare it with this rank's plan and its sink
    <n>/verdict/<r> "" or a problem     <-
    <n>/go          "" or the reason    ->   all ranks fail with the same first difference, or all go on
    broadcasts      large tensors from and into their own memory, small ones packed into a shared buffer
    <n>/done/<r>    "" or the failure   <-
    <n>/failed      the ranks to blame  ->   only after a failed broadcast
    <n>/heard/<r>                       <-   the failure was read: rank 0 may leave, and its store with it

n counts the updates of the group; a rank skips updates that the sender gave up before the rank came. For other
frameworks' senders see `framework_protocol.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..deadline import Deadline
from ..errors import PlanMismatch, TransferFailed, WeightSyncError
from ..layout.bucket import DEFAULT_BUCKET_BYTES, BucketPlan, byte_view
from ..layout.sink import Sink
from ..manifest import Manifest, NamedTensors, TensorSpec, differences
from .broadcasts import Pipeline, open_pipeline
from .plan import PROTOCOL, TransferPlan, tensors_of
from .weight_group import WeightGroup

_BLAME_S = 0.5  # time to wait, even past the deadline, for the ranks to blame for a failed broadcast


# -- our own sender ----------------------------------------------------------------------------------------------------


def send_update(
    group: WeightGroup,
    manifest: Manifest,
    tensors: NamedTensors,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout_s: float = 300.0,
) -> None:
    """Send an update as rank 0; every other rank calls `receive_update`. Returns when all of them have the bytes.

    tensors: the manifest's, in its order, on any device and of any strides. They may be made one by one: the tensors of
    two broadcasts are held at a time, or of `_NUM_UNDER_WAY` that have at most bucket_bytes together. The iterator must
    not overwrite a tensor that it has yielded.

    Raises PlanMismatch with the first difference, on every rank and before any byte is sent, where a receiver expects
    something else or refuses; ValueError where `tensors` does not match the manifest; and TransferFailed naming rank,
    phase and tensor when a rank is gone or fails, or the deadline passes. After a failure past the plan the group is
    broken.
    """
    if group.rank != 0:
        raise ValueError(f"rank 0 sends, this is {group.at('send_update')}")
    _check_names(manifest.tensors)
    deadline = Deadline.after(timeout_s)
    group.check_usable()
    plan = TransferPlan.of(group, manifest, bucket_bytes)
    number, blame = group.num_updates, "interrupted"
    _propose(group, number, plan, deadline)
    failed = True
    try:
        with open_pipeline(group, deadline, len(plan.broadcasts), plan.bucket_bytes) as pipeline:
            _send(pipeline, plan, tensors)
        failed = False
    except TransferFailed as error:
        blame = f"{error}{_blame(group, number)}"
        raise TransferFailed(blame) from error
    except ValueError as error:
        blame = str(error)
        raise
    finally:
        if failed:
            _report(group, f"{number}/failed", f"{group.at('sending')}: {blame}", deadline)
            _linger(group, number)
    _collect_receipts(group, number, deadline)


def _check_names(specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ValueError(f"named more than once: {', '.join(twice)}")


def _receivers(group: WeightGroup) -> range:
    return range(1, group.world_size)


def _propose(group: WeightGroup, number: int, plan: TransferPlan, deadline: Deadline) -> None:
    """Publish the plan, read every rank's verdict, and report the decision to all of them."""
    where = group.at("agreeing on the plan", _first_name(plan.manifest.tensors))
    refusal: WeightSyncError | None = None
    silent: list[str] = []
    try:
        group.keys.put(f"{number}/plan", plan.to_json(), deadline)
    except RuntimeError as error:
        raise TransferFailed(f"{where}: {error}") from error
    for rank in _receivers(group):
        try:
            verdict = group.keys.get(f"{number}/verdict/{rank}", deadline)
        except RuntimeError as error:
            silent.append(f"no verdict of rank {rank}: {error}")
        else:
            refusal = refusal or (PlanMismatch(verdict) if verdict else None)
    if silent and refusal is None:
        refusal = TransferFailed(f"{where}: {'; '.join(silent)}")
    group.num_updates += 1
    try:
        group.keys.put(f"{number}/go", "" if refusal is None else f"{type(refusal).__name__}:{refusal}", deadline)
    except RuntimeError as error:
        refusal = refusal or TransferFailed(f"{where}: {error}")
    if refusal is not None:
        _linger(group, number)
        raise refusal


def _send(pipeline: Pipeline, plan: TransferPlan, tensors: NamedTensors) -> None:
    """Broadcast the plan's buckets as their tensors come. Changes only the group's buffers."""
    pieces: dict[str, list[tuple[BucketPlan, int]]] = {spec.name: [] for spec in plan.manifest.tensors}
    for bucket in plan.broadcasts:
        for index, piece in enumerate(bucket.pieces):
            pieces[piece.name].append((bucket, index))
    given = iter(tensors)
    for left, spec in reversed(list(enumerate(reversed(plan.manifest.tensors)))):
        name, tensor = next(given, (None, None))
        if name is None or tensor is None or TensorSpec.of(name, tensor) != spec:
            found = "nothing" if name is None or tensor is None else TensorSpec.of(name, tensor).describe()
            raise ValueError(f"the manifest says {spec.describe()}, the tensors gave {found}")
        # Checked before the last broadcast, so that no receiver has everything when this fails.
        if not left and (extra := next(given, None)) is not None:
            raise ValueError(f"the tensors gave {extra[0]}, which is past the end of the manifest")
        source = byte_view(tensor)
        for bucket, index in pieces[name]:
            piece = bucket.pieces[index]
            part = source[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            if len(bucket.pieces) > 1:
                if index == 0:
                    packed = pipeline.buffer("packed", bucket.num_bytes)
                packed[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].copy_(part)
                part = packed
            elif part.device != pipeline.group.device:
                part = pipeline.buffer("piece", bucket.num_bytes).copy_(part)
            if index == len(bucket.pieces) - 1 and bucket.num_bytes:
                pipeline.start(part, bucket.names)


def _collect_receipts(group: WeightGroup, number: int, deadline: Deadline) -> None:
    wrong = []
    for rank in _receivers(group):
        try:
            receipt = group.keys.get(f"{number}/done/{rank}", deadline)
        except RuntimeError as error:
            receipt = f"no receipt of rank {rank}: {error}"
        if receipt:
            wrong.append(receipt)
    if wrong:
        group.abort("a receiver failed")
        raise TransferFailed(f"{group.at('waiting for receipts')}: {'; '.join(wrong)}")
    ranks = _receivers(group)
    stale = [f"{number}/plan", f"{number}/go"]
    group.keys.delete(stale + [f"{number}/{kind}/{rank}" for kind in ("verdict", "done") for rank in ranks])


def _linger(group: WeightGroup, number: int) -> None:
    """Give the other ranks time to read the failure: the caller may end this process, which hosts the store."""
    try:
        group.keys.wait([f"{number}/heard/{rank}" for rank in _receivers(group)], Deadline.after(_BLAME_S))
    except RuntimeError:
        return  # a rank that is gone or late need not be informed


def _blame(group: WeightGroup, number: int) -> str:
    """Describe the ranks that did not answer after a failed broadcast, and the other ranks' reports. The group is gone,
    the store is not."""
    soon, said = Deadline.after(_BLAME_S), []
    for rank in _receivers(group):
        try:
            said.append(group.keys.get(f"{number}/done/{rank}", soon) or f"rank {rank} has everything")
        except RuntimeError:
            said.append(f"rank {rank} does not answer")
    return f" [{'; '.join(said)}]"


# -- our own receiver --------------------------------------------------------------------------------------------------


def receive_update(
    group: WeightGroup, sink: Sink, timeout_s: float = 300.0, expected: Manifest | None = None
) -> Manifest:
    """Receive an update as a rank other than 0: fill `sink` and return the sender's manifest. Only the sender knows
    whether the other receivers have everything too.

    expected: the manifest announced to this rank; its tensors, and its version where both have one, must agree.

    Raises PlanMismatch where some rank's plan differs, ValueError where this rank's sink refuses the tensors (both
    before any byte is sent; the group stays usable), and TransferFailed naming rank, phase and tensor otherwise. An
    exception of the sink while it is filled is raised as it is, and reported to the sender. Then the group is broken.
    """
    if group.rank == 0:
        raise ValueError(f"rank 0 sends, this is {group.at('receive_update')}")
    deadline = Deadline.after(timeout_s)
    group.check_usable()
    manifest, plan = _agree(group, sink, expected, deadline)
    number, receipt = group.num_updates - 1, f"{group.at('receiving')}: interrupted"
    try:
        with open_pipeline(group, deadline, len(plan.broadcasts), plan.bucket_bytes) as pipeline:
            _receive(pipeline, plan, sink)
        receipt = ""
    except (WeightSyncError, ValueError) as error:
        receipt = str(error)
        if not isinstance(error, TransferFailed):
            _report(group, f"{number}/heard/{group.rank}", "", deadline)
            raise
    finally:
        _report(group, f"{number}/done/{group.rank}", receipt, deadline)
    if receipt:
        raise TransferFailed(receipt + _reason(group, number))
    return manifest


def _reason(group: WeightGroup, number: int) -> str:
    """Return the sender's reason for a broadcast that failed here, if the sender is still there."""
    soon = Deadline.after(2 * _BLAME_S)
    try:
        reason = group.keys.get(f"{number}/failed", soon)
    except RuntimeError:
        return " [rank 0 does not answer]"
    _report(group, f"{number}/heard/{group.rank}", "", soon)
    return f" [{reason}]"


def _agree(
    group: WeightGroup, sink: Sink, expected: Manifest | None, deadline: Deadline
) -> tuple[Manifest, TransferPlan]:
    """Read the sender's plan, give a verdict, and wait for the sender's decision."""
    where = group.at("agreeing on the plan", _first_name(expected.tensors) if expected else None)
    try:
        proposal = group.keys.get(f"{group.num_updates}/plan", deadline)
        while group.keys.has(f"{group.num_updates}/go", deadline):  # given up before this rank came
            group.num_updates += 1
            proposal = group.keys.get(f"{group.num_updates}/plan", deadline)
    except RuntimeError as error:
        raise TransferFailed(f"{where}: no plan of rank 0: {error}") from error
    number, verdict = group.num_updates, f"{where}: interrupted"
    plan: TransferPlan | None = None
    try:
        plan = _judge(group, proposal, expected)
        sink.expect(plan.manifest.tensors)
        verdict = ""
    except PlanMismatch as error:
        verdict = str(error)  # raised after rank 0 has published the decision for all ranks
    except (ValueError, WeightSyncError) as error:
        verdict = f"{group.at('agreeing on the plan')}: {error}"
        _report(group, f"{number}/heard/{group.rank}", "", deadline)
        raise
    finally:
        group.num_updates += 1
        _report(group, f"{number}/verdict/{group.rank}", verdict, deadline)
    if plan is not None:
        where = group.at("agreeing on the plan", _first_name(plan.manifest.tensors))
    try:
        word = group.keys.get(f"{number}/go", deadline)
    except RuntimeError as error:
        raise TransferFailed(f"{where}: no word of rank 0 after the plan: {error}") from error
    if word:
        _report(group, f"{number}/heard/{group.rank}", "", deadline)
        kind, _, message = word.partition(":")
        raise (PlanMismatch if kind == "PlanMismatch" else TransferFailed)(message)
    assert plan is not None  # rank 0 does not go on without every rank's consent
    return plan.manifest, plan


def _judge(group: WeightGroup, proposal: str, expected: Manifest | None) -> TransferPlan:
    """Return the sender's plan if it equals this rank's own plan. Raises PlanMismatch with the first difference."""
    ours, theirs = f"rank {group.rank}", "rank 0"
    sent = json.loads(proposal)
    for what, mine in {"protocol": PROTOCOL, "group": group.name, "world_size": group.world_size}.items():
        if sent.get(what) != mine:
            raise PlanMismatch(f"{what}: {ours} has {mine!r}, {theirs} has {sent.get(what)!r}")
    manifest = Manifest.checked(tensors_of(sent["tensors"]), sent)
    if expected is not None:
        if found := differences(expected.tensors, manifest.tensors, f"{ours} expects", f"{theirs} sends"):
            raise PlanMismatch(found[0])
        if None not in (expected.version, manifest.version) and expected.version != manifest.version:
            raise PlanMismatch(f"version: {ours} expects {expected.version!r}, {theirs} sends {manifest.version!r}")
    plan = TransferPlan.of(group, manifest, sent["bucket_bytes"])
    if plan.digest != sent["digest"]:
        raise PlanMismatch(f"{ours} and {theirs} cut the same tensors into different broadcasts")
    return plan


def _receive(pipeline: Pipeline, plan: TransferPlan, sink: Sink) -> None:
    """Fill the sink, the plan's buckets in order. Unpacks one bucket while the next is being received."""
    for bucket in plan.broadcasts:
        if len(bucket.pieces) == 1 and bucket.num_bytes:
            piece = bucket.pieces[0]
            target, then = _destination(pipeline, sink, piece.name, piece.tensor_offset, piece.num_bytes)
            pipeline.start(target, bucket.names, then)
            continue
        staged = pipeline.buffer("packed", bucket.num_bytes)
        ranges = [(p.name, p.tensor_offset, p.bucket_offset, p.num_bytes) for p in bucket.pieces]
        write = partial(_write_all, sink, ranges, staged)
        if bucket.num_bytes:
            pipeline.start(staged, bucket.names, write)
        else:
            write()


def _destination(
    pipeline: Pipeline, sink: Sink, name: str, offset: int, num_bytes: int
) -> tuple[Tensor, Callable[[], object] | None]:
    """Return the memory that receives bytes of one tensor, and the work that remains when they have arrived."""
    lent = sink.destination(name, offset, num_bytes)
    if lent is not None and lent.device == pipeline.group.device:
        return lent, None
    staged = pipeline.buffer("piece", num_bytes)
    return staged, partial(sink.write, name, offset, staged) if lent is None else partial(lent.copy_, staged)


def _write_all(sink: Sink, ranges: Sequence[tuple[str, int, int, int]], staged: Tensor) -> None:
    """Write ranges of `staged` to the sink. ranges: name, offset in the tensor, offset in `staged`, number of bytes."""
    for name, tensor_offset, offset, num_bytes in ranges:
        sink.write(name, tensor_offset, staged[offset : offset + num_bytes])


def _report(group: WeightGroup, key: str, text: str, deadline: Deadline) -> None:
    """Report to the other end. If that fails, the other end is gone already, or will notice at its deadline."""
    try:
        group.keys.put(key, text, deadline)
    except RuntimeError as error:
        group.abort(f"the store cannot be reached: {error}")


def _first_name(specs: Sequence[TensorSpec]) -> str | None:
    return specs[0].name if specs else None
