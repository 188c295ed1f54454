"""What an update overwrites, kept so that it can be put back byte for byte.

    FlatBytes  a tensor as a run of bytes, whatever its strides, dtype and device
    UndoArena  the memory that old bytes are copied into
    UndoLog    old byte ranges and old elements, put back newest first
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .bucket import ALIGNMENT, word_view

Ranges = tuple[tuple[int, int], ...]  # [start, stop) bytes, in order, neither empty nor touching each other

ARENA_CHUNK_BYTES = 256 << 20


def add_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """`ranges` with [start, stop) joined in."""
    if start == stop:
        return ranges
    before = [r for r in ranges if r[1] < start]
    after = [r for r in ranges if r[0] > stop]
    touching = (*ranges[len(before) : len(ranges) - len(after)], (start, stop))
    return (*before, (min(a for a, _ in touching), max(b for _, b in touching)), *after)


def overlaps(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The parts of [start, stop) that lie in `ranges`."""
    return tuple((max(a, start), min(b, stop)) for a, b in ranges if max(a, start) < min(b, stop))


def gaps(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The parts of [start, stop) that do not lie in `ranges`."""
    inside = overlaps(ranges, start, stop)
    edges = [start, *(edge for part in inside for edge in part), stop]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


class FlatBytes:
    """A tensor as the bytes of its elements in row-major order, to read and to overwrite in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.num_bytes = tensor.nbytes

    @cached_property  # views are made when they are first needed: an update begins with hundreds of tensors
    def bytes(self) -> Tensor | None:
        """A uint8 view [num_bytes] of the tensor's memory; None where the tensor is not contiguous."""
        plain = self.tensor.is_contiguous() and not (self.tensor.is_conj() or self.tensor.is_neg())
        return self.tensor.reshape(-1).view(torch.uint8) if plain else None

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
        """Whether the bytes from `start` are `data`, uint8 [n] on any device."""
        now = torch.empty(data.numel(), dtype=torch.uint8, device=self.tensor.device)
        current = self.read(start, now) if self.bytes is None else self.bytes[start : start + data.numel()]
        return torch.equal(current, data.to(current.device))

    def as_words(self, values: Tensor) -> Tensor:
        """Values of the tensor's dtype, or integers of the same size, as what `take` returns and `put` takes."""
        return values.detach().view(self._words.dtype).to(self.tensor.device)

    def take(self, positions: Tensor) -> Tensor:
        """The elements at these positions of the flattened tensor, int64 [n]."""
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
        """Views of the tensor that make up the range from `start`, each beside its part of `data`."""
        words, done = data.view(self._words.dtype), 0
        first = start // self._words.itemsize
        for block in _blocks(self._words, first, first + words.numel()):
            yield block, words[done : done + block.numel()].view(block.shape)
            done += block.numel()


def _blocks(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Elements [start, stop) of the flattened tensor as views of it, at most two for each dimension and one more."""
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


class _SpareMaps:
    """Anonymous maps on huge pages for undo logs to take, and to give back for the next one.

    What is given back is the kernel's to reclaim whenever memory is short (MADV_FREE), and costs nothing to use again
    until then; unmapped, every update would touch fresh pages anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> mmap.mmap:
        """A map of at least that size, its contents undefined: the smallest that is there, or a new one."""
        with self._lock:
            fitting = [memory for memory in self._spare if len(memory) >= num_bytes]
            if fitting:
                memory = min(fitting, key=len)
                self._spare.remove(memory)
                return memory
        # Private: Python's default is a shared map, which lies in shmem and gets no huge pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice; small ones hold the same
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def give_back(self, maps: Iterable[mmap.mmap]) -> None:
        """Nothing may use these any more."""
        for memory in maps:
            try:
                memory.madvise(mmap.MADV_FREE)
            except OSError:  # a kernel that cannot: the map goes when its last view does
                continue
            with self._lock:
                self._spare.append(memory)


_spare_maps = _SpareMaps()


class UndoArena:
    """Host memory in big anonymous maps on huge pages, handed out piece by piece until all of it is released.

    Touching fresh pages is what costs: copying into a fresh `torch.empty` ran at 4.4 GB/s, into fresh huge pages at 15
    (in a virtual machine whose host had not given them yet: 0.3), into memory already touched at 23 (256 MiB, 2
    threads). So what is released serves the next arena of this process. Pages that nothing is written to are never
    taken.
    """

    def __init__(self, chunk_bytes: int = ARENA_CHUNK_BYTES) -> None:
        self.num_bytes = 0  # handed out
        self._chunk_bytes = chunk_bytes
        self._maps: list[mmap.mmap] = []
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned for every dtype, its contents undefined."""
        if num_bytes == 0:
            return self._free[:0]
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > self._free.numel():
            self._maps.append(_spare_maps.take(max(padded, self._chunk_bytes)))
            self._free = torch.frombuffer(self._maps[-1], dtype=torch.uint8)
        taken, self._free = self._free[:num_bytes], self._free[padded:]
        self.num_bytes += num_bytes
        return taken

    def release(self) -> None:
        """Give all of it back; what was handed out must not be used any more."""
        self._free = self._free[:0].clone()
        _spare_maps.give_back(self._maps)
        self._maps, self.num_bytes = [], 0


@dataclass(frozen=True)
class _OldRange:
    name: str
    start: int
    data: Tensor  # uint8 [n]

    def put_back(self, flat: FlatBytes) -> None:
        flat.write(self.start, self.data)


@dataclass(frozen=True)
class _OldElements:
    name: str
    positions: Tensor  # int64 or, where they fit, int32 [n]
    words: Tensor  # [n]

    def put_back(self, flat: FlatBytes) -> None:
        flat.put(self.positions.long(), self.words)


class UndoLog:
    """Old bytes of tensors by name. A byte range is saved once: what overwrites it later need not save it again."""

    def __init__(self, tensors: dict[str, FlatBytes]) -> None:
        self._tensors = tensors
        self._arena = UndoArena()
        self._entries: list[_OldRange | _OldElements] = []
        self._saved: dict[str, Ranges] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that old bytes, and the positions of old elements, take."""
        return self._arena.num_bytes

    def save_range(self, name: str, start: int, stop: int) -> None:
        """Record bytes [start, stop) as they are now; call it before they are overwritten."""
        saved = self._saved.get(name, ())
        for a, b in gaps(saved, start, stop):
            self._entries.append(_OldRange(name, a, self._tensors[name].read(a, self._arena.allocate(b - a))))
        self._saved[name] = add_range(saved, start, stop)

    def save_elements(self, name: str, positions: Tensor) -> None:
        """Record these elements, int64 [n], as they are now; call it before they are overwritten."""
        flat = self._tensors[name]
        if self._saved.get(name) == ((0, flat.num_bytes),) or positions.numel() == 0:
            return
        index_dtype = torch.int32 if flat.tensor.numel() <= torch.iinfo(torch.int32).max else torch.int64
        words = flat.take(positions)
        self._entries.append(_OldElements(name, self._copied(positions, index_dtype), self._copied(words, words.dtype)))

    def restore(self, names: Iterable[str]) -> None:
        """Put back everything of these tensors. Ranges stay recorded: they hold again what is recorded of them."""
        names = set(names)
        for entry in reversed(self._entries):
            if entry.name in names:
                entry.put_back(self._tensors[entry.name])
        # A range that was saved after single elements had been overwritten holds those: it gets the old ones only now.
        mixed = {entry.name for entry in self._entries if isinstance(entry, _OldElements)} & names
        for entry in self._entries:
            if entry.name in mixed and isinstance(entry, _OldRange):
                self._tensors[entry.name].read(entry.start, entry.data)
        self._entries = [e for e in self._entries if e.name not in mixed or isinstance(e, _OldRange)]

    def restore_all(self) -> None:
        """Put back everything, newest first."""
        for entry in reversed(self._entries):
            entry.put_back(self._tensors[entry.name])

    def release(self) -> None:
        """Forget everything, and let the next log have the memory."""
        self._entries, self._saved = [], {}
        self._arena.release()

    def _copied(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        kept = self._arena.allocate(values.numel() * dtype.itemsize).view(dtype)
        return kept.copy_(values)
