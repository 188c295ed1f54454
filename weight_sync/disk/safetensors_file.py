"""One safetensors file: a reader that checks the header to the byte, and a writer that takes tensor by tensor.

A file is 8 bytes of header length (little-endian), a JSON header that may end in spaces, and the tensors' raw bytes
without gaps (the safetensors format, https://huggingface.co/docs/safetensors). It is written here and not by the
safetensors library because that needs all tensors of a file at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from ..layout.bucket import byte_view
from ..layout.json_values import are_sizes, parse_object
from ..manifest import TensorSpec, dtype_name, short, sizes_of

HEADER_BYTES = 64 << 10  # reserved at the start of a file: its tensors are not known before they are written
MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses larger ones too
COPY_BYTES = 16 << 20  # copied from a GPU at once
_OWN_NAME = "__metadata__"  # of a header's entry that is no tensor
_METADATA = f'"{_OWN_NAME}":{{"format":"pt"}}'  # transformers refuses files without it

DTYPE_CODES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODE_OF = {dtype: code for code, dtype in DTYPE_CODES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor's bytes."""

    spec: TensorSpec
    file: str  # name inside the folder
    offset: int  # of its first byte in that file


def read_header(file: IO[bytes], name: str, num_bytes: int) -> tuple[list[StoredTensor], list[str]]:
    """Read the tensors of a file of `num_bytes`, in the order of their bytes, and list all errors in its header."""
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
        return [], [f"{name}: {num_bytes} bytes do not hold a header of {length} bytes"]
    try:
        values = parse_object(file.read(length))
    except ValueError as error:
        return [], [f"{name}: its header {error}"]
    problems: list[str] = []
    metadata = values.pop(_OWN_NAME, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(f"{name}: {_OWN_NAME} is not a map of strings")
    found: list[tuple[int, int, TensorSpec]] = []
    for tensor_name, entry in values.items():
        try:
            found.append(_parse_entry(tensor_name, entry))
        except ValueError as error:
            problems.append(f"{name}: {tensor_name}: {error}")
    found.sort(key=lambda item: item[:2])
    if not problems:  # with an entry missing, every later offset looks wrong
        problems = [f"{name}: {line}" for line in _gaps(found, num_bytes - 8 - length)]
    return [StoredTensor(spec, name, 8 + length + start) for start, _, spec in found], problems


def _parse_entry(name: str, entry: object) -> tuple[int, int, TensorSpec]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry has dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_CODES:
        raise ValueError(f"unknown dtype {short(dtype)}")
    try:
        sizes = sizes_of(shape)
        if not are_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"data_offsets {short(offsets)}")
    except ValueError as error:
        raise ValueError(f"shape and data_offsets must be lists of sizes: {error}") from error
    spec = TensorSpec(name, DTYPE_CODES[dtype], sizes)
    if offsets[1] - offsets[0] != spec.num_bytes:
        raise ValueError(f"{spec.num_bytes} bytes do not lie between the offsets {offsets}")
    return offsets[0], offsets[1], spec


def _gaps(found: Iterable[tuple[int, int, TensorSpec]], num_bytes: int) -> Iterator[str]:
    end = 0
    for start, stop, spec in found:
        if start != end:
            yield f"{spec.name} starts at byte {start} and not at {end}, where the one before it ends"
        end = stop
    if end != num_bytes:
        yield f"it holds {num_bytes} bytes of tensors and describes {end}"


class ShardWriter:
    """Write one safetensors file into an open, empty file: room for the header first, then each added tensor."""

    def __init__(self, file: IO[bytes], header_bytes: int = 0) -> None:
        """Write nothing yet. header_bytes: the room for the header; 0: `HEADER_BYTES`."""
        self._file, self._room = file, header_bytes or HEADER_BYTES
        self._entries = [_METADATA]
        self._header_bytes = 0  # 0 before the first tensor
        self.num_bytes = 0  # of tensors

    def has_room(self, spec: TensorSpec) -> bool:
        """Return whether the header has room for one more entry; the first always fits."""
        return self._header_bytes == 0 or self._length([*self._entries, self._entry(spec)]) <= self._header_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor. Raises ValueError for a dtype that safetensors does not know, and for its own name."""
        entry = self._entry(TensorSpec.of(name, tensor))
        if self._header_bytes == 0:
            self._reserve([*self._entries, entry])
        self._entries.append(entry)
        for part in byte_view(tensor).split(COPY_BYTES if tensor.device.type != "cpu" else max(1, tensor.nbytes)):
            self._file.write(memoryview(part.cpu().numpy()))
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the header: the file is complete when it is closed."""
        if self._header_bytes == 0:  # there is no tensor
            self._reserve(self._entries)
        self._file.seek(0)
        header = ("{" + ",".join(self._entries) + "}").encode()
        self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes, b" "))

    def _reserve(self, entries: list[str]) -> None:
        """Leave room for a header with at least these entries."""
        # 8 bytes of length and the header together end at a multiple of 64, so the first tensor is aligned.
        needed = max(self._room, 8 + self._length(entries))
        self._header_bytes = -(-needed // 64) * 64 - 8
        self._file.seek(8 + self._header_bytes)

    def _entry(self, spec: TensorSpec) -> str:
        if spec.name == _OWN_NAME:
            raise ValueError(f"{_OWN_NAME}: safetensors keeps this name for a file's metadata: rename the tensor")
        if spec.dtype not in _CODE_OF:
            raise ValueError(f"{spec.name}: safetensors has no code for {dtype_name(spec.dtype)}")
        offsets = [self.num_bytes, self.num_bytes + spec.num_bytes]
        values = {"dtype": _CODE_OF[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
        return f"{json.dumps(spec.name)}:{json.dumps(values)}"

    @staticmethod
    def _length(entries: list[str]) -> int:
        return len(",".join(entries).encode()) + 2
