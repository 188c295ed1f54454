"""Products of routes with the weights of their experts on a GPU (Triton), and the weighted sum of a row's routes.

A small kernel lists the routes of each expert; a program of the product then computes some columns of one expert, a
tile of its routes at a time, with the instructions and the steps along K of `triton_kernels.py`. So a route has the
bits of the product with its expert's weight alone (`first_difference` checks it on the device). Nothing is read on the
host, so that a decode step can be recorded.

Letters: M rows, R = M * repeats routes, E experts, K in_features, N out_features.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layers.triton_swiglu import SERVED as GATED
from ..layers.triton_swiglu import forward as swiglu_of
from ..layers.triton_swiglu import gated as gate_values
from ..machine import triton_numbers
from ..machine.triton_launches import UNFUSED, early_launch, wait_for_inputs
from ..machine.triton_numbers import INTERPRETED, dot_added, rounded, widened
from .grouped import faults_of_operands
from .tiles import Tile, choose_grouped_tile, grouped_tiles_of
from .triton_kernels import INTERPRETED_STEP, SERVED, fixed_product

_MOST_AT_ONCE = 4096  # routes that a program looks at together
_COLUMNS = 1024  # of a row, of one program


class Routes:
    """The experts of all routes, int64 [R], in the order of rows; on a GPU. They must lie in [0, num_experts), as those
    of a router do: to check that would take a read on the host, and the rows of other routes are not computed."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """List the routes by expert."""
        if not (experts.is_cuda or INTERPRETED.value):
            raise ValueError(f"Triton's grouped product serves a GPU, not {experts.device}")
        self._experts = experts.contiguous()
        self._order = torch.empty_like(experts, dtype=torch.int32)  # routes, by expert
        self._starts = experts.new_empty(num_experts + 1, dtype=torch.int32)  # of each expert in the order
        count = len(experts)
        block = triton.next_power_of_2(min(max(count, 16), _MOST_AT_ONCE))
        with torch.cuda.device_of(experts):
            _place_kernel[(num_experts,)](
                self._experts, self._order, self._starts, count, BLOCK=block, **early_launch(experts.device)
            )

    def product(self, x: Tensor, weights: Tensor, biases: Tensor | None = None, *, gated: bool = False) -> Tensor:
        """Compute for each route r the row x[r // repeats] @ weights[experts[r]]^T + biases[experts[r]] -> [R,N].

        x [R / repeats,K], weights [E,N,K] and biases [E,N] of one dtype, any strides. gated: the weights [E,2 N,K] hold
        gates and then ups; returns silu(gate) * up [R,N] with the bits of `swiglu`. Raises ValueError for arguments
        that do not fit. Without autograd.
        """
        self._check(x, weights, biases, gated)
        num_experts, num_columns, _ = weights.shape
        if gated and x.dtype not in GATED:
            return swiglu_of(*self.product(x, weights, biases).chunk(2, dim=-1))
        tile = choose_grouped_tile(x.dtype, len(self._experts), num_experts, gated=gated)
        return self._launch(x, weights, biases, num_columns // 2 if gated else num_columns, tile, gated)

    def _launch(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, num_columns: int, tile: Tile, is_gated: bool
    ) -> Tensor:  # fmt: skip
        num_experts, _, width = weights.shape
        out = x.new_empty(len(self._experts), num_columns)
        if not out.numel():
            return out
        step = min(tile.k, INTERPRETED_STEP) if triton_numbers.INTERPRETED.value else tile.k
        with torch.cuda.device_of(x):
            _grouped_kernel[(num_experts * triton.cdiv(num_columns, tile.n),)](
                *(x, weights, weights if biases is None else biases, self._order, self._starts, out),
                *(len(out) // len(x), width, num_columns, *x.stride(), *weights.stride()),
                *((0, 0) if biases is None else biases.stride()),
                BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=step, HAS_BIAS=biases is not None, IS_GATED=is_gated,
                IS_DOUBLE=x.dtype == torch.float64, HAS_REST=width % step != 0, num_warps=tile.num_warps,
                num_stages=tile.num_stages, **early_launch(x.device),
            )  # fmt: skip
        return out

    def _check(self, x: Tensor, weights: Tensor, biases: Tensor | None, gated: bool) -> None:
        wrong, count = faults_of_operands(x, weights, biases, gated), len(self._experts)
        if x.dtype not in SERVED:
            wrong.append(f"x is {x.dtype}")
        if len(x) and count % len(x):
            wrong.append(f"{count} routes of {len(x)} rows")
        if len(weights) != len(self._starts) - 1:
            wrong.append(f"weights of {len(weights)} experts for routes to {len(self._starts) - 1}")
        if wrong:
            raise ValueError("the grouped product: " + "; ".join(wrong))


def routed_sum(outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the routes of each row, outputs [M * repeats,N] times weights [M,repeats], first to last -> [M,N].

    Each product and each sum is rounded to the type that torch promotes both dtypes to, the last sum to `dtype`. Serves
    float32, bfloat16 and float16.
    """
    num_rows, repeats = weights.shape
    outputs, weights = outputs.contiguous(), weights.contiguous()
    out = outputs.new_empty(num_rows, outputs.shape[1], dtype=dtype)
    between = torch.promote_types(outputs.dtype, weights.dtype)
    if out.numel():
        with torch.cuda.device_of(out):
            _sum_kernel[(num_rows, triton.cdiv(out.shape[1], _COLUMNS))](
                *(outputs, weights, out, out.shape[1]), REPEATS=repeats, BLOCK=_COLUMNS,
                BETWEEN=getattr(tl, str(between).removeprefix("torch.")), **UNFUSED, **early_launch(out.device),
            )  # fmt: skip
    return out


@cache
def first_difference(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Describe the first tile in which a route of `width` inputs has other bits than its own product, or None."""
    generator = torch.Generator().manual_seed(5)
    x, weights = (
        torch.rand(*shape, width, generator=generator, dtype=torch.float32).sub_(0.5).to(device, dtype)
        for shape in ((90,), (4, 88))
    )
    experts = torch.randint(4, (180,), generator=generator)
    experts[experts == 3] = 0  # many of one, and one without any
    routes = Routes(experts.to(device), 4)
    each = [fixed_product(x, weight, None) for weight in weights]
    expected = torch.stack([each[expert][route // 2] for route, expert in enumerate(experts.tolist())])
    gated = swiglu_of(*expected.chunk(2, dim=-1)) if dtype in GATED else None
    for tile in grouped_tiles_of(dtype):
        for given in (weights, weights.transpose(1, 2).contiguous().transpose(1, 2)):
            if not torch.equal(routes._launch(x, given, None, 88, tile, False), expected):
                return f"tiles of {tile.m} x {tile.n}, {width} inputs: the grouped product differs"
    for tile in grouped_tiles_of(dtype, gated=True):
        if gated is not None and not torch.equal(routes._launch(x, weights, None, 44, tile, True), gated):
            return f"tiles of {tile.m} x {tile.n}, {width} inputs: the gated grouped product differs"
    return None


@triton.jit(do_not_specialize=["num_routes"])
def _place_kernel(experts_ptr, order_ptr, starts_ptr, num_routes, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):
    """List the routes of one expert in their order, after those of the experts before it."""
    wait_for_inputs(IS_EARLY)
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    begin = tl.zeros((), tl.int32)
    for first in range(0, num_routes, BLOCK):
        has_route = first + i < num_routes
        chosen = tl.load(experts_ptr + first + i, mask=has_route, other=0)
        begin += tl.sum((has_route & (chosen < expert)).to(tl.int32), 0)
    tl.store(starts_ptr + expert, begin)
    for first in range(0, num_routes, BLOCK):
        has_route = first + i < num_routes
        is_its = has_route & (tl.load(experts_ptr + first + i, mask=has_route, other=0) == expert)
        place = begin + tl.cumsum(is_its.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, first + i, mask=is_its)
        begin += tl.sum(is_its.to(tl.int32), 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, begin)


@triton.jit(do_not_specialize=["repeats"])
def _grouped_kernel(
    x_ptr, weight_ptr, bias_ptr, order_ptr, starts_ptr, out_ptr,
    repeats, width, num_columns, x_row, x_step, expert_step, weight_row, weight_step, bias_expert, bias_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_DOUBLE: tl.constexpr, HAS_REST: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the routes of one expert."""
    wait_for_inputs(IS_EARLY)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    expert = (tl.program_id(0) // tiles_n).to(tl.int64)
    columns = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    has_column, steps = columns < num_columns, tl.arange(0, BLOCK_K)
    begin, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    bias_ptr += expert * bias_expert
    for first in range(begin, end, BLOCK_M):
        place = first + tl.arange(0, BLOCK_M)
        has_row = place < end
        routes = tl.load(order_ptr + place, mask=has_row, other=0).to(tl.int64)
        x_tile = x_ptr + (routes // repeats)[:, None] * x_row + steps[None, :] * x_step
        weight_at = weight_ptr + expert * expert_step + steps[:, None] * weight_step + columns[None, :] * weight_row
        if IS_GATED:
            up_at = weight_at + (columns * 0 + num_columns)[None, :] * weight_row
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if IS_DOUBLE else tl.float32)
        if IS_GATED:
            total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, width, BLOCK_K):
            a_mask, b_mask = has_row[:, None], has_column[None, :]
            if HAS_REST:
                has_step = steps < width - start
                a_mask, b_mask = a_mask & has_step[None, :], b_mask & has_step[:, None]
            a = tl.load(x_tile, mask=a_mask, other=0.0)
            total = dot_added(total, a, tl.load(weight_at, mask=b_mask, other=0.0))
            if IS_GATED:
                total_up = dot_added(total_up, a, tl.load(up_at, mask=b_mask, other=0.0))
                up_at += BLOCK_K * weight_step
            x_tile += BLOCK_K * x_step
            weight_at += BLOCK_K * weight_step
        if HAS_BIAS:
            total += tl.load(bias_ptr + columns * bias_step, mask=has_column, other=0.0).to(total.dtype)[None, :]
        result = rounded(total, out_ptr.dtype.element_ty)
        if IS_GATED:
            if HAS_BIAS:
                of_ups = bias_ptr + (columns + num_columns) * bias_step
                total_up += tl.load(of_ups, mask=has_column, other=0.0).to(tl.float32)[None, :]
            up = widened(rounded(total_up, out_ptr.dtype.element_ty))
            result = gate_values(widened(result), up, out_ptr.dtype.element_ty)
        out_tile = out_ptr + routes[:, None] * num_columns + columns[None, :]
        tl.store(out_tile, result, mask=has_row[:, None] & has_column[None, :])


@triton.jit
def _sum_kernel(
    outputs_ptr, weights_ptr, out_ptr, num_columns, REPEATS: tl.constexpr, BLOCK: tl.constexpr,
    BETWEEN: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_EARLY)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for route in tl.static_range(REPEATS):
        output = tl.load(outputs_ptr + (row * REPEATS + route) * num_columns + columns, mask=columns < num_columns)
        share = widened(rounded(widened(output) * widened(tl.load(weights_ptr + row * REPEATS + route)), BETWEEN))
        total = share if route == 0 else widened(rounded(total + share, BETWEEN))
    tl.store(
        out_ptr + row * num_columns + columns, rounded(total, out_ptr.dtype.element_ty), mask=columns < num_columns
    )
