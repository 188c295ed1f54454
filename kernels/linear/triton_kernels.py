"""x @ weight^T + bias on a GPU (Triton); the sum of an element always adds the same tiles of K in the same order.

Rows beyond M are masked, K is never split, nothing is tuned at run time and kernels are not specialised to M: a row's
bits depend on neither M nor its place. `product` chooses its tiles by M and N (`tiles.py`). All multiply with the same
instruction family (wgmma on Hopper: 64 rows, 16 of K) over the same steps of K, so their bits should agree; the
invariance self-test checks this on the device, and `fixed_product` has one shape only. float32 is multiplied as float32
(no TF32); sums are float32, of float64 float64.

Layers that read the same rows share a launch: `products` gives each its own result, `gated_product` silu(gate) * up of
two. Their bits are those of separate calls. Dimension letters: M rows, N out_features, K in_features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layers.triton_swiglu import SERVED as GATED
from ..layers.triton_swiglu import forward as swiglu_of
from ..layers.triton_swiglu import gated
from ..machine import triton_numbers
from ..machine.triton_launches import early_launch, fetch, wait_for_inputs
from ..machine.triton_numbers import INTERPRETED, dot_added, rounded, widened
from .tiles import FEW_ROWS, Tile, choose_tile, fits_gated, fixed_tile, tiles_of

GROUP = 8  # row tiles that read the same weights together, while the L2 cache holds them
MOST_LAYERS = 3  # of one launch
LINE = tl.constexpr(64)  # elements of 2 bytes in a line of the cache
INTERPRETED_STEP = 64  # along K, of all tiles: the interpreter adds a step at once, and instructions 16 of K
_FETCHED = 8  # lines of each column that a program fetches while it waits for its inputs; measured: 16 are too many
SERVED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Layer = tuple[Tensor, Tensor | None]  # weight [N,K], bias [N]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [M,K] @ weight [N,K]^T + bias [N] -> [M,N], in tiles chosen by M and N. Any strides."""
    return _launch(x, [(weight, bias)], choose_tile(x.dtype, x.shape[0], weight.shape[:1]))[0]


def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same in tiles of one shape: slower where there are many rows."""
    return _launch(x, [(weight, bias)], fixed_tile(x.dtype))[0]


def products(x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Compute x [...,K] times each weight [N,K]^T, plus its bias -> [...,N] each; one launch for layers that fit it."""
    rows = x.reshape(-1, x.shape[-1])
    if _fit_one_launch(layers):
        columns = [weight.shape[0] for weight, _ in layers]
        outs = _launch(rows, layers, choose_tile(x.dtype, len(rows), columns))
    else:
        outs = [product(rows, *layer) for layer in layers]
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


def gated_product(x: Tensor, gate: Layer, up: Layer) -> Tensor:
    """Compute silu(gate) * up [...,N] of two layers of one shape that read x [...,K]; the bits of `swiglu`."""
    rows = x.reshape(-1, x.shape[-1])
    if gate[0].shape != up[0].shape:
        raise ValueError(f"a gated product is of two layers of one shape, not {[list(w.shape) for w, _ in (gate, up)]}")
    if _fit_one_launch((gate, up)) and x.dtype in GATED:
        tile = choose_tile(x.dtype, len(rows), gate[0].shape[:1], gated=True)
        out = _launch(rows, (gate, up), tile, is_gated=True)[0]
    else:
        out = swiglu_of(product(rows, *gate), product(rows, *up))
    return out.view(*x.shape[:-1], out.shape[1])


