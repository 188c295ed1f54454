"""Folders whose tensors have other names, or lie in other pieces, than in the module: as most published mixtures of
experts, which name a matrix for each expert where transformers' module has one parameter of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedModel

from ...rollout.sharding.checkpoint_slices import CheckpointSlices
from ...rollout.sharding.shards import Shard
from ...weight_sync.deadline import Deadline
from ...weight_sync.digests.model_digest import tensor_roots
from ...weight_sync.disk.folder import DiskPlan
from ...weight_sync.disk.plan_reader import PlanReader
from ...weight_sync.errors import DigestMismatch, TransferFailed
from ...weight_sync.layout.bucket import byte_view
from ...weight_sync.layout.sink import Sink
from ...weight_sync.manifest import TensorSpec, dtype_name


def load_published(
    plan: DiskPlan,
    skeleton: PreTrainedModel,
    sink: Sink,
    refuse_part: Callable[[Sequence[TensorSpec]], None],
    timeout_s: float,
    *,
    verify: bool,
) -> Sequence[TensorSpec]:
    """Read a folder's tensors, as transformers would join them for this module, into `sink`; returns their specs.

    skeleton: the whole module, with or without memory. refuse_part: called before anything is written; may raise
    ValueError. verify: compare the pieces with the folder's own digests, if it has any, before anything is written;
    raises DigestMismatch. Raises ValueError likewise for other dtypes than the module's and conversions other than
    stacking and concatenating, and, while it writes, for other shapes; TransferFailed after the deadline and for a file
    that changed since its header was read.
    """
    deadline = Deadline.within(timeout_s)
    with CheckpointSlices(plan.folder, skeleton, lambda: PlanReader(plan)) as slices:
        specs = _specs(plan, skeleton, slices)
        refuse_part(specs)
        sink.expect(specs)
        if verify and plan.manifest is not None:
            _compare(slices, plan.manifest.digests)
        for spec in specs:
            if deadline.has_passed:
                raise TransferFailed(f"disk: the deadline passed before {spec.describe()} was read")
            tensor = slices.read(spec.name, Shard.whole(spec.shape))
            sink.write(spec.name, 0, byte_view(tensor.contiguous()))
    plan.check_unchanged()
    return specs


def _compare(slices: CheckpointSlices, digests: Mapping[str, str]) -> None:
    """Compare the folder's tensors with digests under its own names: those of joined ones are not known."""
    one_by_one = ((key, tensor_roots([(key, slices.stored(key))])[key].hex()) for key in digests)
    if differing := [key for key, root in one_by_one if root != digests[key]]:
        raise DigestMismatch(differing, "the folder's files are not those that were saved")


def _specs(plan: DiskPlan, skeleton: PreTrainedModel, slices: CheckpointSlices) -> list[TensorSpec]:
    """Return the joined tensors. One that the module lacks has the spec of its first piece: the sink refuses it."""
    stored = {spec.name: spec for spec in plan.specs}
    own = skeleton.state_dict(keep_vars=True)
    found, wrong = [], []
    for name in slices.names():
        pieces = [stored[key] for key in slices.keys_of(name)]
        if name not in own:
            found.append(TensorSpec(name, pieces[0].dtype, pieces[0].shape))
            continue
        found.append(TensorSpec.of(name, own[name]))
        wrong += [
            f"{piece.name} is {dtype_name(piece.dtype)}, and {name} {dtype_name(own[name].dtype)}"
            for piece in pieces
            if piece.dtype != own[name].dtype
        ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{plan.folder} has other dtypes than the engine: {'; '.join(wrong[:3])}{more}")
    return found
