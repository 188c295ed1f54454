"""Undo data: the bytes that an update overwrites, kept so that they can be restored exactly.

UndoArena  the memory that old bytes are copied into
UndoLog    old byte ranges and old elements, restored newest first
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout.bucket import ALIGNMENT
from ..layout.flat_bytes import FlatBytes, Ranges, add_range, gaps

ARENA_CHUNK_BYTES = 256 << 20


class _SpareMaps:
    """Anonymous memory maps on huge pages that undo logs take and give back for reuse.

    The kernel may reclaim the pages of a map that was given back whenever memory is short (MADV_FREE); until then using
    it again costs nothing. If maps were unmapped instead, every update would touch fresh pages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> mmap.mmap:
        """Return a map of at least this size with undefined contents: the smallest spare one that fits, or a new
        one."""
        with self._lock:
            fitting = [memory for memory in self._spare if len(memory) >= num_bytes]
            if fitting:
                memory = min(fitting, key=len)
                self._spare.remove(memory)
                return memory
        # Private: Python's default is a shared map, which uses shmem and gets no huge pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice; small pages work too
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def give_back(self, maps: Iterable[mmap.mmap]) -> None:
        """Keep maps for reuse. The caller must not use them any more."""
        for memory in maps:
            try:
                memory.madvise(mmap.MADV_FREE)
            except OSError:  # the kernel does not support it: the map is freed with its last view
                continue
            with self._lock:
                self._spare.append(memory)


_spare_maps = _SpareMaps()


class UndoArena:
    """Host memory in large anonymous maps on huge pages, allocated piece by piece and released all at once.

    Touching fresh pages is the main cost: copying into a fresh `torch.empty` ran at 4.4 GB/s, into fresh huge pages at
    15 GB/s (0.3 in a virtual machine whose host had not provided them yet), into memory touched before at 23 GB/s (256
    MiB, 2 threads). Therefore the next arena of this process reuses released memory. Pages that are never written are
    never allocated.
    """

    def __init__(self, chunk_bytes: int = ARENA_CHUNK_BYTES) -> None:
        self.num_bytes = 0  # allocated so far
        self._chunk_bytes = chunk_bytes
        self._maps: list[mmap.mmap] = []
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate uint8 [num_bytes], aligned for every dtype, with undefined contents."""
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
        """Release all memory of the arena. The allocated tensors must not be used any more."""
        self._free = self._free[:0].clone()
        _spare_maps.give_back(self._maps)
        self._maps, self.num_bytes = [], 0


@dataclass(frozen=True)
class _OldRange:
    number: int  # of all saves
    start: int
    data: Tensor  # uint8 [n]

    def put_back(self, flat: FlatBytes, start: int, stop: int) -> None:
        first, last = max(start, self.start), min(stop, self.start + self.data.numel())
        if first < last:
            flat.write(first, self.data[first - self.start : last - self.start])


@dataclass(frozen=True)
class _OldElements:
    number: int  # of all saves
    positions: Tensor  # int64 or, where they fit, int32 [n]
    words: Tensor  # [n]

    def put_back(self, flat: FlatBytes, start: int, stop: int) -> None:
        positions, words, size = self.positions.long(), self.words, self.words.itemsize
        if (start, stop) != (0, flat.num_bytes):
            inside = (positions >= start // size) & (positions < stop // size)
            positions, words = positions[inside], words[inside]
        flat.put(positions, words)


class UndoLog:
    """Old bytes of tensors by name. A byte range is saved only once, however often it is overwritten."""

    def __init__(self, tensors: dict[str, FlatBytes]) -> None:
        self._tensors = tensors
        self._arena = UndoArena()
        self._entries: dict[str, list[_OldRange | _OldElements]] = {}  # by tensor, in their order
        self._saved: dict[str, Ranges] = {}
        self._numbers = itertools.count()

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the saved bytes and of the positions of saved elements."""
        return self._arena.num_bytes

    def save_range(self, name: str, start: int, stop: int) -> None:
        """Save bytes [start, stop) as they are now. Call it before they are overwritten."""
        saved = self._saved.get(name, ())
        for a, b in gaps(saved, start, stop):
            old = _OldRange(next(self._numbers), a, self._tensors[name].read(a, self._arena.allocate(b - a)))
            self._entries.setdefault(name, []).append(old)
        self._saved[name] = add_range(saved, start, stop)

    def save_elements(self, name: str, positions: Tensor) -> None:
        """Save these elements, int64 [n], as they are now. Call it before they are overwritten."""
        flat = self._tensors[name]
        if self._saved.get(name) == ((0, flat.num_bytes),) or positions.numel() == 0:
            return
        index_dtype = torch.int32 if flat.tensor.numel() <= torch.iinfo(torch.int32).max else torch.int64
        words = flat.take(positions)
        old = _OldElements(next(self._numbers), self._copied(positions, index_dtype), self._copied(words, words.dtype))
        self._entries.setdefault(name, []).append(old)

    def restore(self, name: str, start: int, stop: int) -> None:
        """Restore bytes [start, stop) of a tensor. What is saved stays saved: the tensor holds these bytes again."""
        for entry in reversed(self._entries.get(name, ())):
            entry.put_back(self._tensors[name], start, stop)

    def restore_all(self) -> None:
        """Restore everything, newest first: tensors may share a part of their memory."""
        saved = [(entry.number, name, entry) for name, entries in self._entries.items() for entry in entries]
        for _, name, entry in sorted(saved, key=lambda one: -one[0]):
            entry.put_back(self._tensors[name], 0, self._tensors[name].num_bytes)

    def release(self) -> None:
        """Forget everything and give the memory back for the next log."""
        self._entries, self._saved = {}, {}
        self._arena.release()

    def _copied(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        kept = self._arena.allocate(values.numel() * dtype.itemsize).view(dtype)
        return kept.copy_(values)