def first_tile_difference(in_features: Sequence[int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Describe the first tile, or launch of several layers, whose bits are not those of the fixed tile; None: all are.

    in_features: the widths to try.
    """
    generator = torch.Generator().manual_seed(4)
    for width in sorted(set(in_features)):
        x, *weights = (
            torch.rand(rows, width, generator=generator, dtype=torch.float32).sub_(0.5).to(device, dtype)
            for rows in (70, 270, 270, 41)
        )
        layers: list[Layer] = [(weight, None) for weight in weights]
        expected = [fixed_product(x, *layer) for layer in layers]
        for tile in tiles_of(dtype):
            where = f"tiles of {tile.m} x {tile.n}, {width} inputs"
            found = _launch(x, layers, tile)
            if not all(map(torch.equal, found, expected)) or not torch.equal(_launch(x, layers[:1], tile)[0], found[0]):
                return f"{where}: the product differs"
            if dtype in GATED and fits_gated(tile):
                together = _launch(x, layers[:2], tile, is_gated=True)[0]
                if not torch.equal(together, swiglu_of(*expected[:2])):
                    return f"{where}: the gated product differs"
    return None


def _fit_one_launch(layers: Sequence[Layer]) -> bool:
    """Return whether one launch serves these layers: equal strides of the weights, and biases for all or none."""
    strides, biases = {weight.stride() for weight, _ in layers}, [bias for _, bias in layers if bias is not None]
    fits = len(layers) <= MOST_LAYERS and len(strides) == 1 and all(bias.stride(0) == 1 for bias in biases)
    return fits and len(biases) in (0, len(layers)) and len({weight.dtype for weight, _ in layers}) == 1


def _launch(x: Tensor, layers: Sequence[Layer], tile: Tile, *, is_gated: bool = False) -> list[Tensor]:
    """Compute x [M,K] times the weights of up to MOST_LAYERS layers, or the gated product of two -> [M,N] each."""
    if x.dtype not in SERVED or not (x.is_cuda or INTERPRETED.value):
        raise ValueError(f"the Triton product serves float16 to float64 on a GPU, not {x.dtype} on {x.device}")
    num_rows, num_outs = x.shape[0], 1 if is_gated else len(layers)
    outs = [x.new_empty(num_rows, weight.shape[0]) for weight, _ in layers[:num_outs]]
    columns = [out.shape[1] for out in outs]
    grid = (triton.cdiv(num_rows, tile.m) * sum(triton.cdiv(count, tile.n) for count in columns),)
    if not math.prod(grid):
        return outs
    step = min(tile.k, INTERPRETED_STEP) if triton_numbers.INTERPRETED.value else tile.k
    is_short = num_rows <= FEW_ROWS and x.element_size() == 2
    weights, biases = (_padded(tensors) for tensors in zip(*layers, strict=True))
    bias = biases[0]
    with torch.cuda.device_of(x):
        _linear_kernel[grid](
            *(x, *weights, *biases, *_padded(outs), num_rows, x.shape[1], *_padded(columns)),
            *(*x.stride(), *weights[0].stride(), 0 if bias is None else bias.stride(0)),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=step, GROUP_M=GROUP, HAS_BIAS=bias is not None,
            LAYERS=len(layers), IS_GATED=is_gated, IS_DOUBLE=x.dtype == torch.float64,
            HAS_REST=x.shape[1] % step != 0, FETCHES=_FETCHED if is_short else 0, num_warps=tile.num_warps,
            num_stages=tile.num_stages, **early_launch(x.device),
        )  # fmt: skip
    return outs


def _padded(values: Sequence[Any]) -> list[Any]:
    """Repeat the last value, which no program reads, up to MOST_LAYERS."""
    return [*values, *[values[-1]] * (MOST_LAYERS - len(values))]


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, weight_1, weight_2, bias_ptr, bias_1, bias_2, out_ptr, out_1, out_2,
    num_rows, width, num_columns, columns_1, columns_2,
    x_row, x_step, weight_row, weight_step, bias_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, LAYERS: tl.constexpr, IS_GATED: tl.constexpr, IS_DOUBLE: tl.constexpr,
    HAS_REST: tl.constexpr, FETCHES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile [BLOCK_M, BLOCK_N] of one layer's output, one program a tile."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    first_1 = tiles_n
    if LAYERS > 1 and not IS_GATED:
        tiles_n += tl.cdiv(columns_1, BLOCK_N)
    first_2 = tiles_n
    if LAYERS > 2:
        tiles_n += tl.cdiv(columns_2, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    tile_n = within // group_m
    if LAYERS > 1 and not IS_GATED:
        is_it = tile_n >= first_1
        weight_ptr, out_ptr = tl.where(is_it, weight_1, weight_ptr), tl.where(is_it, out_1, out_ptr)
        num_columns, first = tl.where(is_it, columns_1, num_columns), tl.where(is_it, first_1, 0)
        if HAS_BIAS:
            bias_ptr = tl.where(is_it, bias_1, bias_ptr)
        if LAYERS > 2:
            is_it = tile_n >= first_2
            weight_ptr, out_ptr = tl.where(is_it, weight_2, weight_ptr), tl.where(is_it, out_2, out_ptr)
            num_columns, first = tl.where(is_it, columns_2, num_columns), tl.where(is_it, first_2, first)
            if HAS_BIAS:
                bias_ptr = tl.where(is_it, bias_2, bias_ptr)
        tile_n -= first
    # int64: offsets into a large [M, N] exceed int32
    rows = ((first_m + within % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    has_row, has_column = rows < num_rows, columns < num_columns

    steps = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + rows[:, None] * x_row + steps[None, :] * x_step
    weight_at = steps[:, None] * weight_step + columns[None, :] * weight_row
    if FETCHES > 0:  # a product of few rows waits for its weights, which no kernel of the step writes
        ahead = tl.minimum(tl.arange(0, FETCHES) * LINE, width - 1)
        line = tl.minimum(columns, num_columns - 1)[:, None] * weight_row + ahead[None, :] * weight_step
        fetch(weight_ptr + line, IS_EARLY)
        if IS_GATED:
            fetch(weight_1 + line, IS_EARLY)
    wait_for_inputs(IS_EARLY)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if IS_DOUBLE else tl.float32)
    if IS_GATED:
        total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        a_mask, b_mask = has_row[:, None], has_column[None, :]
        if HAS_REST:
            has_step = steps < width - start
            a_mask, b_mask = a_mask & has_step[None, :], b_mask & has_step[:, None]
        a = tl.load(x_tile, mask=a_mask, other=0.0)
        total = dot_added(total, a, tl.load(weight_ptr + weight_at, mask=b_mask, other=0.0))
        if IS_GATED:
            total_up = dot_added(total_up, a, tl.load(weight_1 + weight_at, mask=b_mask, other=0.0))
        x_tile += BLOCK_K * x_step
        weight_at += BLOCK_K * weight_step
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns * bias_step, mask=has_column, other=0.0).to(total.dtype)[None, :]
    result = rounded(total, out_ptr.dtype.element_ty)
    if IS_GATED:
        if HAS_BIAS:
            total_up += tl.load(bias_1 + columns * bias_step, mask=has_column, other=0.0).to(tl.float32)[None, :]
        up = widened(rounded(total_up, out_ptr.dtype.element_ty))
        result = gated(widened(result), up, out_ptr.dtype.element_ty)
    out_tile = out_ptr + rows[:, None] * num_columns + columns[None, :]
    tl.store(out_tile, result, mask=has_row[:, None] & has_column[None, :])
