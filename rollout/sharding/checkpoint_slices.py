"""A reader of tensor slices from a model folder, under the names of the module.

A folder may hold a parameter in pieces, for instance one matrix per expert (`published_names`): only the bytes of the
wanted slice are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from .published_names import PublishedNames
from .shards import Shard
from .stored_tensors import MappedFolder, StoredTensors


@dataclass
class _StoredParameter:
    """The pieces of a parameter in the folder: one tensor, of pairs or padded perhaps, several that are concatenated,
    or groups of tensors, stacked and then concatenated."""

    groups: dict[str, list[str]]  # by source pattern, in the order of the converter; keys of the folder
    stacked: bool
    cat_dim: int = 0  # of the stacked tensors, which have a dimension more than each
    pairs_dim: int | None = None  # dimension whose two halves lie interleaved in the folder
    is_padded: bool = False  # whether rows of padding lie behind those of the parameter


class CheckpointSlices:
    """An open model folder. A context manager: its files close at the end."""

    def __init__(
        self, path: str | Path, skeleton: PreTrainedModel, open_folder: Callable[[], StoredTensors] | None = None
    ) -> None:
        """Name the folder and the whole module. open_folder: makes the reader of the folder's tensors; None: they are
        mapped into memory (`MappedFolder`)."""
        self._path, self._skeleton = Path(path), skeleton
        self._stored = open_folder() if open_folder is not None else MappedFolder(self._path)
        self._pieces: dict[str, _StoredParameter] = {}  # by parameter name

    def __enter__(self) -> CheckpointSlices:
        with ExitStack() as opened:
            opened.enter_context(self._stored)
            self._map_names()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def holds(self, name: str) -> bool:
        return name in self._pieces

    def names(self) -> list[str]:
        """Return the names, in the module, of what the folder holds, without what the module's class says to ignore."""
        ignored = self._skeleton._keys_to_ignore_on_load_unexpected or ()
        return [name for name in self._pieces if not any(re.search(pattern, name) for pattern in ignored)]

    def keys_of(self, name: str) -> list[str]:
        """Return the folder's names of a tensor's pieces."""
        return [key for keys in self._pieces[name].groups.values() for key in keys]

    def stored(self, key: str) -> Tensor:
        """Read a tensor of the folder under its own name there."""
        return self._stored.read(key)

    def require(self, names: Iterable[str]) -> None:
        """Check that the folder holds these tensors. Raises ValueError naming every missing one."""
        if missing := [name for name in names if name not in self._pieces]:
            raise ValueError(f"model folder {str(self._path)!r} lacks {', '.join(missing)}")

    def read(self, name: str, shard: Shard) -> Tensor:
        """Read the shard of a parameter, and no other bytes. Raises ValueError if the folder's shape differs."""
        pieces = self._pieces[name]
        if pieces.stacked:
            return self._joined(name, pieces, shard)
        if len(pieces.groups) > 1:  # a stack of one
            shape = (1, *shard.full_shape)
            in_stack = Shard.whole(shape) if shard.is_whole else Shard(shape, shard.dim + 1, shard.ranges)
            return self._joined(name, pieces, in_stack)[0]
        keys = next(iter(pieces.groups.values()))
        if pieces.pairs_dim is not None:
            return self._from_pairs(name, keys[0], pieces.pairs_dim, shard)
        if pieces.is_padded:
            return self._first_rows(name, keys[0], shard)
        if len(keys) > 1:
            return self._concatenated(name, keys, pieces.cat_dim - 1, shard)
        return self._cut(name, keys[0], shard.full_shape, shard)

    def _concatenated(self, name: str, keys: list[str], dim: int, shard: Shard) -> Tensor:
        """Read the shard of a tensor whose pieces lie one after another along a dimension."""
        shapes = [self._shape(key) for key in keys]
        if sum(shape[dim] for shape in shapes) != shard.full_shape[dim]:
            raise ValueError(f"{name} is {list(shard.full_shape)}, but its pieces in the folder do not make that")
        if shard.dim != dim and not shard.is_whole:
            cuts = [Shard(shape, shard.dim, shard.ranges) for shape in shapes]
            return torch.cat([self._cut(name, *each) for each in zip(keys, shapes, cuts, strict=True)], dim)
        ranges = ((0, shard.full_shape[dim]),) if shard.is_whole else shard.ranges
        parts = []
        for start, stop in ranges:
            first = 0
            for key, shape in zip(keys, shapes, strict=True):
                begin, end = max(start - first, 0), min(stop - first, shape[dim])
                if begin < end:
                    parts.append(self._cut(name, key, shape, Shard(shape, dim, ((begin, end),))))
                first += shape[dim]
        return torch.cat(parts, dim)

    def _from_pairs(self, name: str, key: str, dim: int, shard: Shard) -> Tensor:
        """Read the shard of a tensor whose first half along a dimension is every other index of it in the folder."""
        shape, half = shard.full_shape, shard.full_shape[dim] // 2
        if shard.dim != dim:
            return (
                self._cut(name, key, shape, shard)
                .unflatten(dim, (half, 2))
                .transpose(dim, dim + 1)
                .flatten(dim, dim + 1)
            )
        parts = []
        for start, stop in shard.ranges:
            for second in (0, 1):
                begin, end = max(start - second * half, 0), min(stop - second * half, half)
                if begin < end:
                    pairs = self._cut(name, key, shape, Shard(shape, dim, ((2 * begin, 2 * end),)))
                    parts.append(pairs.unflatten(dim, (end - begin, 2)).select(dim + 1, second))
        return torch.cat(parts, dim)

    def _first_rows(self, name: str, key: str, shard: Shard) -> Tensor:
        """Read the shard of a tensor behind whose rows the folder has rows of padding."""
        (num_rows, *width), stored = shard.full_shape, self._shape(key)
        if stored[1:] != tuple(width) or stored[0] < num_rows:
            raise ValueError(f"{name}: the folder's {key} is {list(stored)}, and {list(shard.full_shape)} is no part")
        return self._cut(name, key, stored, Shard(stored, shard.dim, shard.ranges))[:num_rows]

    def _joined(self, name: str, pieces: _StoredParameter, shard: Shard) -> Tensor:
        """Read a stack [experts, ...], each group's pieces one range of cat_dim after another."""
        num_stacked, misfits = shard.full_shape[0], f"{name} is {list(shard.full_shape)}"
        counts = [len(keys) for keys in pieces.groups.values()]
        if counts != [num_stacked] * len(counts):
            raise ValueError(f"{misfits}, but the folder has {counts} pieces of it")
        widths = [self._shape(keys[0])[pieces.cat_dim - 1] for keys in pieces.groups.values()]
        out = torch.empty(shard.shape, dtype=self._skeleton.get_parameter(name).dtype)
        if len(widths) > 1 and sum(widths) != shard.full_shape[pieces.cat_dim]:
            raise ValueError(f"{misfits}, but its pieces in the folder do not make that")
        if shard.dim == 0 and not shard.is_whole:
            raise ValueError(f"{name}: stacked pieces cannot be cut along dimension 0")
        for index in range(num_stacked):
            parts, first = [], 0
            for keys, width in zip(pieces.groups.values(), widths, strict=True):
                span = width if len(widths) > 1 else shard.full_shape[pieces.cat_dim]
                shape = [*shard.full_shape[1:]]
                shape[pieces.cat_dim - 1] = span
                wanted = _within(shard, pieces.cat_dim, first, span)
                if wanted.ranges:
                    parts.append(self._cut(name, keys[index], tuple(shape), wanted))
                first += span
            out[index] = torch.cat(parts, dim=pieces.cat_dim - 1)
        return out

    def _cut(self, name: str, key: str, shape: tuple[int, ...], shard: Shard) -> Tensor:
        if self._shape(key) != shape:
            raise ValueError(f"{name}: the folder's {key} is {list(self._shape(key))}, not {list(shape)}")
        if shard.is_whole:
            return self.stored(key)
        parts = [self._stored.read_range(key, shard.dim, start, stop) for start, stop in shard.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.dim)

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._stored.shape(key)

    def _map_names(self) -> None:
        """Fill `_pieces`. Raises ValueError naming every conversion other than stacking, concatenating, parting pairs
        and leaving out padding."""
        published = PublishedNames(self._skeleton)
        wrong: dict[str, str] = {}
        for key in sorted(self._stored.names(), key=dot_natural_key):
            found = published.conversion(key)
            if not found.patterns:
                self._pieces[found.name] = _StoredParameter({"": [key]}, stacked=False)
                continue
            if found.others and found.pairs_dim is None and not found.is_padded:
                wrong[found.name] = found.others
                continue
            groups: dict[str, list[str]] = {pattern: [] for pattern in found.patterns}
            stored = _StoredParameter(groups, found.stacked, found.cat_dim, found.pairs_dim, found.is_padded)
            pieces = self._pieces.setdefault(found.name, stored)
            pieces.groups[found.patterns[found.group]].append(key)
        if wrong:
            text = "; ".join(f"{name} ({kinds})" for name, kinds in wrong.items())
            raise ValueError(f"model folder {str(self._path)!r} needs conversions that slices cannot take: {text}")


def _within(shard: Shard, cat_dim: int, first: int, span: int) -> Shard:
    """Return the part of one piece that a shard of a stack [experts, ...] needs.

    The piece covers [first, first + span) of cat_dim.
    """
    shape = list(shard.full_shape[1:])
    shape[cat_dim - 1] = span
    if shard.is_whole:
        return Shard.whole(tuple(shape))
    if shard.dim != cat_dim:
        return Shard(tuple(shape), shard.dim - 1, shard.ranges)
    ranges = [(max(start, first) - first, min(stop, first + span) - first) for start, stop in shard.ranges]
    return Shard(tuple(shape), cat_dim - 1, tuple((start, stop) for start, stop in ranges if start < stop))
