"""The names and pieces in which a model is published, and their places in its module.

transformers' own conversion mapping says where they belong: mixtures of experts are published with a matrix for each
expert, where the module has one parameter of all:

    module     experts.gate_up_proj [E, 2 F, H]   | gate of 0 | up of 0 | gate of 1 | up of 1 | ...
    published  experts.1.up_proj.weight [F, H]                                      |---------|
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from .shards import Range, Shard

# The head of Inkling 2, which is published with rows of padding: an operation of transformers from 5.24 on.
_UNPADS = getattr(core_model_loading, "Inkling2UnpadVocab", None)


@dataclass(frozen=True)
class Conversion:
    """The way of a published tensor into a tensor of the module: renamed only, or a piece of a stack, of a
    concatenation, or of stacks that are concatenated."""

    name: str  # in the module
    renamed: str  # the published name, after transformers' renamings
    patterns: tuple[str, ...] = ()  # of the concatenated groups, in their order; none: renamed only
    group: int = 0  # of the piece, in `patterns`
    stacked: bool = False
    cat_dim: int = 0  # of the stacked tensors, which have a dimension more than each
    others: str = ""  # the operations of a conversion that is neither: it has no place
    pairs_dim: int | None = None  # dimension whose two halves lie interleaved in the published tensor, a case of these
    is_padded: bool = False  # whether rows of padding lie behind the module's, another case of these


@dataclass(frozen=True)
class PublishedPiece:
    """A published tensor that is one run of the elements of a tensor of the module."""

    name: str  # as it is published
    whole: str  # the module's tensor
    shape: tuple[int, ...]
    offset: int  # of its first element in the module's tensor

    def part(self, tensor: Tensor, shard: Shard) -> tuple[Tensor, Shard]:
        """Return a rank's part of the piece, a view, and its place in the piece. tensor, shard: the rank's part of the
        module's tensor."""
        if self.shape == shard.full_shape:
            return tensor, shard
        offset = self.offset
        if len(self.shape) < len(shard.full_shape):
            index, offset = divmod(offset, math.prod(shard.full_shape[1:]))
            tensor, shard = _one_of_stack(tensor, shard, index)
            if self.shape == shard.full_shape:
                return tensor, shard
        first = offset // math.prod(shard.full_shape[1:])
        last = first + self.shape[0]
        if shard.dim != 0:
            return tensor[first:last], Shard(self.shape, shard.dim, shard.ranges)
        here, ranges = _within(shard.ranges, first, last)
        return tensor[here : here + _length(ranges)], Shard(self.shape, 0, ranges)


