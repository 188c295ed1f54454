"""Linear layers whose rows do not depend on their neighbours: several ways to compute x @ weight^T + bias.

`self_test` finds out which of them keeps that promise on this processor.

Dimension letters: M rows, N out_features, K in_features.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..machine import native
from ..machine.plain_memory import has_plain_memory, refuse_other_memory
from .gradients import gradient_product

LinearMethod = Literal["triton", "triton_fixed", "padded", "native", "rows", "library"]
Layer = tuple[Tensor, Tensor | None]  # weight [N,K], bias [N] or None
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [M,K], weight [N,K], bias [N] or None -> [M,N]

ROW_MULTIPLE = 4
SOURCE = "linear/linear.cpp"


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    method: LinearMethod,
    row_multiple: int = ROW_MULTIPLE,
    num_blocks: int = 1,
) -> Tensor:
    """Compute x [...,K] @ weight [N,K]^T + bias [N] -> [...,N], differentiable once in all three.

    With `num_blocks` > 1 the sum over K is that of a row-parallel layer: see `blocked_product`.

    - "triton": our Triton product in tiles chosen by M and N, and "triton_fixed" in tiles of one shape, invariant by
      construction (CUDA, float16 to float64; see `triton_kernels.py`);
    - "padded": the library's product over rows padded to a multiple of `row_multiple`; copies only where it pads;
    - "native": our C++ product, invariant by construction (CPU, float32 and bfloat16, fp32 sums);
    - "rows": the library's product over one row at a time, invariant by construction on any device, and slow;
    - "library": the library's product unchanged; not necessarily invariant.

    Backward passes are the library's products. Raises ValueError naming every argument that does not fit.
    """
    if method == "library" and num_blocks == 1:
        return F.linear(x, weight, bias)
    if method not in (*PRODUCTS, "library"):
        raise ValueError(f"method is {method!r}, not one of {', '.join([*PRODUCTS, 'library'])}")
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if method == "native" and num_blocks == 1 and not needs_grad:
        return native_products(x, ((weight, bias),))[0]  # skips the checks below, which cost a decode step too much
    _check(x, weight, bias, num_blocks)
    product = product_of(method, row_multiple)
    if num_blocks > 1:
        product = partial(blocked_product, product=product, num_blocks=num_blocks)
    rows = x.reshape(-1, x.shape[-1])
    if needs_grad:
        out = _Linear.apply(rows, weight, bias, product)
    else:
        out = product(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def product_of(method: LinearMethod, row_multiple: int = ROW_MULTIPLE) -> Product:
    """Return the forward product of a method, for the self-test."""
    if method == "library":
        return F.linear
    if method == "padded":
        return partial(padded_product, row_multiple=row_multiple)
    return PRODUCTS[method]


def blocked_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, product: Product, num_blocks: int) -> Tensor:
    """Compute the product as the sum of `num_blocks` partial products over equal blocks of K, added left to right.

    Ranks that each hold whole blocks add the same numbers in the same order, so every division of K among ranks gives
    the same bits. K must be a multiple of `num_blocks`.
    """
    if num_blocks == 1:
        return product(x, weight, bias)
    return add_blocks(block_partials(x, weight, product, num_blocks), bias)


def block_partials(x: Tensor, weight: Tensor, product: Product, num_blocks: int) -> Tensor:
    """Compute the partial products [num_blocks,M,N] of x [M,K] and weight [N,K], each rounded to x's dtype."""
    if num_blocks == 1:
        return product(x, weight, None).unsqueeze(0)
    width = x.shape[1] // num_blocks
    blocks = [slice(start, start + width) for start in range(0, width * num_blocks, width)]
    return torch.stack([product(x[:, block], weight[:, block], None) for block in blocks])


def add_blocks(partials: Tensor, bias: Tensor | None) -> Tensor:
    """Add partials [B,...,N] and bias [N] -> [...,N].

    Partials are added in fp32 from the first to the last, then the bias; the sum is rounded once to their dtype.
    """
    wide = torch.promote_types(partials.dtype, torch.float32)
    total = partials[0].to(wide)
    for partial_product in partials[1:]:
        total = total + partial_product
    return (total if bias is None else total + bias).to(partials.dtype)


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None, row_multiple: int = ROW_MULTIPLE) -> Tensor:
    missing = -x.shape[0] % row_multiple
    if not missing:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for i in range(x.shape[0]):
        # A copy: the alignment of a row must not depend on its place in a tensor.
        out[i] = F.linear(x[i : i + 1].clone(), weight, bias)[0]
    return out


def native_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return native_products(x, ((weight, bias),))[0]


