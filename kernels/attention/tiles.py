"""The tiles of Triton's attention, and the division of its work among programs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

FEW_ROWS = 8  # rows per sequence, on average: with more, programs fill the GPU without sharing splits
MANY_PROGRAMS = 2048  # enough to fill any GPU: splits are not shared among more
MAX_PARTIAL_BYTES = 1 << 29  # size of the sums of splits passed between the two kernels


@dataclass(frozen=True)
class Tiling:
    """The tile sizes. Bits depend on `keys` and `split`, a function of dtype and widths; equal in decode, prefill and
    training."""

    rows: int
    keys: int
    split: int  # a multiple of keys
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Sharing:
    """The division of splits among programs; no bit depends on it."""

    num_programs: int  # programs that share the splits of a tile of rows
    num_slots: int  # partial sums per (row, head): one, or one per split


def tiling_of(dtype: torch.dtype, width: int) -> Tiling:
    """Choose the tiling. width: the larger of D and E."""
    if dtype == torch.float32:  # no tensor cores
        return Tiling(rows=16, keys=32, split=256, num_warps=8)
    # 16 rows are the fewest that tensor cores take: decode is limited by memory, and has at most G rows of a sequence.
    # Five stages let block ids be read before the keys that they point to, and two tiles of keys be under way.
    return Tiling(rows=16, keys=64 if width <= 128 else 32, split=256, num_stages=5)


def tall_tiling(tiling: Tiling) -> Tiling:
    """Return the tiling of many rows: 64 of them are what a group of Hopper's warps multiplies at a time. Two stages
    were the fastest on an H100."""
    return dataclasses.replace(tiling, rows=64, num_stages=2)


def share_splits(num_rows: int, num_sequences: int, num_tiles: int, num_splits: int, row_bytes: int) -> Sharing:
    """Choose the sharing of splits from shapes alone.

    num_tiles: programs without sharing; num_splits: of the longest possible context; row_bytes: size of one slot of all
    rows and heads.
    """
    num_programs = min(num_splits, MANY_PROGRAMS // max(1, num_tiles))
    is_decode = num_rows <= FEW_ROWS * num_sequences
    if num_programs < 2 or not is_decode or num_splits * row_bytes > MAX_PARTIAL_BYTES:
        return Sharing(1, 1)
    return Sharing(num_programs, num_splits)
