"""The weights checker: SHA-256 of every tensor, snapshots, comparisons, and overwriting with random data.

A tensor's digest covers its length-prefixed name, dtype, shape and raw bytes (in row-major order, little-endian as in
memory); the digest of a rank covers the sorted tensor digests. In this digest a tensor is one message, unlike in the
model digest, so one thread hashes all of it: a tensor larger than its fair share of the bytes sets the time.

Every function takes (name, tensor) pairs, skips tensors that no weight update carries (`is_skipped`), and takes tied
ones once, under the first of their names.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout.bucket import flat_view
from ..manifest import NamedTensors, TensorSpec, dtype_name

SKIPPED_PARTS = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis", "expert_mask_gpu")
CHUNK_BYTES = 16 << 20  # a multiple of every element size; copied from a device at once


@dataclass(frozen=True)
class ChecksumReport:
    """The digests of one rank's tensors."""

    tensors: dict[str, str]  # hex SHA-256 by name
    rank_digest: str  # hex SHA-256 over the tensor digests, in the order of the names
    num_bytes: int
    seconds: float  # from the call to the last digest


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bytes differ from the snapshot's.

    The errors are in float64. They are infinite where an element is not a number on one side only, or where shape or
    dtype differ (then every element counts as differing).
    """

    name: str
    expected: str  # dtype and shape in the snapshot
    actual: str  # dtype and shape now
    max_abs_err: float
    mean_abs_err: float  # over all elements, equal ones included
    num_differing: int  # elements


@dataclass(frozen=True)
class CompareReport:
    """The comparison of tensors with a snapshot, by name."""

    matched: tuple[str, ...]
    missing: tuple[str, ...]  # in the snapshot only
    unexpected: tuple[str, ...]  # not in the snapshot
    changed: tuple[TensorDifference, ...]

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.unexpected or self.changed)


def checksum(named_tensors: NamedTensors, num_threads: int = 2, skip: Collection[str] = ()) -> ChecksumReport:
    """Digest every tensor. Changes nothing, and copies nothing that is contiguous on the CPU.

    skip: parts of names to leave out besides `SKIPPED_PARTS`. Raises ValueError listing duplicate names.
    """
    started = time.perf_counter()
    tensors = checked_tensors(named_tensors, skip)
    # Largest first, so that no thread still hashes a big one when the others are done.
    largest_first = sorted(tensors.items(), key=lambda item: -item[1].nbytes)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checksum") as pool:
        digests = dict(pool.map(lambda item: (item[0], tensor_sha256(*item)), largest_first))
    in_order = sorted(digests)
    return ChecksumReport(
        tensors={name: digests[name].hex() for name in tensors},
        rank_digest=hashlib.sha256(b"".join(digests[name] for name in in_order)).hexdigest(),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        seconds=time.perf_counter() - started,
    )


def snapshot(named_tensors: NamedTensors, skip: Collection[str] = ()) -> dict[str, Tensor]:
    """Copy the tensors to contiguous host memory, by name."""
    copies = {}
    for name, tensor in checked_tensors(named_tensors, skip).items():
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name].copy_(tensor)
    return copies


def compare(named_tensors: NamedTensors, expected: Mapping[str, Tensor], skip: Collection[str] = ()) -> CompareReport:
    """Compare tensors with a snapshot of them, byte by byte: equal not-a-numbers agree, 0.0 and -0.0 do not."""
    tensors = checked_tensors(named_tensors, skip)
    expected = checked_tensors(expected.items(), skip)
    differences = {name: _difference(name, expected[name], tensors[name]) for name in tensors if name in expected}
    return CompareReport(
        matched=tuple(name for name, difference in differences.items() if difference is None),
        missing=tuple(name for name in expected if name not in tensors),
        unexpected=tuple(name for name in tensors if name not in expected),
        changed=tuple(difference for difference in differences.values() if difference is not None),
    )


def reset_tensors(named_tensors: NamedTensors, seed: int | None = None, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Overwrite tensors in place with random data: floats in [0, 1), integers over their full range, random booleans.

    Returns the names. Equal seeds give equal data on one kind of device; None draws a fresh seed.
    """
    tensors = checked_tensors(named_tensors, skip)
    generators: dict[torch.device, torch.Generator] = {}
    for tensor in tensors.values():
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device)
            if seed is None:
                generators[tensor.device].seed()
            else:
                generators[tensor.device].manual_seed(seed)
        _randomize(tensor, generators[tensor.device])
    return tuple(tensors)