class PublishedNames:
    """Find the places of published tensors in one module. Thread-safe."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        """Read transformers' mapping. skeleton: the whole module, with or without memory."""
        transforms = get_model_conversion_mapping(skeleton)
        self._by_pattern = {p: c for c in transforms if isinstance(c, WeightConverter) for p in c.source_patterns}
        self._converters = list(dict.fromkeys(self._by_pattern.values()))
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._by_order = [t for t in self._renamings if hasattr(t, "_active")]  # by a name that came before
        self._prefix = skeleton.base_model_prefix
        # Shapes alone: the tensors themselves would keep memory that is released.
        self._shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
        self._pieces: dict[str, PublishedPiece] = {}

    def conversion(self, key: str) -> Conversion:
        """Return how a published tensor gets into the module, which may lack the name that is found."""
        renamed = rename_source_key(key, self._renamings, [])[0]
        name, pattern = rename_source_key(renamed, [], self._converters, self._prefix, self._shapes)
        if name not in self._shapes and key in self._shapes:
            return Conversion(key, key)  # the renamings are of other names, as transformers' loader sees it too
        if pattern is None:
            return Conversion(name, renamed)
        converter = self._by_pattern[pattern]
        patterns, kinds = tuple(converter.source_patterns), [type(operation) for operation in converter.operations]
        stacked = kinds[:1] == [MergeModulelist] and cast(MergeModulelist, converter.operations[0]).dim == 0
        others = "" if kinds and kinds[stacked:] in ([], [Concatenate]) else ", ".join(kind.__name__ for kind in kinds)
        cat_dim = 1
        if kinds[-1] is Concatenate:
            cat_dim = cast(Concatenate, converter.operations[-1]).dim + (not stacked)
        pairs_dim = None
        if kinds == [Interleave] and not (operation := cast(Interleave, converter.operations[0])).inverse:
            pairs_dim = operation.dim
        is_padded = kinds == [_UNPADS] and not getattr(converter.operations[0], "inverse", False)
        group = patterns.index(pattern)
        return Conversion(name, renamed, patterns, group, stacked, cat_dim, others, pairs_dim, is_padded)

    def piece(self, key: str) -> PublishedPiece | None:
        """Return the place of a published tensor; None for a name of the module's own, and for an unknown one.

        Raises ValueError naming a tensor that would have to be converted otherwise, or that is not one run of elements
        at a place which its name alone tells.
        """
        if key in self._shapes:
            return None
        if key not in self._pieces:
            conversion = self.conversion(key)
            if conversion.name not in self._shapes:
                return None
            self._pieces[key] = self._placed(key, conversion)
        return self._pieces[key]

    def siblings(self, key: str) -> tuple[PublishedPiece, ...]:
        """Return all pieces of the tensor that `key` is a piece of, itself among them, in their order; none where their
        names do not follow from this one."""
        conversion, own = self.conversion(key), self.piece(key)
        if own is None or not conversion.patterns:
            return ()
        shape, index = self._shapes[conversion.name], _index_of(conversion)
        text = _text_of(conversion.patterns[conversion.group], index)
        if key.count(text) != 1:
            return ()
        indices = range(shape[0]) if conversion.stacked else (None,)
        keys = [key.replace(text, _text_of(pattern, at)) for at in indices for pattern in conversion.patterns]
        found = [piece for one in keys if (piece := self.piece(one)) is not None and piece.whole == own.whole]
        return tuple(found) if own in found and len(found) == len(keys) else ()

    def _placed(self, key: str, conversion: Conversion) -> PublishedPiece:
        shape = self._shapes[conversion.name]
        if any(renaming.compiled_sources.search(key) for renaming in self._by_order):
            raise ValueError(f"{key}: its place depends on the names before it; send {conversion.name}")
        if not conversion.patterns:
            return PublishedPiece(key, conversion.name, shape, 0)
        first, num_groups = 0, len(conversion.patterns)
        inside = shape[1:] if conversion.stacked else shape
        is_run = conversion.cat_dim == 1 and len(inside) > 0 and inside[0] % num_groups == 0
        if conversion.others or (num_groups > 1 and not is_run) or (not conversion.stacked and num_groups == 1):
            how = conversion.others or "pieces that differ in size, or are no runs of elements"
            raise ValueError(f"{key}: cannot be placed in the model's {conversion.name} ({how}): send that one")
        if conversion.stacked:
            index = _index_of(conversion)
            if index is None or index >= shape[0]:
                raise ValueError(f"{key}: the model's {conversion.name} is {list(shape)} and has no such piece")
            first = index * math.prod(inside)
        piece = (inside[0] // num_groups, *inside[1:]) if num_groups > 1 else inside
        return PublishedPiece(key, conversion.name, piece, first + conversion.group * math.prod(piece))


def _index_of(conversion: Conversion) -> int | None:
    """Return the piece's number in its stack, which is a part of its name."""
    pattern = conversion.patterns[conversion.group]
    if pattern.count("*.") != 1:
        return None
    found = re.search(pattern.replace("*.", r"(?P<index>0|[1-9]\d{0,8})\."), conversion.renamed)
    return None if found is None else int(found["index"])


def _text_of(pattern: str, index: int | None) -> str:
    """Return the text that a pattern stands for in the names of pieces with this number."""
    return pattern.replace("\\.", ".").replace("*.", f"{index}.")


def _one_of_stack(tensor: Tensor, shard: Shard, index: int) -> tuple[Tensor, Shard]:
    """Return a rank's part of one tensor of a stack, and its place in that one."""
    inside = shard.full_shape[1:]
    if shard.dim != 0:
        return tensor[index], Shard(inside, shard.dim - 1, shard.ranges)
    here, ranges = _within(shard.ranges, index, index + 1)
    return (tensor[here], Shard.whole(inside)) if ranges else (tensor.new_empty(0, *inside[1:]), Shard(inside, 0, ()))


def _within(ranges: tuple[Range, ...], first: int, last: int) -> tuple[int, tuple[Range, ...]]:
    """Return the part of [first, last) that a rank with these ranges holds: its place in the rank's part, and its
    ranges, from `first` on."""
    before = sum(max(0, min(stop, first) - start) for start, stop in ranges)
    clipped = [(max(start, first) - first, min(stop, last) - first) for start, stop in ranges]
    return before, tuple((start, stop) for start, stop in clipped if start < stop)


def _length(ranges: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in ranges)
