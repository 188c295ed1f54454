"""Tensor roots of a model on several ranks: each rank hashes its own part, and ranks exchange only hashes.

A rank sends the root of each tensor that it holds whole, and leaves of the digest tree (`model_digest.shard_leaves`) of
the others; merged, the leaves give the root of the whole tensor.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from torch import Tensor

from ...kernels.sha256.tiles import DIGEST_BYTES
from ..layout.shard_bytes import Shard
from ..manifest import TensorSpec
from .model_digest import MIN_BYTES_FOR_THREADS, merge_leaves, shard_leaves, tensor_root, tensor_roots, tile_grid

Leaves = dict[int, bytes]


def part_leaves(part: Tensor, shard: Shard) -> Leaves:
    """Hash a rank's part of a tensor; returns leaves by their index in the whole.

    Raises ValueError if the shard does not consist of whole cells of the digest's grid (`model_digest.shard_leaves`).
    """
    if not shard.full_shape:
        return shard_leaves(part, (), ())
    leaves: Leaves = {}
    done = 0
    for start, stop in shard.ranges:
        offsets = [0] * len(shard.full_shape)
        offsets[shard.dim] = start
        leaves |= shard_leaves(part.narrow(shard.dim, done, stop - start), shard.full_shape, offsets)
        done += stop - start
    return leaves


def require_whole_cells(shards: Mapping[str, Shard]) -> None:
    """Check that shards consist of whole cells of the digest's grid, so that ranks can hash them.

    Raises ValueError listing the shards that cut through a cell.
    """
    wrong = []
    for name, shard in shards.items():
        size = shard.full_shape[shard.dim] if shard.full_shape else 1
        if not shard.full_shape or shard.ranges == ((0, size),):
            continue
        grid = tile_grid(shard.full_shape)
        from_last = len(shard.full_shape) - 1 - shard.dim
        unit = (grid.cols, grid.rows)[from_last] if from_last < 2 else 1
        if unit and any(edge % unit for piece in shard.ranges for edge in piece):
            wrong.append(f"{name} {list(shard.full_shape)}: {list(shard.ranges)} of dim {shard.dim}, cells of {unit}")
    if wrong:
        raise ValueError(f"the digest's grid allows cuts into 2, 4, 8 or 16 parts, not these: {'; '.join(wrong)}")


def local_digests(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], num_threads: int | None = None
) -> dict[str, object]:
    """Compute this rank's contribution to the roots of these tensors, by name, as JSON: a root in hex, or leaves."""
    whole = [(n, t) for n, t in tensors.items() if n not in shards or tuple(t.shape) == tuple(shards[n].full_shape)]
    names = dict.fromkeys(name for name, _ in whole)
    cut = [(name, tensor) for name, tensor in tensors.items() if name not in names]
    found: dict[str, object] = {n: root.hex() for n, root in tensor_roots(whole, num_threads).items()}
    if num_threads is None:
        is_large = sum(tensor.nbytes for _, tensor in cut) >= MIN_BYTES_FOR_THREADS
        num_threads = min(8, len(os.sched_getaffinity(0))) if is_large else 1
    with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as pool:
        leaves = pool.map(lambda item: part_leaves(item[1].detach(), shards[item[0]]), cut)
        found |= {name: _packed(part) for (name, _), part in zip(cut, leaves, strict=True)}
    return found


def merged_roots(specs: Sequence[TensorSpec], contributions: Sequence[Mapping[str, object]]) -> dict[str, bytes]:
    """Merge all ranks' contributions (`local_digests`, under the same names) to the root of each of these tensors.

    A tensor with different bytes on different ranks is left out. Raises ValueError listing the tensors that the ranks
    together do not hold, or hold in another shape.
    """
    roots, wrong = {}, []
    for spec in specs:
        parts = {rank: own[spec.name] for rank, own in enumerate(contributions) if spec.name in own}
        leaves = [_unpacked(part) for part in parts.values() if not isinstance(part, str)]
        candidates = {bytes.fromhex(part) for part in parts.values() if isinstance(part, str)}
        if _disagree(leaves):
            continue
        try:
            if leaves or not candidates:
                merged = merge_leaves(spec.shape, leaves)
                candidates.add(tensor_root(spec.name, spec.dtype, spec.shape, merged))
        except ValueError as error:
            wrong.append(f"{spec.name}: {error}")
            continue
        if len(candidates) == 1:
            roots[spec.name] = candidates.pop()
    if wrong:
        raise ValueError(f"the ranks do not hold these together: {'; '.join(wrong)}")
    return roots


def _disagree(parts: Sequence[Leaves]) -> bool:
    merged: Leaves = {}
    return any(merged.setdefault(index, leaf) != leaf for part in parts for index, leaf in part.items())


def _packed(leaves: Leaves) -> list[list[object]]:
    """Encode leaves as runs: the index of the first, and all of them in base64."""
    runs: list[tuple[int, list[bytes]]] = []
    for index, leaf in sorted(leaves.items()):
        if not runs or runs[-1][0] + len(runs[-1][1]) != index:
            runs.append((index, []))
        runs[-1][1].append(leaf)
    return [[first, base64.b64encode(b"".join(run)).decode()] for first, run in runs]


def _unpacked(runs: object) -> Leaves:
    return dict(_leaves_of(cast(Sequence[tuple[int, str]], runs)))  # as `_packed` made them on another rank


def _leaves_of(runs: Sequence[tuple[int, str]]) -> Iterator[tuple[int, bytes]]:
    for first, text in runs:
        joined = base64.b64decode(text)
        for index in range(len(joined) // DIGEST_BYTES):
            yield first + index, joined[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
