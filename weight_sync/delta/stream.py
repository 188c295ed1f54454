"""Deltas as a stream of bytes: opaque buckets for any transport, and one file beside a manifest on disk.

    stream   MAGIC, a record for each chunk, an end record
    record   u64 index, u32 header length, u64 payload length, SHA-256 of these and the header, header (JSON), payload
    end      index 2**64 - 1, header {"num_chunks": n}

A bucket that is missing, doubled or out of place breaks a record's checksum or its index. A damaged payload is found by
its digest when its chunk is applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..disk.atomic_folder import atomic_folder
from ..disk.folder import FileState, parse_manifest, read_exactly, regular_file
from ..errors import TransferFailed
from ..layout.json_values import parse_object
from ..manifest import Manifest, TensorSpec
from .chunk import ChunkHeader, DeltaChunk, DeltaStats, make_payload, parse_header, stats_by_tensor

DATA_FILE = "delta.bin"
DELTA_MANIFEST_FILE = "lockstep_delta.json"
DEFAULT_BUFFER_BYTES = 64 << 20

_MAGIC = b"LOCKSTEP-DELTA-1"
_PREFIX = struct.Struct("<QIQ32s")
_END = 2**64 - 1
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class DeltaManifest:
    """The versions before and after a delta, and the model's manifest after it."""

    base_version: str | None
    manifest: Manifest  # of the result: all tensors of the delta; digests where the maker knows them
    base_model_digest: str | None = None  # expected of the base (model_digest.model_root)

    def to_json(self) -> str:
        """Write one JSON object with a checksum over itself; `from_json` reads it back."""
        values = self._values()
        return json.dumps({**values, "checksum": _checksum(values)})

    @classmethod
    def from_json(cls, text: bytes) -> DeltaManifest:
        """Read a manifest. Raises ValueError for anything that is no valid manifest of a delta."""
        values: dict[str, Any] = parse_object(text)
        if set(values) != {"base_version", "base_model_digest", "manifest", "checksum"}:
            raise ValueError("is not the manifest of a delta")
        checksum = values.pop("checksum")
        texts = [values["base_version"], values["base_model_digest"]]
        if checksum != _checksum(values) or not all(isinstance(text, str | None) for text in texts):
            raise ValueError("was damaged: its checksum is another one")
        manifest = parse_manifest(json.dumps(values["manifest"]).encode())
        return cls(values["base_version"], manifest, values["base_model_digest"])

    def _values(self) -> dict[str, object]:
        return {
            "base_version": self.base_version,
            "base_model_digest": self.base_model_digest,
            "manifest": json.loads(self.manifest.to_json()),
        }


def _checksum(values: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# --- the stream


def _pieces(chunks: Iterable[DeltaChunk]) -> Iterator[Tensor]:
    """Yield the stream of some chunks as uint8 tensors to be joined."""
    num_chunks = 0
    yield make_payload([_MAGIC])
    for chunk in chunks:
        yield _record_head(num_chunks, chunk.header.to_json().encode(), chunk.payload.numel())
        yield chunk.payload
        num_chunks += 1
    yield _record_head(_END, json.dumps({"num_chunks": num_chunks}).encode(), 0)


def _record_head(index: int, header: bytes, payload_bytes: int) -> Tensor:
    if len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"a chunk header of {len(header)} bytes, more than {_MAX_HEADER_BYTES}")
    digest = _head_digest(index, header, payload_bytes)
    return make_payload([_PREFIX.pack(index, len(header), payload_bytes, digest), header])


def _head_digest(index: int, header: bytes, payload_bytes: int) -> bytes:
    return hashlib.sha256(struct.pack("<QQ", index, payload_bytes) + header).digest()


def _read_magic(read: Callable[[int], bytes]) -> None:
    if read(len(_MAGIC)) != _MAGIC:
        raise ValueError("is no delta, or one of another format")


