"""x @ weight^T + bias on a GPU (Triton); the sum of an element always adds the same tiles of K in the same order.

Rows beyond M are masked, K is never split, nothing is tuned at run time and kernels are not specialised to M: a row's
bits depend on neither M nor its place. `product` takes one of two tile shapes by M. Both multiply with the same
instruction family (wgmma on Hopper: 64 rows, 16 of K) over the same steps of K, so their bits should agree; the
invariance self-test checks this on the device, and `fixed_product` has one shape only. float32 is multiplied as float32
(no TF32); sums are float32, of float64 float64.
Dimension letters: M rows, N out_features, K in_features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED, dot_added, rounded

MANY_ROWS = 128  # from this on arithmetic takes most of the time, below it reading the weights does
GROUP = 8  # row tiles that read the same weights together, while the L2 cache holds them


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


_HALF_FEW = Tile(64, 32, 64, num_warps=4, num_stages=5)
_HALF_MANY = Tile(128, 128, 64, num_warps=8, num_stages=3)
_WIDE = Tile(32, 32, 32, num_warps=4, num_stages=2)  # no tensor cores: float32 and float64
SERVED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [M,K] @ weight [N,K]^T + bias [N] -> [M,N], in tiles chosen by M. Any strides."""
    return _product(x, weight, bias, _tile(x.dtype, x.shape[0] >= MANY_ROWS))


def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same in tiles of one shape: slower where there are many rows."""
    return _product(x, weight, bias, _tile(x.dtype, has_many_rows=False))


def _tile(dtype: torch.dtype, has_many_rows: bool) -> Tile:
    if dtype in (torch.float32, torch.float64):
        return _WIDE
    return _HALF_MANY if has_many_rows else _HALF_FEW


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    if x.dtype not in SERVED or not (x.is_cuda or INTERPRETED.value):
        raise ValueError(f"the Triton product serves float16 to float64 on a GPU, not {x.dtype} on {x.device}")
    num_rows, num_columns = x.shape[0], weight.shape[0]
    out = x.new_empty(num_rows, num_columns)
    if not out.numel():
        return out
    grid = (triton.cdiv(num_rows, tile.m) * triton.cdiv(num_columns, tile.n),)
    with torch.cuda.device_of(x):
        _linear_kernel[grid](
            *(x, weight, bias, out, num_rows, num_columns, x.shape[1]),
            *(*x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), out.stride(0)),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=GROUP, HAS_BIAS=bias is not None,
            IS_DOUBLE=x.dtype == torch.float64, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_columns, width,
    x_row, x_step, weight_row, weight_step, bias_step, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_DOUBLE: tl.constexpr,
):  # fmt: skip
    """Compute one tile [BLOCK_M, BLOCK_N] of the output, one program a tile."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    # int64: offsets into a large [M, N] exceed int32
    rows = ((first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (within // group_m * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    has_row, has_column = rows < num_rows, columns < num_columns

    steps = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + rows[:, None] * x_row + steps[None, :] * x_step
    weight_tile = weight_ptr + steps[:, None] * weight_step + columns[None, :] * weight_row
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if IS_DOUBLE else tl.float32)
    for start in range(0, width, BLOCK_K):
        has_step = steps < width - start
        a = tl.load(x_tile, mask=has_row[:, None] & has_step[None, :], other=0.0)
        b = tl.load(weight_tile, mask=has_step[:, None] & has_column[None, :], other=0.0)
        total = dot_added(total, a, b)
        x_tile += BLOCK_K * x_step
        weight_tile += BLOCK_K * weight_step
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns * bias_step, mask=has_column, other=0.0).to(total.dtype)[None, :]
    out_tile = out_ptr + rows[:, None] * out_row + columns[None, :]
    tl.store(out_tile, rounded(total, out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])
