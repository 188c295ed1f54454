"""A safetensors file of a checkpoint, which is written and hashed in pieces, so that others can be told how far it is.

Each piece is on the disk before the next one: with gigabytes in the system's memory, one flush at the end could take
minutes, in which nothing tells a slow disk from one that hangs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, cast

from torch import Tensor

from ....weight_sync.disk.safetensors_file import ShardWriter

PIECE_BYTES = 256 << 20
_READ_BYTES = 16 << 20
_ENTRY_BYTES = 256  # of a tensor in the header, beside its name
OnBytes = Callable[[int], None]  # called with the number of bytes of each piece that is done


def save_tensors(tensors: Mapping[str, Tensor], path: Path, on_bytes: OnBytes) -> None:
    """Write tensors to a new file, which is on the disk then."""
    with open(path, "xb") as file:
        pieces = _Pieces(file, on_bytes)
        writer = ShardWriter(cast(IO[bytes], pieces), sum(len(json.dumps(name)) + _ENTRY_BYTES for name in tensors))
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):  # each aligned
            writer.add(name, tensors[name].detach().contiguous())
        writer.finish()
        pieces.flush()


def sha256_of(path: Path, on_bytes: OnBytes) -> str:
    """Hash a file. Returns 64 hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        piece = bytearray(min(_READ_BYTES, max(path.stat().st_size, 1)))
        while num_bytes := file.readinto(piece):
            found.update(memoryview(piece)[:num_bytes])
            on_bytes(num_bytes)
    return found.hexdigest()


class _Pieces:
    """A file that is written in pieces."""

    def __init__(self, file: io.BufferedWriter, on_bytes: OnBytes) -> None:
        self._file, self._on_bytes = file, on_bytes
        self._num_unflushed = 0

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            self._file.write(piece)
            self._num_unflushed += len(piece)
            if self._num_unflushed >= PIECE_BYTES:
                self.flush()
            self._on_bytes(len(piece))
        return len(view)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._num_unflushed = 0
