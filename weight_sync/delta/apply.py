"""Deltas applied to resident tensors, chunk by chunk.

A chunk carries the digests of the bytes before it (the base) and after it (the result):

- It is applied where the resident bytes are the base's, skipped where they are the result's, and refused elsewhere.
- So a delta may be applied twice, and one that was interrupted between two chunks can be completed.
- A refused chunk writes nothing; earlier chunks are undone by the transaction underneath.

Cost of the checks, beside the few bytes of the changed elements, which are always hashed:

 check       the receiver reads and hashes          a wrong base is refused
 touched     nothing else                           where it differs in an element that the delta changes
 pre         every chunk once                       wherever it differs
 pre+post    every chunk that changes twice         the same, and the written bytes are read back

"touched" is right where the receiver knows by other means that it holds the base (its own model digest), or verifies
the digests of the result.

Where only a part of a tensor is held (`ShardBytes`) the digests of a chunk can be compared only if all of the chunk is
held. Else it is applied without a check, the sink is informed (`leave_unchecked`), and the digests of the result have
to be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..deadline import Deadline
from ..errors import DigestMismatch, TransferFailed
from ..layout.shard_bytes import ShardBytes
from ..layout.sink import Sink
from ..manifest import TensorSpec
from ..workers import Workers, in_order
from .chunk import ChunkHeader, DeltaChunk, decode_elements, expand, sha256, word_dtype

Check = Literal["touched", "pre", "pre+post"]


def apply_delta(
    specs: Sequence[TensorSpec],
    chunks: Iterable[DeltaChunk],
    sink: Sink,
    *,
    check: Check = "pre",
    num_threads: int = 2,
    timeout_s: float | None = None,
) -> int:
    """Apply a delta of these tensors to the bytes of `sink`. Returns the number of chunks whose result was not there
    already. Chunks are decoded, and resident chunks hashed, in threads while earlier ones are written.

    Raises ValueError as `sink.expect` does, before the first byte; DigestMismatch for the wrong base and for damaged
    chunks; TransferFailed for chunks that are missing or out of order, and past the deadline. After any of these the
    earlier chunks stay applied until the caller rolls back; applying the same delta again completes it.
    """
    deadline = Deadline.within(timeout_s)
    sink.expect(specs)
    left = {spec.name: spec for spec in specs}
    num_applied = 0

    def in_sequence() -> Iterator[DeltaChunk]:
        ends: dict[str, int] = {}  # of the chunks that came, by tensor
        for chunk in chunks:
            header = chunk.header
            spec, end = left.get(header.name), ends.get(header.name, 0)
            if spec is None or spec != header.spec or header.offset != end:
                expected = f"byte {end} of {spec.describe()}" if spec else "nothing more of that tensor"
                raise TransferFailed(f"delta: {header.describe()} of {header.dtype} came, expected was {expected}")
            ends[header.name] = header.offset + header.num_bytes
            if ends[header.name] == spec.num_bytes:
                del left[header.name]
            yield chunk

    with Workers(num_threads, "delta") as workers:
        for prepared in in_order(workers, lambda chunk: prepare(chunk, sink, check), in_sequence(), num_threads):
            if deadline.has_passed:
                raise TransferFailed(f"delta: the deadline passed before {prepared.header.describe()} was applied")
            num_applied += write(prepared, sink, check)
    if left:
        raise TransferFailed(f"delta: it ended without all chunks of {', '.join(left)}")
    return num_applied


@dataclass(frozen=True)
class PreparedChunk:
    """A chunk that is decoded and, where possible, compared ahead of its turn."""

    header: ChunkHeader
    payload: Tensor
    held: ShardBytes
    positions: Tensor | None  # int64 [n], and
    xors: np.ndarray | None  # [n] words for "elements", the whole chunk for "xor"
    digest: str | None  # of the resident chunk

    def elements(self) -> tuple[Tensor, np.ndarray]:
        """Return the positions of the changed elements and the words to combine them with, of a chunk of elements."""
        assert self.positions is not None and self.xors is not None
        return self.positions, self.xors

    def changed(self, old: Tensor) -> Tensor:
        """Return the new bytes of an "xor" chunk, uint8 [n], for its old bytes on the CPU. Does not change `old`."""
        assert self.xors is not None
        return torch.from_numpy((old.numpy().view(self.xors.dtype) ^ self.xors).view(np.uint8))


def prepare(chunk: DeltaChunk, sink: Sink, check: Check) -> PreparedChunk:
    """Decode a chunk and hash the resident bytes that it is for. Changes nothing.

    Raises ValueError where the chunk does not fit the resident tensor, does not decode, or lacks the digests that
    `check` needs; DigestMismatch where it is damaged.
    """
    header = chunk.header
    if check not in get_args(Check):
        raise ValueError(f"check must be one of {', '.join(get_args(Check))}, not {check!r}")
    held = sink.held(header.name)
    if held.spec.dtype != header.spec.dtype or held.spec.shape != header.spec.shape:
        raise ValueError(f"delta of {header.spec.describe()}, resident {held.spec.describe()}")
    if check != "touched" and header.pre is None:
        raise ValueError(f'{header.describe()}: made without chunk digests, so only check="touched" can apply it')
    if chunk.payload.numel() != sum(header.parts) or sha256(chunk.payload) != header.payload_sha256:
        raise DigestMismatch([header.name], f"the delta chunk of {header.describe()} was damaged on its way")
    positions: Tensor | None = None
    xors: np.ndarray | None = None
    try:
        if header.kind == "elements":
            positions, xors = decode_elements(chunk)
        elif header.kind == "xor":
            word = word_dtype(header.spec.dtype.itemsize)
            xors = expand(chunk.payload, word, header.num_bytes // word.itemsize)
    except ValueError as error:
        raise ValueError(f"the delta chunk of {header.describe()} {error}") from error
    # An XOR applied twice would undo itself. Its digest is computed later, when no earlier chunk can still be writing
    # to a tensor that is tied to this one.
    hashable = check != "touched" and header.kind != "xor" and held.holds_all_of(*header.byte_range)
    digest = sha256(_resident_bytes(held, header)) if hashable else None
    return PreparedChunk(header, chunk.payload, held, positions, xors, digest)


def write(prepared: PreparedChunk, sink: Sink, check: Check) -> bool:
    """Write a chunk, and return whether anything was written. Where its result is there already nothing is written, and
    the tensor still counts as written. Raises DigestMismatch where the resident bytes are neither its base nor its
    result."""
    header, held = prepared.header, prepared.held
    if not held.holds_all_of(*header.byte_range):
        return _write_part(prepared, sink, check)
    resident = _resident_bytes(held, header) if header.kind == "xor" else None
    digest = prepared.digest if resident is None else sha256(resident)
    if digest is not None and digest not in (header.pre, header.post):
        # A tied tensor may have been partly written when it was hashed ahead.
        digest = sha256(_resident_bytes(held, header))
        if digest not in (header.pre, header.post):
            raise _wrong_base(header)
    if header.kind == "same" or (digest is not None and digest == header.post):
        _skip(header, sink)
        return False
    if header.kind == "elements":
        positions, xors = prepared.elements()
        assert header.touched is not None  # `parse_header` and the encoder see to it
        before = _resident_elements(held, positions)
        touched = sha256(before)
        if touched not in header.touched:
            raise _wrong_base(header)
        if touched == header.touched[1]:
            _skip(header, sink)
            return False
        after = before ^ torch.from_numpy(xors).view(before.dtype)
        if sha256(after) != header.touched[1]:
            raise DigestMismatch([header.name], f"the delta chunk of {header.describe()} makes something else")
        sink.write_elements(header.name, positions, after)
    elif resident is not None:
        sink.write(header.name, header.offset, prepared.changed(resident))
    else:
        sink.write(header.name, header.offset, prepared.payload)
    if check == "pre+post" and sha256(_resident_bytes(held, header)) != header.post:
        raise DigestMismatch([header.name], f"{header.describe()} was written and reads differently")
    return True


def _write_part(prepared: PreparedChunk, sink: Sink, check: Check) -> bool:
    """Apply a chunk of which only a part is held. Its digests are of the whole chunk and cannot be compared, so the
    tensor is left unchecked, unless none of the chunk is held, or the result is certain at the `check` that the caller
    asked for."""
    header, held = prepared.header, prepared.held
    first, last = held.local_range(*header.byte_range)
    is_certain = first == last or (header.kind in ("same", "full") and check == "touched")
    if header.kind == "elements":
        positions, xors = prepared.elements()
        here, local = held.local_elements(positions)
        before = held.local.take(local).cpu()
        after = before ^ torch.from_numpy(xors).view(before.dtype)[here]
        sink.write_elements(header.name, positions[here], after)
    elif header.kind == "xor":
        data = held.read(header.offset, torch.zeros(header.num_bytes, dtype=torch.uint8))
        sink.write(header.name, header.offset, prepared.changed(data))
    elif header.kind == "full":
        sink.write(header.name, header.offset, prepared.payload)
    else:
        _skip(header, sink)
    if not is_certain:
        sink.leave_unchecked(header.name, "a delta was applied to a part of it, whose digests are of the whole")
    return header.kind != "same" and first != last


def _skip(header: ChunkHeader, sink: Sink) -> None:
    none = torch.empty(0, dtype=torch.int64)
    sink.write_elements(header.name, none, torch.empty(0, dtype=header.spec.dtype))


def _wrong_base(header: ChunkHeader) -> DigestMismatch:
    return DigestMismatch([header.name], f"{header.describe()} is neither the delta's base nor its result")


def _resident_bytes(held: ShardBytes, header: ChunkHeader) -> Tensor:
    """Return the present bytes of the chunk, uint8 [n] on the CPU: a view where possible. All of it must be held."""
    if (lent := held.lend(*header.byte_range)) is not None:
        return lent.cpu()
    return held.read(header.offset, torch.empty(header.num_bytes, dtype=torch.uint8))


def _resident_elements(held: ShardBytes, positions: Tensor) -> Tensor:
    """Return the present values of these elements, words [n] on the CPU. All of them must be held."""
    local = positions if held.is_whole else held.local_elements(positions)[1]
    return held.local.take(local).cpu()