def _read_head(read: Callable[[int], bytes], index: int) -> tuple[ChunkHeader, int] | None:
    """Read the header and payload length of record `index`, or return None at the stream's proper end.

    `read(n)` returns n bytes, or fewer at the end of the data. Raises ValueError for anything else.
    """
    prefix = read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise ValueError(f"ends in record {index}")
    found, header_bytes, payload_bytes, digest = _PREFIX.unpack(prefix)
    text = read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    if len(text) < header_bytes or digest != _head_digest(found, text, payload_bytes):
        raise ValueError(f"is cut or damaged at the head of record {index}")
    if found == _END:
        if payload_bytes or parse_object(text) != {"num_chunks": index}:
            raise ValueError(f"ends after {index} records, its end says {text.decode()}")
        return None
    if found != index:
        raise ValueError(f"has record {found} where {index} should be")
    header = parse_header(text)
    if payload_bytes != sum(header.parts):
        raise ValueError(f"has a payload of {payload_bytes} bytes for {header.describe()}, not {sum(header.parts)}")
    return header, payload_bytes


def pack_chunks(
    chunks: Iterable[DeltaChunk], max_bytes: int = DEFAULT_BUFFER_BYTES, buffer: Tensor | None = None
) -> Iterator[Tensor]:
    """Write chunks as uint8 buffers of at most `max_bytes`, all full but the last. Records may span several buffers.

    With `buffer`, uint8 of at least `max_bytes`, each result is a view of it and valid until the next is asked for;
    else each has memory of its own. Raises ValueError for a size that is not positive or a buffer that is too small.
    """
    if max_bytes <= 0 or (buffer is not None and buffer.numel() < max_bytes):
        raise ValueError(f"buffers of {max_bytes} bytes, given is one of {None if buffer is None else buffer.numel()}")
    current, filled = buffer if buffer is not None else torch.empty(max_bytes, dtype=torch.uint8), 0
    for piece in _pieces(chunks):
        done = 0
        while done < piece.numel():
            if filled == max_bytes:
                yield current[:filled]
                current, filled = current if buffer is not None else torch.empty_like(current), 0
            size = min(piece.numel() - done, max_bytes - filled)
            current[filled : filled + size].copy_(piece[done : done + size])
            done, filled = done + size, filled + size
    yield current[:filled]


def unpack_chunks(buffers: Iterable[Tensor]) -> Iterator[DeltaChunk]:
    """Read the chunks of a stream that arrives in uint8 buffers of any size. A buffer may be reused when the next is
    taken.

    Raises TransferFailed for a stream that is cut, damaged, out of order, or continues after its end.
    """
    stream = _BufferStream(buffers)
    index = 0
    try:
        _read_magic(stream.read)
        while (head := _read_head(stream.read, index)) is not None:
            header, payload_bytes = head
            payload = make_payload([stream.read(payload_bytes)])
            if payload.numel() < payload_bytes:
                raise ValueError(f"ends in the payload of {header.describe()}")
            yield DeltaChunk(header, payload)
            index += 1
        if stream.read(1):
            raise ValueError("goes on after its end")
    except ValueError as error:
        raise TransferFailed(f"delta: the stream {error}") from error


