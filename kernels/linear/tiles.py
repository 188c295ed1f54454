"""The tiles of the Triton product, chosen by the number of rows and of columns.

All tiles of a dtype take the same steps of K, and their instructions add them alike, so that the choice changes no bit;
the self-test checks that on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_PROCESSORS = 132  # of an H100: a grid of fewer programs leaves some of them idle
FEW_ROWS = 64  # of the smallest tile; where there are no more, taller tiles only pad


@dataclass(frozen=True)
class Tile:
    """The shape of a program's part of the product, and its step along K."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# From the tile that reads its operands least often to the one that makes the most programs.
HALF_TILES = (
    Tile(128, 256, 64, num_warps=8, num_stages=3),
    Tile(128, 128, 64, num_warps=8, num_stages=3),
    Tile(128, 64, 64, num_warps=4, num_stages=4),
    Tile(64, 64, 64, num_warps=4, num_stages=4),
    Tile(64, 32, 64, num_warps=4, num_stages=5),
    Tile(64, 16, 64, num_warps=4, num_stages=6),
)
WIDE_TILES = (  # no tensor cores: float32 and float64
    Tile(32, 32, 32, num_warps=4, num_stages=2),
    Tile(32, 16, 32, num_warps=4, num_stages=2),
)
FIXED_HALF, FIXED_WIDE = HALF_TILES[4], WIDE_TILES[0]
WIDEST_GATED = 128  # columns of a tile that holds two sums


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles that products of this dtype may have."""
    return WIDE_TILES if dtype in (torch.float32, torch.float64) else HALF_TILES


def fixed_tile(dtype: torch.dtype) -> Tile:
    """Return the one tile of products whose tiles are not chosen."""
    return FIXED_WIDE if dtype in (torch.float32, torch.float64) else FIXED_HALF


def choose_tile(dtype: torch.dtype, num_rows: int, columns: Sequence[int], *, gated: bool = False) -> Tile:
    """Choose the first tile whose grid has a program for each processor, or else the one with the most programs.

    columns: of each product of the call; gated: of the one result, whose tiles hold two sums.
    """
    tiles = [
        tile
        for tile in tiles_of(dtype)
        if (tile.m <= FEW_ROWS or num_rows > FEW_ROWS) and (not gated or tile.n <= WIDEST_GATED)
    ]
    for tile in tiles:
        if num_programs(tile, num_rows, columns) >= NUM_PROCESSORS:
            return tile
    return max(tiles, key=lambda tile: num_programs(tile, num_rows, columns))


def num_programs(tile: Tile, num_rows: int, columns: Sequence[int]) -> int:
    """Return the size of the grid: a tile holds columns of one product only."""
    return -(-num_rows // tile.m) * sum(-(-count // tile.n) for count in columns)