def is_skipped(name: str, tensor: Tensor, skip: Collection[str] = ()) -> bool:
    """Return whether the checker skips a tensor. The set is SGLang's.

    It skips derived tables, tensors marked `_skip_weight_check`, and names that contain an entry of `skip`.
    """
    return any(part in name for part in (*SKIPPED_PARTS, *skip)) or getattr(tensor, "_skip_weight_check", False)


def checked_tensors(named_tensors: NamedTensors, skip: Collection[str] = ()) -> dict[str, Tensor]:
    """Select the tensors to check, detached, by name; tied ones under their first name.

    Raises ValueError listing duplicate names.
    """
    pairs = list(named_tensors)
    if twice := sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1):
        raise ValueError(f"tensors named more than once: {', '.join(twice)}")
    chosen: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, tensor in pairs:
        if is_skipped(name, tensor, skip):
            continue
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        chosen[name] = tensor.detach()
    return chosen


def tensor_sha256(name: str, tensor: Tensor) -> bytes:
    """Hash length-prefixed (uint64, little-endian) name, dtype, shape (uint64 each) and raw bytes: SHA-256, 32
    bytes."""
    digest = hashlib.sha256()
    for field in (name.encode(), dtype_name(tensor.dtype).encode(), struct.pack(f"<{tensor.dim()}Q", *tensor.shape)):
        digest.update(struct.pack("<Q", len(field)) + field)
    digest.update(struct.pack("<Q", tensor.nbytes))
    for chunk in byte_chunks(tensor):
        digest.update(chunk.cpu().numpy())  # without the GIL
    return digest.digest()


def byte_chunks(tensor: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
    """Yield the bytes of a tensor in row-major order: uint8 vectors on its device, views where it is contiguous.

    Whole elements; at most `chunk_bytes` each, unless a single element is larger.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous() or tensor.nbytes <= chunk_bytes:
        if tensor.numel():
            yield from flat_view(tensor.contiguous()).view(torch.uint8).split(chunk_bytes)
        return
    row_bytes = tensor.nbytes // len(tensor)
    if row_bytes > chunk_bytes:
        for row in tensor:
            yield from byte_chunks(row, chunk_bytes)
    else:
        for rows in tensor.split(chunk_bytes // row_bytes):
            yield flat_view(rows.contiguous()).view(torch.uint8)


def _difference(name: str, expected: Tensor, actual: Tensor) -> TensorDifference | None:
    """Return the difference of two tensors, or None if all bytes agree."""
    wanted, found = (TensorSpec.of("", tensor).describe().strip() for tensor in (expected, actual))
    if wanted != found:
        infinite = float("inf")
        return TensorDifference(name, wanted, found, infinite, infinite, max(expected.numel(), actual.numel()))
    total, largest, num_differing = 0.0, 0.0, 0
    rest = flat_view(expected.contiguous()).view(torch.uint8) if expected.numel() else expected
    for chunk in byte_chunks(actual):
        theirs, ours = chunk.cpu(), rest[: len(chunk)].cpu()
        rest = rest[len(chunk) :]
        if torch.equal(theirs, ours):
            continue
        differs = (theirs != ours).view(-1, actual.element_size()).any(1)
        errors = (_as_float64(theirs.view(actual.dtype)[differs]) - _as_float64(ours.view(actual.dtype)[differs])).abs()
        errors = errors.nan_to_num(nan=float("inf"), posinf=float("inf"))
        num_differing += len(errors)
        total, largest = total + errors.sum().item(), max(largest, errors.max().item())
    if not num_differing:
        return None
    return TensorDifference(name, wanted, found, largest, total / actual.numel(), num_differing)


def _as_float64(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)


@torch.no_grad()
def _randomize(tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor.random_(0, 2, generator=generator)
    elif not tensor.dtype.is_floating_point:
        raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device).random_(0, 256, generator=generator)
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
    elif tensor.element_size() > 1:
        tensor.uniform_(0, 1, generator=generator)
    else:  # fp8: multiples of its resolution just below 1, so that nothing rounds up to 1
        step = torch.finfo(tensor.dtype).eps / 2
        draws = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).uniform_(0, 1, generator=generator)
        tensor.copy_(draws.div_(step).floor_().mul_(step))