def native_products(
    x: Tensor,
    layers: Iterable[Layer],
    entry: Callable[..., None] | None = None,
    *,
    gated: bool = False,
) -> list[Tensor]:
    """Compute x [...,K] times each weight [N,K]^T, plus its bias [N] -> [...,N] each. Without autograd.

    The bits are those of one `native_product` call for each layer; one call for all is faster.
    gated: of two layers of one shape, a gate and an up, only silu(gate) * up [...,N] is computed and returned, with the
    bits of `swiglu`. entry: `entry_point` of a library other than the one of this process. Raises ValueError where
    there is no such product (another device or dtype, or no compiler), and for arguments that do not fit.
    """
    dtype, lead, width = x.dtype, x.shape[:-1], x.shape[-1]
    if not (dtype is torch.bfloat16 or dtype is torch.float32) or not x.is_cpu:
        raise ValueError(f"the native product serves float32 and bfloat16 on a CPU, not {x.dtype} on {x.device}")
    x_stride = width
    if not x.is_contiguous():
        if x.dim() == 2 and x.stride(1) == 1:
            x_stride = x.stride(0)
        else:
            x = x.contiguous()
    outs: list[Tensor] = []
    table: list[int] = []
    kept = []  # copies that the call reads
    for weight, bias in layers:
        if weight.dtype is not dtype or weight.shape[-1] != width or weight.dim() != 2 or not weight.is_cpu:
            _check(x, weight, bias)
        elif not (has_plain_memory(weight) and has_plain_memory(x)):
            refuse_other_memory("invariant_linear", x=x, weight=weight)
        stride, step = weight.stride()
        if step != 1:
            kept.append(weight := weight.contiguous())
            stride = width
        if bias is not None:
            _check(x, weight, bias)
            kept.append(bias := bias.contiguous())
        if not (gated and outs):
            outs.append(x.new_empty((*lead, weight.shape[0])))
        address = 0 if bias is None else bias.data_ptr()
        table += (weight.data_ptr(), address, outs[-1].data_ptr(), weight.shape[0], stride)
    num_layers = len(table) // 5
    if gated and (num_layers != 2 or table[3] != table[8]):
        raise ValueError(f"a gated product is of two layers of one shape, not of {num_layers}: widths {table[3::5]}")
    call = entry or (_entry_points[0] if _entry_points else _entry_point())
    native.run(
        call,
        *(x.data_ptr(), lead.numel(), width, x_stride, (ctypes.c_int64 * len(table))(*table), num_layers),
        *(gated, dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return outs


def native_path(dtype: torch.dtype) -> str:
    """Return the ISA level, one of `native.ISA_LEVELS`, that the native product of this dtype uses."""
    return path_of(_library(), dtype)


def triton_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from . import triton_kernels as triton_linear  # imports Triton, which may not be installed

    return triton_linear.product(x, weight, bias)


def triton_fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from . import triton_kernels as triton_linear

    return triton_linear.fixed_product(x, weight, bias)


def _native_gated(x: Tensor, gate: Layer, up: Layer) -> Tensor:
    return native_products(x, (gate, up), gated=True)[0]


def _triton_products(x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    from . import triton_kernels as triton_linear

    return triton_linear.products(x, layers)


def _triton_gated(x: Tensor, gate: Layer, up: Layer) -> Tensor:
    from . import triton_kernels as triton_linear

    return triton_linear.gated_product(x, gate, up)


@dataclass(frozen=True)
class Together:
    """One call for several layers that read the same rows x [...,K], without autograd; the bits of separate calls."""

    products: Callable[[Tensor, Sequence[Layer]], list[Tensor]]  # of each layer: [...,N]
    gated: Callable[[Tensor, Layer, Layer], Tensor]  # silu(gate) * up [...,N] of two layers of one shape, as `swiglu`


def together_of(method: LinearMethod) -> Together | None:
    """Return a method's product of several layers at once, or None if it has none."""
    return TOGETHER.get(method)


TOGETHER: dict[str, Together] = {
    "native": Together(native_products, _native_gated),
    "triton": Together(_triton_products, _triton_gated),
}
PRODUCTS: dict[str, Product] = {
    "triton": triton_product,
    "triton_fixed": triton_fixed_product,
    "padded": padded_product,
    "native": native_product,
    "rows": row_product,
}

_entry_points: list[Callable[..., int]] = []


def entry_point(library: native.NativeLibrary) -> Callable[..., int]:
    """Return the product of a library built from SOURCE, as `native_products` calls it."""
    arguments: list[Any] = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, *[ctypes.c_int64] * 4]
    return library.function("lockstep_linear", arguments, ctypes.c_int64)


def path_of(library: native.NativeLibrary, dtype: torch.dtype) -> str:
    function = library.function("lockstep_linear_path", [ctypes.c_int64], ctypes.c_char_p)
    return function(dtype is torch.bfloat16).decode()


def _entry_point() -> Callable[..., int]:
    _entry_points.append(entry_point(_library()))
    return _entry_points[0]


def _library() -> native.NativeLibrary:
    library = native.load(SOURCE)
    if library is None:
        raise ValueError(f"the native product was asked for, but {native.why_unavailable(SOURCE)}")
    return library


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, num_blocks: int = 1) -> None:
    refuse_other_memory("invariant_linear", x=x, weight=weight, bias=bias)
    wrong = []
    if num_blocks < 1 or (x.dim() and x.shape[-1] % num_blocks):
        wrong.append(f"x is {list(x.shape)}, which {num_blocks} equal blocks do not fill")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        wrong.append(f"x is {list(x.shape)} and weight {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        wrong.append(f"bias is {list(bias.shape)} and weight {list(weight.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            wrong.append(f"{name} is {tensor.dtype} on {tensor.device}, x is {x.dtype} on {x.device}")
    if wrong:
        raise ValueError("invariant_linear: " + "; ".join(wrong))


class _Linear(torch.autograd.Function):
    """Any forward product, with the library's products as its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grad_x = gradient_product(grad_out, weight) if wanted[0] else None
        grad_weight = gradient_product(grad_out.T, x) if wanted[1] else None
        grad_bias = grad_out.sum(dim=0) if wanted[2] else None
        return grad_x, grad_weight, grad_bias, None
