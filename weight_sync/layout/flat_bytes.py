"""A tensor as a run of bytes, whatever its strides, dtype and device, and sets of byte ranges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .bucket import flat_view, word_view

Ranges = tuple[tuple[int, int], ...]  # [start, stop) bytes, in order, neither empty nor touching each other


def add_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Add [start, stop) to `ranges`."""
    if start == stop:
        return ranges
    before = [r for r in ranges if r[1] < start]
    after = [r for r in ranges if r[0] > stop]
    touching = (*ranges[len(before) : len(ranges) - len(after)], (start, stop))
    return (*before, (min(a for a, _ in touching), max(b for _, b in touching)), *after)


def remove_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Remove [start, stop) from `ranges`."""
    left = [part for a, b in ranges for part in ((a, min(b, start)), (max(a, stop), b))] if start < stop else ranges
    return tuple((a, b) for a, b in left if a < b)


def overlaps(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the parts of [start, stop) inside `ranges`."""
    return tuple((max(a, start), min(b, stop)) for a, b in ranges if max(a, start) < min(b, stop))


def gaps(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the parts of [start, stop) outside `ranges`."""
    inside = overlaps(ranges, start, stop)
    edges = [start, *(edge for part in inside for edge in part), stop]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand`: they cannot be written one by one.

    Strides that interleave, which torch does not make by itself, count too.
    """
    if tensor.is_contiguous():
        return False
    last = 0  # offset of the last element in the dimensions so far, those of the smallest strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= last:
            return True
        last += stride * (size - 1)
    return False


class FlatBytes:
    """The bytes of a tensor's elements in row-major order, to read and to overwrite in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.num_bytes = tensor.nbytes

    @cached_property  # created at first use: an update begins with hundreds of tensors
    def bytes(self) -> Tensor | None:
        """A uint8 view [num_bytes] of the tensor's memory; None if the tensor is not contiguous."""
        plain = self.tensor.is_contiguous() and not (self.tensor.is_conj() or self.tensor.is_neg())
        return flat_view(self.tensor).view(torch.uint8) if plain else None

    @cached_property
    def _words(self) -> Tensor:
        return word_view(self.tensor)

    def read(self, start: int, out: Tensor) -> Tensor:
        """Copy the bytes from `start` into `out`, uint8 [n] on any device; returns it."""
        if self.bytes is not None:
            return out.copy_(self.bytes[start : start + out.numel()])
        for block, part in self._blocks(start, out):
            part.copy_(block)
        return out

    def write(self, start: int, data: Tensor) -> None:
        """Overwrite the bytes from `start` by `data`, uint8 [n] on any device."""
        if self.bytes is not None:
            self.bytes[start : start + data.numel()].copy_(data)
            return
        data = data.contiguous()
        if data.storage_offset() % self._words.itemsize:  # else it could not be viewed as elements
            data = data.clone()
        for block, part in self._blocks(start, data):
            block.copy_(part)

    def holds(self, start: int, data: Tensor) -> bool:
        """Return whether the bytes from `start` are `data`, uint8 [n] on any device."""
        now = torch.empty(data.numel(), dtype=torch.uint8, device=self.tensor.device)
        current = self.read(start, now) if self.bytes is None else self.bytes[start : start + data.numel()]
        return torch.equal(current, data.to(current.device))

    def as_words(self, values: Tensor) -> Tensor:
        """Convert values of the tensor's dtype, or integers of the same size, to the words of `take` and `put`."""
        return values.detach().view(self._words.dtype).to(self.tensor.device)

    def take(self, positions: Tensor) -> Tensor:
        """Return the elements at these positions of the flattened tensor, int64 [n]."""
        positions = positions.to(self.tensor.device)
        if self.bytes is not None:
            return self._words.reshape(-1)[positions]
        return self._words[torch.unravel_index(positions, self.tensor.shape)]

    def put(self, positions: Tensor, words: Tensor) -> None:
        """Overwrite the elements at these positions, int64 [n], by `words` [n]."""
        positions, words = positions.to(self.tensor.device), words.to(self.tensor.device)
        if self.bytes is not None:
            self._words.reshape(-1).index_copy_(0, positions, words)
        else:
            self._words[torch.unravel_index(positions, self.tensor.shape)] = words

    def _blocks(self, start: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the tensor that form the range from `start`, each with its part of `data`."""
        words, done = data.view(self._words.dtype), 0
        first = start // self._words.itemsize
        for block in _blocks(self._words, first, first + words.numel()):
            yield block, words[done : done + block.numel()].view(block.shape)
            done += block.numel()


def _blocks(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield elements [start, stop) of the flattened tensor as views, at most two for each dimension and one more."""
    if start >= stop:
        return
    if stop - start == tensor.numel():
        yield tensor
        return
    inner = tensor[0].numel()
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _blocks(tensor[first], head, tail)
        return
    if head:
        yield from _blocks(tensor[first], head, inner)
        first += 1
    if first < last:
        yield tensor[first:last]
    if tail:
        yield from _blocks(tensor[last], 0, tail)
