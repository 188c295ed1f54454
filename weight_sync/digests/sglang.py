"""The digests of SGLang's weights checker, for frameworks that compare them between engines of one layout.

They cover a tensor's bytes only, not its name, dtype or shape, and differ by device: a truncated SHA-256 for tensors on
the CPU, a position-mixing 64-bit hash of 32-bit words for tensors on a GPU. Neither resists an attacker; our own proof
is the model digest. Written from the definition in SGLang 0.5.23 (srt/utils/weight_checker.py and the Triton kernel
`tensor_hash` of multimodal/mm_utils.py). FP8 weights are hashed as they are in memory; SGLang dequantises its
block-quantised ones first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from ..manifest import NamedTensors
from .checker import byte_chunks, checked_tensors

Kind = Literal["cpu", "cuda"]

TILE_WORDS = 8192
CPU_CHUNK_WORDS = 16 * TILE_WORDS  # hashed at once, so that the intermediate values stay in a cache
DEVICE_CHUNK_WORDS = 1024 * TILE_WORDS
_LOW32, _LOW64 = (1 << 32) - 1, (1 << 64) - 1
_SEED1 = 0x243F6A88
_SEED2 = ((_SEED1 * 0x9E3779B1) ^ 0xDEADBEEF) & _LOW32


@dataclass(frozen=True)
class Parallelism:
    """The position of a rank, as in the checker's reply for one role ("target" or "draft")."""

    role: str = "target"
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    rank: int = 0
    size: int = 1


def rank_record(
    named_tensors: NamedTensors,
    parallelism: Iterable[Parallelism] = (Parallelism(),),
    *,
    kind: Kind | None = None,
    skip: Collection[str] = (),
    num_threads: int = 2,
) -> dict[str, object]:
    """Build one rank's entry of the checker's reply.

    It has checksums by name, per_gpu_checksum, and parallelism_info (a list, one entry a role). `kind` None uses each
    tensor's own device, so that the reply is SGLang's; a fixed one makes CPU and GPU engines comparable. Raises
    ValueError listing duplicate names.
    """
    tensors = checked_tensors(named_tensors, skip)
    largest_first = sorted(tensors.items(), key=lambda item: -item[1].nbytes)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checksum") as pool:
        digests = dict(pool.map(lambda item: (item[0], tensor_digest(item[1], kind)), largest_first))
    checksums = {name: digests[name] for name in tensors}
    return {
        "checksums": checksums,
        "per_gpu_checksum": per_gpu_checksum(checksums),
        "parallelism_info": [asdict(role) for role in parallelism],
    }


def per_gpu_checksum(checksums: Mapping[str, str]) -> str:
    """Hash name and digest of each tensor, in the order of the names: SHA-256, 64 hex digits."""
    return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()


def per_engine_checksum(per_gpu_checksums: Iterable[str]) -> str:
    """Hash the ranks' checksums, in TP order: SHA-256, 64 hex digits."""
    return hashlib.sha256("".join(per_gpu_checksums).encode()).hexdigest()


def tensor_digest(tensor: Tensor, kind: Kind | None = None) -> str:
    """Hash a tensor to 16 lower-case hex digits.

    `kind` None is "cpu" for a tensor on the CPU and "cuda" for any other. Either kind is computed on the tensor's
    device. Raises ValueError for another kind.
    """
    kind = kind or ("cpu" if tensor.device.type == "cpu" else "cuda")
    if kind == "cpu":
        digest = hashlib.sha256()
        for chunk in byte_chunks(tensor):
            digest.update(chunk.cpu().numpy())
        return digest.hexdigest()[:16]
    if kind == "cuda":
        return f"{_word_hash(tensor):016x}"
    raise ValueError(f'kind must be "cpu" or "cuda", not {kind!r}')


@torch.no_grad()
def _word_hash(tensor: Tensor) -> int:
    """Compute the hash of a GPU tensor. Needs memory for some chunks, and for a copy if the tensor is not
    contiguous."""
    on_cpu = tensor.device.type == "cpu"
    chunk_words = CPU_CHUNK_WORDS if on_cpu else DEVICE_CHUNK_WORDS
    num_words = -(-tensor.nbytes // 4)
    total, first_word = 0, 0
    for chunk in byte_chunks(tensor.contiguous(), 4 * chunk_words):
        if len(chunk) % 4 or chunk.storage_offset() % 4:  # the tail, or a view that starts inside a word
            padded = torch.zeros(-(-len(chunk) // 4) * 4, dtype=torch.uint8, device=chunk.device)
            padded[: len(chunk)] = chunk
            chunk = padded
        words = chunk.view(torch.int32)
        index = torch.arange(len(words), dtype=torch.int32, device=words.device).add_(_int32(first_word))
        first_word += len(words)
        total += _sum_of_tiles(words, index, 0x27D4EB2D, _SEED1, 15, num_words) << 32
        total += _sum_of_tiles(words, index, 0x165667B1, _SEED2, 13, num_words)
    return _splitmix64(total & _LOW64)


def _sum_of_tiles(words: Tensor, index: Tensor, factor: int, seed: int, turn: int, num_words: int) -> int:
    """Sum one 32-bit hash per tile. words and their index in the tensor: int32 [n], read as unsigned."""
    keys = index * _int32(factor)
    keys.add_(_int32(seed)).bitwise_xor_(_shift_right(index, 32 - turn).bitwise_or_(index << turn)).bitwise_xor_(words)
    keys = _fmix32(keys)
    num_whole = len(keys) // TILE_WORDS * TILE_WORDS
    sums = keys[:num_whole].view(-1, TILE_WORDS).sum(1, dtype=torch.int64)
    if num_whole < len(keys):
        sums = torch.cat([sums, keys[num_whole:].sum(dtype=torch.int64).view(1)])
    hashes = _fmix32(sums.to(torch.int32).bitwise_xor_(_int32(4 * num_words)))
    return int(hashes.to(torch.int64).bitwise_and_(_LOW32).sum())


def _fmix32(values: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 (Appleby), in place: int32 [n], arithmetic modulo 2^32."""
    values.bitwise_xor_(_shift_right(values, 16)).mul_(_int32(0x85EBCA6B))
    values.bitwise_xor_(_shift_right(values, 13)).mul_(_int32(0xC2B2AE35))
    return values.bitwise_xor_(_shift_right(values, 16))


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift logically: torch's shift repeats the sign of an int32."""
    return (values >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _splitmix64(value: int) -> int:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014). 0 stays 0."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _LOW64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _LOW64
    return value ^ value >> 31


def _int32(value: int) -> int:
    """Return the signed number with the low 32 bits of `value`."""
    value &= _LOW32
    return value - (1 << 32) if value >> 31 else value
