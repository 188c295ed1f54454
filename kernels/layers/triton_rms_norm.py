"""The root-mean-square norm on a GPU (Triton): one program a row, whose squares are added in an order that depends on
the width alone. `rms_norm.py` has the definition.

Letters: M rows, D width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED, early_launch, wait_for_inputs
from ..machine.triton_numbers import INTERPRETED, rounded

MAX_WIDTH = 1 << 16  # of a row that one program holds
ROWS_EACH = 16  # rows whose parts of the weight gradient one program adds: few, so that programs fill a GPU

# Not specialised by the compiler, and neither are alignments: rows that start elsewhere in memory would get another
# layout of lanes, and their squares another order of addition.
_SIZES = ["num_rows", "width", "x_row", "grad_row"]
_SUMS = ["width", "x_row", "right_row", "has_right"]


def serves(x: Tensor) -> bool:
    """Return whether these kernels serve rows of this dtype and width."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) and x.shape[-1] <= MAX_WIDTH


def forward(x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    """Compute x [...,D] / rms(x) * weight [D], in x's dtype; round_first: round to it before the weight is applied."""
    rows, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        with torch.cuda.device_of(x):
            _launch_forward(rows, None, out, weight, out, eps, weight_offset, round_first)
    return out


def _launch_forward(
    rows: Tensor, others: Tensor | None, total: Tensor, weight: Tensor, out: Tensor, eps: float, weight_offset: float,
    round_first: bool,
) -> None:  # fmt: skip
    """Compute the norm of rows, or of rows + others -> `total`. One binary for both: their bits are the same."""
    width = rows.shape[1]
    _forward_kernel[(len(rows),)](
        *(rows, rows if others is None else others, weight.contiguous(), total, out, width, rows.stride(0)),
        *(rows.stride(0) if others is None else others.stride(0), int(others is not None), eps, weight_offset),
        ROUND_FIRST=round_first, HAS_OFFSET=bool(weight_offset), IS_DOUBLE=rows.dtype == torch.float64, **_shape(width),
        **UNFUSED, **early_launch(rows.device),
    )  # fmt: skip


def forward_of_sum(
    left: Tensor, right: Tensor, weight: Tensor, eps: float, weight_offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Compute left + right [...,D], rounded to their dtype, and its norm, in one launch; the bits of two."""
    if left.shape != right.shape or left.dtype is not right.dtype:
        raise ValueError(f"a sum of {list(left.shape)} {left.dtype} and {list(right.shape)} {right.dtype}")
    rows, others = _rows(left), _rows(right)
    out, total = (torch.empty_like(left, memory_format=torch.contiguous_format) for _ in range(2))
    if out.numel():
        with torch.cuda.device_of(left):
            _launch_forward(rows, others, total, weight, out, eps, weight_offset, round_first)
    return total, out


def backward(x: Tensor, weight: Tensor, eps: float, weight_offset: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight, in their dtypes, from grad [...,D] of the output; computed wide inside."""
    rows, grads = _rows(x), _rows(grad)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    num_parts = triton.cdiv(len(rows), ROWS_EACH)
    partials = torch.zeros(num_parts, width, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if grad_x.numel():
        with torch.cuda.device_of(x):
            _backward_kernel[(num_parts,)](
                *(rows, weight.contiguous(), grads, grad_x, partials),
                *(len(rows), width, rows.stride(0), grads.stride(0), eps, weight_offset),
                ROWS=ROWS_EACH, IS_DOUBLE=x.dtype == torch.float64, **_shape(width),
            )  # fmt: skip
    return grad_x, partials.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    if not (x.is_cuda or INTERPRETED.value):
        raise ValueError(f"the Triton norm serves a GPU, not {x.device}")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def scale_of(x, width, eps):
    """Compute 1 / rms of the row x; x is zero beyond the width."""
    mean = tl.sum(x * x, 0) / width + eps
    return 1.0 / (tl.sqrt(mean) if x.dtype == tl.float64 else tl.sqrt_rn(mean))


@triton.jit
def weighted(x, scale, weight, weight_offset, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr):
    """Multiply a row x by its scale and by the weight of its norm, rounded to dtype where the norm rounds."""
    out, weight = x * scale, weight.to(x.dtype)
    if HAS_OFFSET:
        weight += weight_offset
    if ROUND_FIRST:
        out = rounded(out, dtype).to(x.dtype)
        if HAS_OFFSET:
            weight = rounded(weight, dtype).to(x.dtype)
    return rounded(out * weight, dtype)


@triton.jit(
    do_not_specialize=_SUMS,
    do_not_specialize_on_alignment=["x_ptr", "right_ptr", "weight_ptr", "total_ptr", "out_ptr"],
)
def _forward_kernel(
    x_ptr, right_ptr, weight_ptr, total_ptr, out_ptr, width, x_row, right_row, has_right, eps, weight_offset,
    ROUND_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(IS_EARLY)
    wide: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + r * x_row + d, mask=d < width, other=0.0).to(wide)
    is_sum = d < width * has_right
    right = tl.load(right_ptr + r * right_row + d, mask=is_sum, other=0.0).to(wide)
    total = rounded(x + right, dtype)
    tl.store(total_ptr + r * width + d, total, mask=is_sum)
    x = tl.where(is_sum, total.to(wide), x)
    weight = tl.load(weight_ptr + d, mask=d < width, other=0.0)
    out = weighted(x, scale_of(x, width, eps), weight, weight_offset, dtype, ROUND_FIRST, HAS_OFFSET)
    tl.store(out_ptr + r * width + d, out, mask=d < width)


@triton.jit(do_not_specialize=_SIZES)
def _backward_kernel(
    x_ptr, weight_ptr, grad_ptr, grad_x_ptr, partials_ptr, num_rows, width, x_row, grad_row, eps, weight_offset,
    ROWS: tl.constexpr, IS_DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x for ROWS rows, and the part of the weight's gradient that these rows give."""
    wide: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    part = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + d, mask=d < width, other=0.0).to(wide) + weight_offset
    grad_weight = tl.zeros((BLOCK,), wide)
    for r in range(part * ROWS, tl.minimum(part * ROWS + ROWS, num_rows)):
        x = tl.load(x_ptr + r * x_row + d, mask=d < width, other=0.0).to(wide)
        grad = tl.load(grad_ptr + r * grad_row + d, mask=d < width, other=0.0).to(wide)
        scale = scale_of(x, width, eps)
        normed, grad_normed = x * scale, grad * weight
        slope = scale * (grad_normed - normed * (tl.sum(grad_normed * normed, 0) / width))
        tl.store(grad_x_ptr + r * width + d, rounded(slope, grad_x_ptr.dtype.element_ty), mask=d < width)
        grad_weight += grad * normed
    tl.store(partials_ptr + part * width + d, grad_weight, mask=d < width)
