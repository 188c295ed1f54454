"""Lossless differences between two states of one model.

Tensors are compared as bytes, in chunks, so NaNs and negative zeros are compared exactly. A chunk carries the digests
of its bytes before and after; `apply.py` describes their use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ..layout.bucket import ALIGNMENT, byte_view
from ..manifest import NamedTensors, TensorSpec, dtype_name
from ..workers import Workers, in_order
from .chunk import ChunkHeader, DeltaChunk, Kind, make_payload, sha256, squeeze, word_dtype

CHUNK_BYTES = 4 << 20
DENSITY_LIMIT = 0.15
_SAMPLE_BYTES = 64 << 10


def encode_delta(
    base: Mapping[str, Tensor] | NamedTensors,
    new: NamedTensors,
    *,
    density_limit: float = DENSITY_LIMIT,
    chunk_bytes: int = CHUNK_BYTES,
    chunk_digests: bool = True,
    num_threads: int = 2,
) -> Iterator[DeltaChunk]:
    """Encode the chunks that turn `base` into `new`, tensor by tensor in the order of `new`. Changes neither.

    A chunk of which more than `density_limit` of the elements change is sent in full, as a view of the new tensor:
    consume it before that is overwritten. Else it is the smaller one of changed elements and XOR (estimated from a
    sample). Without `chunk_digests` the digests of whole chunks are left out, which saves most of the time, and only
    `check="touched"` can apply the delta. A tensor of `new` is not needed any more when the next one is taken.

    Raises ValueError for a chunk size that is not a positive multiple of the alignment, and listing every tensor that
    only one state has, that has another shape or dtype there, or that comes twice; chunks may have been yielded before.
    """
    if chunk_bytes <= 0 or chunk_bytes % ALIGNMENT:
        raise ValueError(f"chunk_bytes must be a positive multiple of {ALIGNMENT}, not {chunk_bytes}")
    bases = base if isinstance(base, Mapping) else dict(base)
    wrong: list[str] = []
    seen: set[str] = set()
    with Workers(num_threads, "delta") as workers:
        for name, tensor in new:
            wrong += _mismatch(bases.get(name), TensorSpec.of(name, tensor), seen)
            seen.add(name)
            if wrong:
                continue  # keep going, to list all of them
            spec = TensorSpec.of(name, tensor)
            old, now = byte_view(bases[name]), byte_view(tensor)

            def encode(offset: int, spec: TensorSpec = spec, old: Tensor = old, now: Tensor = now) -> DeltaChunk:
                before, after = (flat[offset : offset + chunk_bytes].cpu().numpy() for flat in (old, now))
                return _encode_chunk(spec, offset, before, after, density_limit, chunk_digests)

            yield from in_order(workers, encode, range(0, max(1, spec.num_bytes), chunk_bytes), num_threads)
    wrong += [f"{name}: only the base has it" for name in bases if name not in seen]
    if wrong:
        raise ValueError("the two states are not of one model: " + "; ".join(wrong))


def _mismatch(base: Tensor | None, spec: TensorSpec, seen: set[str]) -> list[str]:
    if spec.name in seen:
        return [f"{spec.name}: comes twice"]
    if base is None:
        return [f"{spec.name}: the base does not have it"]
    other = TensorSpec.of(spec.name, base)
    return [] if other == spec else [f"base {other.describe()}, new {spec.describe()}"]


def _encode_chunk(
    spec: TensorSpec, offset: int, old: np.ndarray, new: np.ndarray, density_limit: float, digests: bool
) -> DeltaChunk:
    """Encode one chunk. old, new: uint8 [n], the same bytes of the tensor before and after."""
    itemsize = spec.dtype.itemsize
    word = word_dtype(itemsize)
    before, after = old.view(word), new.view(word)
    changed = np.flatnonzero(before != after)
    num_changed = changed.size if itemsize == word.itemsize else np.unique(changed // 2).size
    num_elements = old.size // itemsize
    parts: list[bytes] = []
    gap_bytes, touched = 0, None
    kind: Kind = "same"
    if num_changed > density_limit * num_elements:
        kind = "full"
    elif num_changed:
        kind, parts, gap_bytes = _smaller(before, after, changed, itemsize)
    if kind == "elements":
        touched = (sha256(before[changed]), sha256(after[changed]))
    payload = torch.from_numpy(new) if kind == "full" else make_payload(parts)
    pre = sha256(old) if digests or kind == "xor" else None
    post = pre if kind == "same" else sha256(new) if pre else None
    header = ChunkHeader(
        spec.name,
        dtype_name(spec.dtype),
        spec.shape,
        offset,
        old.size,
        kind,
        int(num_changed),
        (new.size,) if kind == "full" else tuple(map(len, parts)),
        gap_bytes,
        pre,
        post,
        touched,
        post if kind == "full" and post else sha256(payload),
    )
    return DeltaChunk(header, payload)


def _smaller(
    before: np.ndarray, after: np.ndarray, changed: np.ndarray, itemsize: int
) -> tuple[Kind, list[bytes], int]:
    """Return the smallest of elements, XOR and full: its kind, payload and gap size."""
    best: tuple[Kind, list[bytes], int] = ("full", [], 0)
    size = before.nbytes
    if itemsize == before.itemsize:
        gaps = np.diff(changed, prepend=-1) - 1
        gap = np.min_scalar_type(int(gaps.max()))
        parts = [squeeze(gaps.astype(gap)), squeeze(before[changed] ^ after[changed])]
        if sum(map(len, parts)) < size:
            best, size = ("elements", parts, gap.itemsize), sum(map(len, parts))
    num_sampled = min(before.size, _SAMPLE_BYTES // before.itemsize)
    middle = slice((before.size - num_sampled) // 2, (before.size + num_sampled) // 2)
    if len(squeeze(before[middle] ^ after[middle])) * before.size < size * num_sampled:
        part = squeeze(before ^ after)
        if len(part) < size:
            best = ("xor", [part], 0)
    return best
