"""The tiles of the Triton product, chosen by the number of rows and of columns.

All tiles of a dtype add along K in the order of one instruction, 16 at a time, so that the choice changes no bit; the
self-test checks that on the device. The choice was measured on an H100 at the widths of an 8B model (BENCHMARKS.md): a
product of few rows takes as long as its weights take to arrive, so that enough of them must be under way on every
processor; one of many rows, as long as its operands take to pass from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_PROCESSORS = 132  # of an H100
FEW_ROWS = 64  # of the smallest tile; where there are no more, taller tiles only pad
_MOST_PADDING = 1.25  # rows of all tiles, over those that there are; of fewer than 128, reading weights takes longer


@dataclass(frozen=True)
class Tile:
    """The shape of a program's part of the product, its step along K, and the number of steps under way."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# From the tile that reads its operands least often to the one that makes the most programs.
_MANY = (
    Tile(256, 128, 64, num_warps=8, num_stages=3),
    Tile(128, 128, 64, num_warps=8, num_stages=3),
    Tile(64, 128, 64, num_warps=4, num_stages=4),
)
_MANY_GATED = Tile(128, 128, 64, num_warps=8, num_stages=3)  # two sums fit into its registers
# Of few rows, by the number of programs: one for each processor has longer steps, and more of them under way.
_SOME_ONCE, _SOME = Tile(64, 64, 128, num_warps=4, num_stages=4), Tile(64, 64, 64, num_warps=4, num_stages=6)
_FEW_ONCE, _FEW = Tile(64, 32, 128, num_warps=4, num_stages=5), Tile(64, 32, 64, num_warps=4, num_stages=8)
_FEW_OFTEN = Tile(64, 64, 128, num_warps=4, num_stages=3)  # many programs: they follow one another
_FEW_GATED = Tile(64, 16, 64, num_warps=4, num_stages=6)
_NARROW = Tile(64, 16, 64, num_warps=4, num_stages=8)
_OFTEN = 8  # programs of each processor
HALF_TILES = (*_MANY, _SOME_ONCE, _SOME, _FEW_OFTEN, _FEW_ONCE, _FEW, _FEW_GATED, _NARROW)
WIDE_TILES = (  # no tensor cores: float32 and float64
    Tile(32, 32, 32, num_warps=4, num_stages=2),
    Tile(32, 16, 32, num_warps=4, num_stages=2),
)
# Of routes to experts: each expert's columns are programs of their own, so that there are many.
_GROUPED_FEW = {False: _FEW_OFTEN, True: _FEW_GATED}  # by whether there are two sums
_GROUPED_MANY = {False: _MANY_GATED, True: Tile(128, 64, 64, num_warps=8, num_stages=4)}
FIXED_HALF, FIXED_WIDE = Tile(64, 32, 64, num_warps=4, num_stages=5), WIDE_TILES[0]
WIDEST_GATED = 128  # columns of a tile that holds two sums


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles that products of this dtype may have."""
    return WIDE_TILES if dtype in (torch.float32, torch.float64) else HALF_TILES


def fixed_tile(dtype: torch.dtype) -> Tile:
    """Return the one tile of products whose tiles are not chosen."""
    return FIXED_WIDE if dtype in (torch.float32, torch.float64) else FIXED_HALF


def fits_gated(tile: Tile) -> bool:
    """Return whether a program may hold two sums of this tile: they spill where it is too large."""
    return tile.n <= WIDEST_GATED and tile.m * tile.n <= _MANY_GATED.m * _MANY_GATED.n


def choose_tile(dtype: torch.dtype, num_rows: int, columns: Sequence[int], *, gated: bool = False) -> Tile:
    """Choose the tile of a call. columns: of each product of the call; gated: of the one result, of two sums."""

    def programs(tile: Tile) -> int:
        return num_programs(tile, num_rows, columns)

    if dtype in (torch.float32, torch.float64):
        fills = [tile for tile in WIDE_TILES if programs(tile) >= NUM_PROCESSORS]
        return fills[0] if fills else max(WIDE_TILES, key=programs)
    if num_rows > FEW_ROWS:
        for tile in (_MANY_GATED, _SOME_ONCE) if gated else _MANY:
            pads = -(-num_rows // tile.m) * tile.m > _MOST_PADDING * max(num_rows, 2 * FEW_ROWS)
            if programs(tile) >= NUM_PROCESSORS and not pads:
                return tile
        if programs(_SOME_ONCE) > NUM_PROCESSORS // 2:
            return _SOME_ONCE if programs(_SOME_ONCE) <= NUM_PROCESSORS else _SOME
    if gated and programs(_FEW) > NUM_PROCESSORS:
        return _FEW_GATED
    if programs(_FEW) >= _OFTEN * NUM_PROCESSORS:
        return _FEW_OFTEN
    if programs(_FEW) <= NUM_PROCESSORS // 2:
        return _NARROW
    return _FEW_ONCE if programs(_FEW) <= NUM_PROCESSORS else _FEW


def grouped_tiles_of(dtype: torch.dtype, *, gated: bool = False) -> tuple[Tile, ...]:
    """Return the tiles that products with experts of this dtype may have."""
    is_wide = dtype in (torch.float32, torch.float64)
    return (FIXED_WIDE,) if is_wide else (_GROUPED_FEW[gated], _GROUPED_MANY[gated])


def choose_grouped_tile(dtype: torch.dtype, num_routes: int, num_experts: int, *, gated: bool = False) -> Tile:
    """Choose the tile of a product of routes with their experts; gated: of the one result, of two sums."""
    return grouped_tiles_of(dtype, gated=gated)[0 if num_routes <= FEW_ROWS * num_experts else -1]


def num_programs(tile: Tile, num_rows: int, columns: Sequence[int]) -> int:
    """Return the size of the grid: a tile holds columns of one product only."""
    return -(-num_rows // tile.m) * sum(-(-count // tile.n) for count in columns)
