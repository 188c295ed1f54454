"""The model digest: a SHA-256 tree over named tensors that is equal for every layout of one model.

Letters used in shapes: L leading entries (experts), R rows, C columns, each as one number; a cell is r rows by c
columns, and a tile is a contiguous piece of a cell.

Every tensor is cut by a grid that depends on its shape alone. The last two dimensions are cut into cells so that any
shard of 1, 2, 4, 8 or 16 ways along either (where that divides it) owns whole cells; leading dimensions are cut into
single entries. A cell, read row by row, is cut further into tiles of at most 16,384 elements. Leaves are the SHA-256 of
the tiles' raw bytes (little-endian, as in memory), cell after cell in row-major order. Ranks exchange leaves only:
`shard_leaves` on each rank and `merge_leaves` anywhere give the same root as `tensor_leaves` on the whole tensor.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ...kernels.sha256.tiles import DIGEST_BYTES, tile_hashes_of_all
from ..manifest import NamedTensors, dtype_name

MAX_WAYS = 16
MAX_TILE_ELEMENTS = 16_384
CHUNK_BYTES = 2 << 20  # size of one block, except that a cell is never split; where it is copied it stays in a cache
GPU_CHUNK_BYTES = 4 << 30  # a GPU hashes one tile no faster than some 100,000 at once
MIN_BYTES_FOR_THREADS = 32 << 20  # below this, starting threads costs more than they save


@dataclass(frozen=True)
class TileGrid:
    """The grid of tensors of one shape; see the module's docstring for the letters."""

    leading: int  # L, the product of all dimensions but the last two
    cell_rows: int  # cells along the rows
    cell_cols: int  # cells along the columns
    rows: int  # r, rows of one cell
    cols: int  # c, columns of one cell
    strip_rows: int  # rows of one tile; fewer in the last of a cell
    piece_cols: int  # columns of one tile: c, unless a single row is too long for a tile

    @property
    def num_cells(self) -> int:
        return self.leading * self.cell_rows * self.cell_cols

    @property
    def tiles_per_cell(self) -> int:
        return -(-self.rows // self.strip_rows) * -(-self.cols // self.piece_cols) if self.num_cells else 0

    @property
    def num_tiles(self) -> int:
        """Leaves of the tensor; 0 if it has no element."""
        return self.num_cells * self.tiles_per_cell


def tile_grid(shape: Sequence[int]) -> TileGrid:
    """Return the grid of a shape, a pure function of it. A vector counts as one row, a scalar as one element."""
    *leading, rows, cols = (1, 1, *shape) if len(shape) < 2 else shape
    num_leading = math.prod(leading)
    if 0 in (num_leading, rows, cols):
        return TileGrid(num_leading, 0, 0, 0, 0, 0, 0)
    ways_rows, ways_cols = math.gcd(rows, MAX_WAYS), math.gcd(cols, MAX_WAYS)
    r, c = rows // ways_rows, cols // ways_cols
    # Whole rows together where a row fits into a tile, pieces of single rows where it does not.
    strip_rows, piece_cols = max(1, MAX_TILE_ELEMENTS // c), min(c, MAX_TILE_ELEMENTS)
    return TileGrid(num_leading, ways_rows, ways_cols, r, c, strip_rows, piece_cols)


def tensor_leaves(tensor: Tensor) -> list[bytes]:
    """Hash each tile of a whole tensor, in order: SHA-256. Any dtype, device and strides; does not change the
    tensor."""
    return _leaves(tensor, tile_grid(tensor.shape))


def shard_leaves(tensor: Tensor, full_shape: Sequence[int], offsets: Sequence[int]) -> dict[int, bytes]:
    """Hash the tiles of a shard that starts at `offsets` of `full_shape`; returns leaves by index in the whole tensor.

    Raises ValueError, naming every dimension, if the shard leaves the full shape or cuts through a cell.
    """
    grid = tile_grid(full_shape)
    if not len(tensor.shape) == len(full_shape) == len(offsets):
        shapes = f"shard {list(tensor.shape)}, full shape {list(full_shape)}, offsets {list(offsets)}"
        raise ValueError(f"{shapes}: they differ in rank")
    if tensor.numel() == 0:
        return {}
    units = (*(1 for _ in full_shape[:-2]), grid.rows, grid.cols)[-len(full_shape) :] if full_shape else ()
    wrong = [
        f"dim {d}: [{start}, {start + size}) of {full} must lie on multiples of {unit}"
        for d, (size, full, start, unit) in enumerate(zip(tensor.shape, full_shape, offsets, units, strict=True))
        if start < 0 or start + size > full or start % unit or size % unit
    ]
    if wrong:
        raise ValueError(f"shard of {list(full_shape)} does not own whole cells: " + "; ".join(wrong))
    *lead, rows, cols = (1, 1, *tensor.shape)[-max(2, tensor.dim()) :]
    *lead_start, row_start, col_start = (0, 0, *offsets)[-max(2, tensor.dim()) :]
    entries = torch.arange(grid.leading).reshape(full_shape[:-2])
    for d, (start, size) in enumerate(zip(lead_start, lead, strict=True)):
        entries = entries.narrow(d, start, size)
    part = replace(grid, leading=entries.numel(), cell_rows=rows // grid.rows, cell_cols=cols // grid.cols)
    indices = (
        ((entry * grid.cell_rows + i) * grid.cell_cols + j) * grid.tiles_per_cell + t
        for entry in entries.flatten().tolist()
        for i in range(row_start // grid.rows, row_start // grid.rows + part.cell_rows)
        for j in range(col_start // grid.cols, col_start // grid.cols + part.cell_cols)
        for t in range(grid.tiles_per_cell)
    )
    return dict(zip(indices, _leaves(tensor, part), strict=True))


def merge_leaves(shape: Sequence[int], parts: Iterable[Mapping[int, bytes]]) -> list[bytes]:
    """Merge the leaves of shards to those of a whole tensor of `shape`; replicas may overlap.

    Raises ValueError naming missing and unknown tiles, and tiles with different leaves.
    """
    num_tiles = tile_grid(shape).num_tiles
    merged: dict[int, bytes] = {}
    differing: set[int] = set()
    for part in parts:
        differing.update(index for index, leaf in part.items() if merged.setdefault(index, leaf) != leaf)
    problems = {
        "missing": [i for i in range(num_tiles) if i not in merged],
        "unknown": sorted(i for i in merged if not 0 <= i < num_tiles),
        "differing": sorted(differing),
    }
    if any(problems.values()):
        listed = "; ".join(f"{what} tiles {_abridged(tiles)}" for what, tiles in problems.items() if tiles)
        raise ValueError(f"leaves do not make a tensor of shape {list(shape)} with {num_tiles} tiles: {listed}")
    return [merged[i] for i in range(num_tiles)]


def tensor_root(name: str, dtype: torch.dtype, shape: Sequence[int], leaves: Sequence[bytes]) -> bytes:
    """Hash length-prefixed name, dtype, shape and leaves: SHA-256, 32 bytes. Raises ValueError for a wrong leaf
    count."""
    num_tiles = tile_grid(shape).num_tiles
    if len(leaves) != num_tiles:
        raise ValueError(f"{name}: a tensor of shape {list(shape)} has {num_tiles} tiles, not {len(leaves)}")
    return _root(name, dtype, shape, b"".join(leaves))


def _root(name: str, dtype: torch.dtype, shape: Sequence[int], leaves: bytes) -> bytes:
    fields = [
        name.encode(),
        dtype_name(dtype).encode(),
        struct.pack(f"<{len(shape)}Q", *shape),
    ]
    header = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    return hashlib.sha256(header + struct.pack("<Q", len(leaves) // DIGEST_BYTES) + leaves).digest()


def model_root(roots: Iterable[tuple[str, bytes]]) -> str:
    """Compute a model's hex digest from (name, tensor root) pairs in any order. Raises ValueError for duplicate
    names."""
    pairs = sorted(roots)
    _refuse_duplicates([name for name, _ in pairs])
    return hashlib.sha256(struct.pack("<Q", len(pairs)) + b"".join(root for _, root in pairs)).hexdigest()


def model_digest(named_tensors: NamedTensors, num_threads: int | None = None) -> str:
    """Compute the hex digest of whole tensors.

    It does not depend on their order, devices or strides, or on the number of threads. `num_threads` as in
    `tensor_roots`.
    """
    return model_root(tensor_roots(named_tensors, num_threads).items())


def tensor_roots(named_tensors: NamedTensors, num_threads: int | None = None) -> dict[str, bytes]:
    """Compute the root of each whole tensor by name, in their order, as `tensor_root` of its leaves.

    `model_root` of them is the model digest, so an update verifies tensors one by one and hashes each byte once.
    `num_threads` None uses up to 8 of the cores of this process, or one if the model is small. Raises ValueError for
    duplicate names, before anything is hashed.
    """
    tensors = list(named_tensors)
    _refuse_duplicates([name for name, _ in tensors])
    if num_threads is None:
        num_bytes = sum(t.numel() * t.element_size() for _, t in tensors)
        num_threads = min(8, len(os.sched_getaffinity(0))) if num_bytes >= MIN_BYTES_FOR_THREADS else 1
    grids = [tile_grid(t.shape) for _, t in tensors]
    leaves: list[list[bytes]] = [[] for _ in tensors]

    def hash_blocks(blocks: list[tuple[int, Tensor]]) -> list[tuple[int, bytes]]:
        return list(zip((k for k, _ in blocks), _hashes([(block, grids[k]) for k, block in blocks]), strict=True))

    with ExitStack() as stack:
        if num_threads == 1:
            hashed: Iterator[list[tuple[int, bytes]]] = map(hash_blocks, _work(tensors, grids))
        else:
            pool = stack.enter_context(ThreadPoolExecutor(num_threads, thread_name_prefix="digest"))
            hashed = pool.map(hash_blocks, _work(tensors, grids))
        for k, hashes in chain.from_iterable(hashed):
            leaves[k].append(hashes)
    return {
        name: _root(name, tensor.dtype, tensor.shape, b"".join(leaves_))
        for (name, tensor), leaves_ in zip(tensors, leaves, strict=True)
    }


def _work(tensors: Sequence[tuple[str, Tensor]], grids: Sequence[TileGrid]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield lists of blocks with the index of their tensor; small blocks share a list to save wake-ups of threads."""
    batch: list[tuple[int, Tensor]] = []
    num_bytes = 0
    for k, (_, tensor) in enumerate(tensors):
        for block in _blocks(tensor.detach(), grids[k]):
            batch.append((k, block))
            num_bytes += block.numel() * block.element_size()
            if num_bytes >= _chunk_bytes(block) // 2:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _blocks(tensor: Tensor, grid: TileGrid) -> Iterator[Tensor]:
    """Yield views [k, r, m, c] of the tensor, k * m whole cells each, in the order of the cells and of bounded size."""
    if grid.num_tiles == 0:
        return
    if tensor.dim() > 2 and not tensor.is_contiguous():  # leading dimensions that may not merge
        entry_grid = replace(grid, leading=grid.leading // len(tensor))
        for entry in tensor:
            yield from _blocks(entry, entry_grid)
        return
    rows = tensor.view(grid.leading * grid.cell_rows, grid.rows, grid.cell_cols, grid.cols)
    row_bytes, chunk_bytes = rows[0].numel() * rows.element_size(), _chunk_bytes(tensor)
    if row_bytes <= chunk_bytes:
        yield from rows.split(chunk_bytes // row_bytes)
    else:
        for row in rows:
            yield from row.unsqueeze(0).split(max(1, chunk_bytes * grid.cell_cols // row_bytes), dim=2)


def _chunk_bytes(tensor: Tensor) -> int:
    return GPU_CHUNK_BYTES if tensor.is_cuda else CHUNK_BYTES


def _hashes(blocks: Iterable[tuple[Tensor, TileGrid]]) -> list[bytes]:
    """Hash the tiles of each block [k, r, m, c]; returns the leaves of each block, 32 bytes each."""
    return tile_hashes_of_all([(block, grid.strip_rows, grid.piece_cols) for block, grid in blocks])


def _leaves(tensor: Tensor, grid: TileGrid) -> list[bytes]:
    hashes = b"".join(_hashes((block, grid) for block in _blocks(tensor.detach(), grid)))
    return [hashes[i : i + DIGEST_BYTES] for i in range(0, len(hashes), DIGEST_BYTES)]


def _refuse_duplicates(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"tensors named more than once: {', '.join(twice)}")


def _abridged(tiles: Sequence[int]) -> str:
    return ", ".join(map(str, tiles[:8])) + (f" and {len(tiles) - 8} more" if len(tiles) > 8 else "")
