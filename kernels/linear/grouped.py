"""Products of rows with a weight each, chosen among the weights of experts, in one call of the native product.

Letters: R routes, K in_features, N out_features, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..machine import native
from ..machine.plain_memory import refuse_other_memory
from .linear import SOURCE


class _Grouped(ctypes.Structure):
    """The struct Grouped of grouped.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "experts", "weights", "biases", "y")),
        *((name, ctypes.c_int64) for name in ("R", "x_repeats", "x_stride", "E", "N", "K")),
        *((name, ctypes.c_int64) for name in ("expert_stride", "weight_stride", "is_gated", "is_transposed")),
    )


def grouped_products(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    biases: Tensor | None = None,
    entry: Callable[..., int] | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Compute for each route r the row x[r // repeats] @ weights[experts[r]]^T + biases[experts[r]] -> [R,N].

    x [R / repeats,K]; experts: int64 [R]; weights [E,N,K], a transposed view of [E,K,N] too; biases [E,N]. Each row has
    the bits of `native_product` with its weight alone. Without autograd.
    gated: the weights [E,2 N,K] hold gates and then ups; returns silu(gate) * up [R,N] with the bits of `swiglu`.
    entry: `grouped_entry_point` of a library other than the one of this process.
    Raises ValueError for arguments that do not fit, a chosen expert that does not exist included.
    """
    _check(x, experts, weights, biases, gated)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, biases = experts.contiguous(), None if biases is None else biases.contiguous()
    num_routes, width, (num_experts, num_columns, _) = len(experts), x.shape[1], weights.shape
    num_columns = num_columns // 2 if gated else num_columns
    is_transposed = not gated and weights.stride(2) != 1 and weights.stride(1) == 1
    if not is_transposed and weights.stride(2) != 1:
        weights = weights.contiguous()
    out = x.new_empty(num_routes, num_columns)
    if not num_routes:
        return out
    call = _Grouped(
        x.data_ptr(), experts.data_ptr(), weights.data_ptr(), None if biases is None else biases.data_ptr(),
        out.data_ptr(), num_routes, num_routes // len(x), x.stride(0), num_experts, num_columns, width,
        weights.stride(0), weights.stride(2 if is_transposed else 1), gated, is_transposed,
    )  # fmt: skip
    if native.run(entry or _entry_point(), call, x.dtype is torch.bfloat16, torch.get_num_threads()):
        chosen = sorted(set(experts.tolist()) - set(range(num_experts)))
        raise ValueError(f"routes choose the experts {chosen}, but there are {num_experts}")
    return out


def grouped_entry_point(library: native.NativeLibrary) -> Callable[..., int]:
    """Return the product of a library built from SOURCE, as `grouped_products` calls it."""
    arguments: list[Any] = [ctypes.POINTER(_Grouped), ctypes.c_int64, ctypes.c_int64]
    return library.function("lockstep_linear_grouped", arguments, ctypes.c_int64)


@cache
def _entry_point() -> Callable[..., int]:
    library = native.load(SOURCE)
    if library is None:
        raise ValueError(f"the native product was asked for, but {native.why_unavailable(SOURCE)}")
    return grouped_entry_point(library)


def _check(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None, gated: bool) -> None:
    refuse_other_memory("grouped_products", x=x, experts=experts, weights=weights, biases=biases)
    wrong = []
    if x.dtype not in (torch.bfloat16, torch.float32) or not (x.is_cpu and weights.is_cpu):
        wrong.append(f"x is {x.dtype} on {x.device}, the weights are {weights.dtype} on {weights.device}")
    if experts.dtype is not torch.int64 or experts.dim() != 1 or len(experts) % (len(x) or len(experts) + 1):
        wrong.append(f"experts are {experts.dtype} {list(experts.shape)} for {len(x)} rows")
    if wrong := [*wrong, *faults_of_operands(x, weights, biases, gated)]:
        raise ValueError("grouped_products: " + "; ".join(wrong))


def faults_of_operands(x: Tensor, weights: Tensor, biases: Tensor | None, gated: bool) -> list[str]:
    """List what does not fit of x [rows,K], weights [E,N,K] and biases [E,N], on any device."""
    wrong = []
    if {weights.dtype, x.dtype if biases is None else biases.dtype} != {x.dtype}:
        of_biases = "" if biases is None else f", the biases {biases.dtype}"
        wrong.append(f"x is {x.dtype}, the weights are {weights.dtype}{of_biases}")
    if x.dim() != 2 or weights.dim() != 3 or x.shape[-1] != weights.shape[-1]:
        wrong.append(f"x is {list(x.shape)} and the weights are {list(weights.shape)}")
    if biases is not None and biases.shape != weights.shape[:2]:
        wrong.append(f"biases are {list(biases.shape)} and the weights {list(weights.shape)}")
    if gated and weights.shape[1] % 2:
        wrong.append(f"gates and ups are {weights.shape[1]} columns together")
    return wrong