class _BufferStream:
    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = iter(buffers)
        self._left = torch.empty(0, dtype=torch.uint8)

    def read(self, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes, or fewer at the end."""
        parts = []
        while num_bytes:
            if not self._left.numel():
                arrived = next(self._buffers, None)
                if arrived is None:
                    break
                self._left = arrived.cpu()
                continue
            size = min(num_bytes, self._left.numel())
            parts.append(self._left[:size].numpy().tobytes())
            self._left = self._left[size:]
            num_bytes -= size
        return b"".join(parts)


# --- on disk


@dataclass(frozen=True)
class StoredDelta:
    """A delta folder whose record heads were all checked. The payloads are still on disk."""

    folder: Path
    manifest: DeltaManifest
    headers: tuple[ChunkHeader, ...]
    payload_offsets: tuple[int, ...]  # in the data file
    state: FileState

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.manifest.tensors

    @property
    def stats(self) -> DeltaStats:
        return sum(stats_by_tensor(self.headers).values(), DeltaStats())

    def chunks(self) -> Iterator[DeltaChunk]:
        """Read the chunks one by one. Raises TransferFailed where the file is not the one that was checked."""
        path = self.folder / DATA_FILE
        try:
            descriptor = os.open(regular_file(path), os.O_RDONLY)
        except OSError as error:
            raise TransferFailed(f"delta: {path}: {error.strerror}") from error
        try:
            for header, offset in zip(self.headers, self.payload_offsets, strict=True):
                payload = torch.empty(sum(header.parts), dtype=torch.uint8)
                num_read = read_exactly(descriptor, memoryview(payload.numpy()), offset)
                if num_read < payload.numel() or FileState.of(descriptor) != self.state:
                    raise TransferFailed(f"delta: {path} changed while {header.describe()} was read")
                yield DeltaChunk(header, payload)
        finally:
            os.close(descriptor)


def save_delta(
    folder: str | Path,
    base_version: str | None,
    version: str | None,
    chunks: Iterable[DeltaChunk],
    *,
    result: Manifest | None = None,
    base_model_digest: str | None = None,
) -> StoredDelta:
    """Write a delta, chunk by chunk, as a folder that appears whole or not at all.

    `result` gives the digests of the state after the delta; without it none are stored. Raises ValueError for a folder
    that exists, or a result that has other tensors than the chunks.
    """
    headers: list[ChunkHeader] = []

    def noted() -> Iterator[DeltaChunk]:
        for chunk in chunks:
            headers.append(chunk.header)
            yield chunk

    with atomic_folder(folder) as partial:
        with open(partial / DATA_FILE, "xb") as file:
            for piece in _pieces(noted()):
                file.write(memoryview(piece.numpy()))
        specs = tuple({header.name: header.spec for header in headers}.values())
        if result is not None and sorted(map(TensorSpec.describe, result.tensors)) != sorted(
            map(TensorSpec.describe, specs)
        ):
            raise ValueError(f"{folder}: the tensors of the result are not those of the delta")
        digests = (result.digests, result.model_digest) if result is not None else ({}, None)
        manifest = DeltaManifest(base_version, Manifest(version, specs, *digests), base_model_digest)
        (partial / DELTA_MANIFEST_FILE).write_text(manifest.to_json())
    return load_delta(folder)


def load_delta(folder: str | Path) -> StoredDelta:
    """Read the manifest of a delta folder and the head of every record, but no payload.

    Raises ValueError for a file that is cut, damaged in a head, or continues after its end, and listing the tensors
    that the chunks do not cover exactly once.
    """
    path = Path(folder) / DATA_FILE
    try:
        manifest = DeltaManifest.from_json(regular_file(Path(folder) / DELTA_MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise ValueError(f"{folder}/{DELTA_MANIFEST_FILE}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{folder}/{DELTA_MANIFEST_FILE} {error}") from error
    headers: list[ChunkHeader] = []
    offsets: list[int] = []
    try:
        with open(regular_file(path), "rb") as file:
            state = FileState.of(file.fileno())
            _read_magic(file.read)
            while (head := _read_head(file.read, len(headers))) is not None:
                headers.append(head[0])
                offsets.append(file.tell())
                if offsets[-1] + head[1] > state.num_bytes:
                    raise ValueError(f"ends in the payload of {head[0].describe()}")
                file.seek(head[1], os.SEEK_CUR)
            if file.tell() != state.num_bytes:
                raise ValueError("goes on after its end")
            _check_coverage(manifest.manifest.tensors, headers)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    return StoredDelta(Path(folder), manifest, tuple(headers), tuple(offsets), state)


def _check_coverage(specs: Iterable[TensorSpec], headers: Iterable[ChunkHeader]) -> None:
    """Check that every tensor's chunks follow each other from its first byte to its last. Raises ValueError."""
    ends: dict[TensorSpec, int] = {}
    wrong = []
    for header in headers:
        if header.offset != ends.setdefault(header.spec, 0):
            wrong.append(f"{header.describe()} does not follow byte {ends[header.spec]}")
        ends[header.spec] = header.offset + header.num_bytes
    wanted = {spec: spec.num_bytes for spec in specs}
    odd = [spec for spec in {**wanted, **ends} if wanted.get(spec) != ends.get(spec)]
    wrong += [f"{s.describe()}: {ends.get(s)} of {wanted.get(s)} bytes are covered" for s in odd]
    if wrong:
        raise ValueError("does not fit its manifest: " + "; ".join(wrong))
