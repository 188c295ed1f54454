"""The weights of an engine over all ranks that share it: names, digests and values of whole tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from ...rollout.engine import Engine
from ...rollout.loop.weight_samples import weight_samples
from ...rollout.sharding.published_names import PublishedNames, PublishedPiece
from ...rollout.sharding.shards import Shard
from ...rollout.sharding.skeleton import skeleton_of
from ...weight_sync.digests.model_digest import model_root, tensor_roots
from ...weight_sync.digests.shard_digest import local_digests, merged_roots, require_whole_cells
from ...weight_sync.manifest import TensorSpec
from ...weight_sync.same_host.handover import listed
from ...weight_sync.transaction.in_place import is_same_memory
from ...weight_sync.transaction.transaction import Coverage, Undo, WeightTransaction
from .all_ranks import Replica


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor, or of a published piece of one."""

    tensor: Tensor | None  # None: it holds none of it
    shard: Shard
    dtype: torch.dtype


class ReplicaWeights:
    """Read the weights and change nothing. Where several ranks hold the model every method but `resident_name`,
    `piece`, `siblings` and `transaction` is called on all of them."""

    def __init__(self, engine: Engine, replica: Replica) -> None:
        """Check the ranks' shares. Raises ValueError where ranks share the model in a way in which its digest cannot be
        computed."""
        self._engine, self._replica = engine, replica
        if not replica.is_alone:
            require_whole_cells(engine.model.shards)
        self.renamed()

    def renamed(self) -> None:
        """Read the tensors' names, which an adapter changes."""
        model = self._engine.model
        self._tied = model.tied_names()
        self._known = {*self.names(), *self._tied, *(name for name, _ in model.buffers())}
        self._published: PublishedNames | None = None
        self._has_read_published = False  # they are read when a name is none of the others

    def _follow_ties(self) -> None:
        """Read the names anew where the trainer has tied or untied parameters of its module."""
        model = self._engine.model
        if not model.owned and model.tied_names() != self._tied:
            self.renamed()

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
        """Return the name under which a tied parameter is resident, or one that `name` is a published piece of. Returns
        an unknown name as it is."""
        piece = self._piece_if_any(name)
        whole = name if piece is None else piece.whole
        return self._tied.get(whole, whole)

    def piece(self, name: str) -> PublishedPiece | None:
        """Return the place of a tensor that published models have under another name, or in other pieces; see
        `layout.pieces.Pieces`."""
        published = None if name in self._known else self._published_names()
        return None if published is None else published.piece(name)

    def siblings(self, name: str) -> Sequence[PublishedPiece]:
        """Return all pieces of the same tensor; see `layout.pieces.Pieces`."""
        published = self._published_names()
        return () if published is None else published.siblings(name)

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
        return None if all(spec.name in self._known for spec in specs) else self._skeleton()

    def digests(self, names: Sequence[str]) -> tuple[Mapping[str, object], dict[str, bytes]]:
        """Return this rank's digests of its resident tensors, or of their published pieces, and the tensor roots over
        all ranks. A root covers the name under which it is asked for. A tensor has no root where ranks that hold the
        same bytes of it do not agree."""
        self._follow_ties()
        parts = self._parts(names)
        here = {name: part.tensor for name, part in parts.items() if part.tensor is not None}
        if self._replica.is_alone:
            roots = tensor_roots(here.items())
            return {name: root.hex() for name, root in roots.items()}, roots
        own: dict[str, object] = {}

        def make() -> Mapping[str, object]:
            own.update(local_digests(here, {name: parts[name].shard for name in here}))
            return own

        specs = [TensorSpec(name, part.dtype, part.shard.full_shape) for name, part in parts.items()]
        return own, merged_roots(specs, self._replica.gather_made("digests", make))

    def of_first_rank(self, value: object) -> object:
        """Return the JSON value of the replica's first rank. A collective."""
        return self._replica.gather(value)[0]

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
        self._follow_ties()
        part = self._parts([name], buffers=False).get(name)
        if part is None:
            raise ValueError(f"no parameter is named {name!r}")
        if self._replica.is_alone:
            assert part.tensor is not None
            return part.tensor.detach()[tuple(slice(limit) for _ in part.tensor.shape)].cpu()
        shape = part.shard.full_shape
        pieces = [] if part.tensor is None else _first_entries(part.tensor.detach(), part.shard, limit)
        value = torch.zeros([min(limit, size) for size in shape], dtype=part.dtype)
        for dim, start, stop, values in chain(*self._replica.gather(pieces)):
            rows = value.narrow(dim, start, stop - start) if shape else value
            rows.copy_(torch.tensor(values, dtype=part.dtype).view(rows.shape))
        return value

    def transaction(self, coverage: Coverage, undo: Undo) -> WeightTransaction:
        """Open a transaction that writes this rank's part of the weights. Buffers that belong to no checkpoint, as
        rotary tables, are no part of the digest: they may be sent as they are, and are not written."""
        self._follow_ties()
        model = self._engine.model
        resident = list(model.resident_tensors())
        shards: Mapping[str, Shard] = {}
        elsewhere: list[TensorSpec] = []
        optional_elsewhere: list[TensorSpec] = []
        buffers = list(model.buffers())
        stored = {name for name, _ in model.buffers(stored=True)}
        if not self._replica.is_alone:
            here = {name for name, _ in (*resident, *buffers)}
            shards = model.shards
            elsewhere = [TensorSpec(name, *spec) for name, spec in model.full_specs.items() if name not in here]
            optional = model.division.buffer_specs.items()
            optional_elsewhere = [TensorSpec(name, *spec) for name, spec in optional if name not in here]
        return WeightTransaction(
            resident, optional=[(name, tensor) for name, tensor in buffers if name in stored],
            fixed=[(name, tensor) for name, tensor in buffers if name not in stored], aliases=self._tied,
            coverage=coverage, undo=undo, shards=shards, elsewhere=elsewhere, optional_elsewhere=optional_elsewhere,
            pieces=self,
        )  # fmt: skip

    def memory_of_others(self) -> Callable[[str, Tensor], bool]:
        """Return a function of a name and a tensor: whether the tensor lies in memory of the engine's weights, but not
        at the place of that name. A write of other weights changes it."""
        here = dict(chain(self._engine.model.resident_tensors(), self._engine.model.buffers()))
        spans: dict[torch.device, list[tuple[int, int]]] = {}
        for tensor in here.values():
            spans.setdefault(tensor.device, []).append(_span(tensor))
        for found in spans.values():
            found.sort()

        def is_of_others(name: str, tensor: Tensor) -> bool:
            if tensor.layout is not torch.strided or not tensor.numel() or tensor.device not in spans:
                return False
            own = here.get(name)
            if own is not None and is_same_memory(own, tensor):
                return False
            (start, stop), of_device = _span(tensor), spans[tensor.device]
            at = bisect_left(of_device, (stop, 0)) - 1
            if at < 0 or of_device[at][1] <= start:
                return False
            part = self._parts([name]).get(name)
            return part is None or part.tensor is None or not is_same_memory(part.tensor, tensor)

        return is_of_others

    def _piece_if_any(self, name: str) -> PublishedPiece | None:
        try:
            return self.piece(name)
        except ValueError:  # it has no place
            return None

    def _published_names(self) -> PublishedNames | None:
        if not self._has_read_published and self._engine.model.holds_weights:
            skeleton = self._skeleton()
            self._published = None if skeleton is None else PublishedNames(skeleton)
            self._has_read_published = True
        return self._published

    def _skeleton(self) -> PreTrainedModel | None:
        model = self._engine.model
        if model.adapters.roots():
            return None
        skeleton = model.module if self._replica.is_alone else skeleton_of(model.config, model.dtype)
        return skeleton if get_model_conversion_mapping(skeleton) else None

    def _parts(self, names: Sequence[str], *, buffers: bool = True) -> dict[str, _Part]:
        """Return this rank's parts of tensors, under the names asked for, without unknown ones."""
        model, alone = self._engine.model, self._replica.is_alone
        here = dict(chain(model.resident_tensors(), model.buffers() if buffers else ()))
        whole = {} if alone else {**model.full_specs, **(model.division.buffer_specs if buffers else {})}
        found = {}
        for name in names:
            piece, resident = self._piece_if_any(name), self.resident_name(name)
            tensor = here.get(resident)
            if tensor is None and resident not in whole:
                continue
            dtype, shape = whole.get(resident) or (cast(Tensor, tensor).dtype, tuple(cast(Tensor, tensor).shape))
            shard = Shard.whole(shape) if alone or tensor is None else model.shards[resident]
            if piece is not None and tensor is not None:
                tensor, shard = piece.part(tensor, shard)
                tensor = tensor if alone or tensor.numel() else None
            elif piece is not None:
                shard = Shard.whole(piece.shape)
            found[name] = _Part(tensor, shard, dtype)
        return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.itemsize if tensor.numel() else start


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
