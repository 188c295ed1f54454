"""The weights of an engine over all ranks that share it: names, digests and values of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from ...rollout.engine import Engine
from ...rollout.loop.weight_samples import weight_samples
from ...rollout.sharding.part import skeleton_of
from ...weight_sync.digests.model_digest import model_root, tensor_roots
from ...weight_sync.digests.shard_digest import local_digests, merged_roots, require_whole_cells
from ...weight_sync.layout.shard_bytes import Shard
from ...weight_sync.manifest import TensorSpec
from ...weight_sync.same_host.handover import listed
from ...weight_sync.transaction.transaction import Coverage, Undo, WeightTransaction
from .all_ranks import Replica


class ReplicaWeights:
    """Read the weights and change nothing. Where several ranks hold the model every method but `resident_name` and
    `transaction` is called on all of them."""

    def __init__(self, engine: Engine, replica: Replica) -> None:
        """Check the ranks' shares. Raises ValueError where ranks share the model in a way in which its digest cannot be
        computed."""
        self._engine, self._replica = engine, replica
        if not replica.is_alone:
            require_whole_cells(engine.model.shards)
        self.renamed()

    def renamed(self) -> None:
        """Read the tensors' further names, which an adapter changes."""
        self._tied = self._engine.model.tied_names()

    def names(self) -> list[str]:
        """Return the resident names of what the model digest covers: the parameters of the whole model, and the buffers
        that belong to its checkpoints."""
        model = self._engine.model
        here = [name for name, _ in model.buffers(stored=True)]
        return [*self.parameter_names(), *(here if self._replica.is_alone else model.division.buffer_specs)]

    def parameter_names(self) -> list[str]:
        """Return the resident names of the whole model's parameters, which a full update has to write."""
        if self._replica.is_alone:
            return [name for name, _ in self._engine.weights.resident_tensors()]
        return list(self._engine.model.full_specs)

    def resident_name(self, name: str) -> str:
        """Return the name under which a tied parameter is resident."""
        return self._tied.get(name, name)

    def require_all(self, specs: Sequence[TensorSpec], source: str) -> None:
        """Raise ValueError naming the model's parameters that are not among these tensors. Does nothing for a model
        with adapters: a folder holds its base alone, or an adapter."""
        if self._engine.model.adapters.roots():
            return
        given = {self.resident_name(spec.name) for spec in specs}
        if missing := [name for name in self.parameter_names() if name not in given]:
            raise ValueError(
                f"{source} lacks {len(missing)} parameters of the model: {listed(missing)}; to write a part of the "
                'weights, begin a session of coverage "partial" first'
            )

    def skeleton_for(self, specs: Sequence[TensorSpec]) -> PreTrainedModel | None:
        """Return the whole module, perhaps without memory, where a folder of these tensors has other names than it, as
        published ones may; None where it has no others, and where none can be converted."""
        model = self._engine.model
        known = {*self.names(), *self._tied, *(name for name, _ in model.buffers())}
        if model.adapters.roots() or all(spec.name in known for spec in specs):
            return None
        skeleton = model.module if self._replica.is_alone else skeleton_of(model.config, model.dtype)
        return skeleton if get_model_conversion_mapping(skeleton) else None

    def digests(self, names: Sequence[str]) -> tuple[Mapping[str, object], dict[str, bytes]]:
        """Return this rank's digests of its resident tensors, and the tensor roots over all ranks. A root covers the
        name under which it is asked for. A tensor has no root where ranks that hold the same bytes of it do not
        agree."""
        model = self._engine.model
        resident = dict([*model.resident_tensors(), *model.buffers()])
        here = {name: resident[r] for name in names if (r := self.resident_name(name)) in resident}
        if self._replica.is_alone:
            roots = tensor_roots(here.items())
            return {name: root.hex() for name, root in roots.items()}, roots
        shards = {name: model.shards[self.resident_name(name)] for name in here}
        whole = {**model.full_specs, **model.division.buffer_specs}
        known = {name: whole.get(self.resident_name(name)) for name in names}
        specs = [TensorSpec(name, *spec) if spec else TensorSpec.of(name, here[name]) for name, spec in known.items()]
        own = local_digests(here, shards)
        return own, merged_roots(specs, self._replica.gather(own))

    def model_digest(self, roots: Mapping[str, bytes]) -> str:
        """Return the model digest over tensor roots. It covers the state of adapters too: switched off or scaled, the
        same bytes are another model."""
        return model_root([*roots.items(), *self._engine.model.adapters.roots().items()])

    def frozen_marks(self, *, of_owned: bool) -> dict[str, object]:
        """Return a mark of each parameter that a trainer keeps frozen beside trained ones, or, with `of_owned`, of an
        engine's own. Equal marks mean that no operation of torch has written the parameter in between. Of writes
        that torch does not count, as through `.data`, merges of adapters are seen and those that change a sample.
        """
        model = self._engine.model
        if not self._replica.is_alone or (model.owned and not of_owned):
            return {}
        tensors = list(model.resident_tensors())
        if not model.owned and not any(tensor.requires_grad for _, tensor in tensors):
            return {}
        merged = model.adapters.merged()
        marked = [(name, tensor) for name, tensor in tensors if not tensor.requires_grad and not tensor.is_inference()]
        samples = weight_samples(marked)
        return {
            name: (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), merged, samples[name])
            for name, tensor in marked
        }

    def first_entries(self, name: str, limit: int) -> Tensor:
        """Return the first `limit` entries along each dimension of a whole parameter, on the CPU. Raises ValueError for
        an unknown name."""
        model, resident = self._engine.model, self.resident_name(name)
        tensor = dict(self._engine.weights.resident_tensors()).get(resident)
        if self._replica.is_alone:
            if tensor is None:
                raise ValueError(f"no parameter is named {name!r}")
            return tensor.detach()[tuple(slice(limit) for _ in tensor.shape)].cpu()
        if resident not in model.full_specs:
            raise ValueError(f"no parameter is named {name!r}")
        dtype, shape = model.full_specs[resident]
        pieces = [] if tensor is None else _first_entries(tensor.detach(), model.shards[resident], limit)
        value = torch.zeros([min(limit, size) for size in shape], dtype=dtype)
        for dim, start, stop, values in chain(*self._replica.gather(pieces)):
            part = value.narrow(dim, start, stop - start) if shape else value
            part.copy_(torch.tensor(values, dtype=dtype).view(part.shape))
        return value

    def transaction(self, coverage: Coverage, undo: Undo) -> WeightTransaction:
        """Open a transaction that writes this rank's part of the weights."""
        model = self._engine.model
        resident = list(model.resident_tensors())
        shards: Mapping[str, Shard] = {}
        elsewhere: list[TensorSpec] = []
        optional_elsewhere: list[TensorSpec] = []
        buffers = list(model.buffers())
        if not self._replica.is_alone:
            here = {name for name, _ in (*resident, *buffers)}
            shards = model.shards
            elsewhere = [TensorSpec(name, *spec) for name, spec in model.full_specs.items() if name not in here]
            optional = model.division.buffer_specs.items()
            optional_elsewhere = [TensorSpec(name, *spec) for name, spec in optional if name not in here]
        return WeightTransaction(
            resident, optional=buffers, aliases=self._tied, coverage=coverage, undo=undo, shards=shards,
            elsewhere=elsewhere, optional_elsewhere=optional_elsewhere,
        )  # fmt: skip


def _first_entries(part: Tensor, shard: Shard, limit: int) -> list[list[object]]:
    """Return this rank's share of the first `limit` entries along each dimension: lists of dimension, start, stop and
    values."""
    if not shard.full_shape:
        return [[0, 0, 1, part.tolist()]]
    found, done = [], 0
    for start, stop in shard.ranges:
        end = min(stop, limit)
        if start < end:
            piece = part.narrow(shard.dim, done, end - start)
            piece = piece[tuple(slice(limit) for _ in piece.shape)]
            found.append([shard.dim, start, end, piece.cpu().tolist()])
        done += stop - start
    return found
