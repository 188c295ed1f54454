"""silu(gate) * up on a GPU (Triton), and its gradients; `gated` is the arithmetic that the product's kernel shares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED, rounded, widened

BLOCK = 1024
SERVED = (torch.float32, torch.bfloat16, torch.float16)


def serves(gate: Tensor, up: Tensor) -> bool:
    """Return whether these kernels serve tensors of this dtype."""
    return gate.dtype in SERVED and up.dtype is gate.dtype


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, of one shape; silu is rounded to their dtype."""
    gate, up = _checked(gate, up)
    out = torch.empty_like(gate)
    if out.numel():
        with torch.cuda.device_of(gate):
            _forward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


def slopes(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up from that of the result, in float32, rounded at the end."""
    gate, up = _checked(gate, up)
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        with torch.cuda.device_of(gate):
            _slopes_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
                gate, up, grad.contiguous(), grad_gate, grad_up, gate.numel(), BLOCK=BLOCK
            )
    return grad_gate, grad_up


def _checked(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not (gate.is_cuda or INTERPRETED.value) or gate.shape != up.shape or not serves(gate, up):
        raise ValueError(
            f"Triton's swiglu serves floats of 16 and 32 bits of one shape on a GPU, not {list(gate.shape)} "
            f"{gate.dtype} and {list(up.shape)} {up.dtype} on {gate.device}"
        )
    return gate.contiguous(), up.contiguous()


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """Compute silu(gate) * up of float32 values of dtype -> dtype, rounded after each of the two."""
    silu = widened(rounded(tl.div_rn(gate, 1.0 + tl.exp(-gate)), dtype))
    return rounded(silu * up, dtype)


@triton.jit
def _forward_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = widened(tl.load(gate_ptr + i, mask=i < count, other=0.0))
    up = widened(tl.load(up_ptr + i, mask=i < count, other=0.0))
    tl.store(out_ptr + i, gated(gate, up, out_ptr.dtype.element_ty), mask=i < count)


@triton.jit
def _slopes_kernel(gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = widened(tl.load(gate_ptr + i, mask=i < count, other=0.0))
    up = widened(tl.load(up_ptr + i, mask=i < count, other=0.0))
    grad = widened(tl.load(grad_ptr + i, mask=i < count, other=0.0))
    share = tl.div_rn(1.0 + gate * 0.0, 1.0 + tl.exp(-gate))
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(grad_gate_ptr + i, rounded(grad_gate, grad_gate_ptr.dtype.element_ty), mask=i < count)
    tl.store(grad_up_ptr + i, rounded(grad * (gate * share), grad_up_ptr.dtype.element_ty), mask=i < count)
