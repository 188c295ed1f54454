"""A safetensors file of a checkpoint, which is written and hashed in pieces, so that others can be told how far it is.

Each piece is on the disk before the next one: with gigabytes in the system's memory, one flush at the end could take
minutes, in which nothing tells a slow disk from one that hangs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from safetensors import safe_open
from torch import Tensor

from ....weight_sync.disk.safetensors_file import ShardWriter

PIECE_BYTES = 256 << 20
_READ_BYTES = 16 << 20
_ENTRY_BYTES = 256  # of a tensor in the header, beside its name
OnBytes = Callable[[int], None]  # called with the number of bytes of each piece that is done


def save_tensors(
    tensors: Iterable[tuple[str, Tensor]], names: Sequence[str], path: Path, on_bytes: OnBytes
) -> None:  # fmt: skip
    """Write tensors, as they come, to a new file, which is on the disk then. names: of all of them, in any order. Those
    of the largest elements come first, so that each is aligned."""
    with open(path, "xb") as file:
        pieces = _Pieces(file, on_bytes)
        writer = ShardWriter(cast(IO[bytes], pieces), sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names))
        for name, tensor in tensors:
            writer.add(name, tensor.detach().contiguous())
        writer.finish()
        pieces.flush()


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError and SafetensorError."""
        self._file = safe_open(path, framework="pt")
        self._names = dict.fromkeys(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
