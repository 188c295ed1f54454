"""Log-probabilities of rows of logits on a GPU, without a float32 copy of them (Triton).

A reported value follows from the row's `statistics` (`triton_scan.py`) by one division and two subtractions, for any
set of tokens.

Letters: R rows, V vocabulary, C columns asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import rounded
from .triton_scan import dense, scaled_tile, statistics, step_of

_BLOCK = 2048  # values of a program: each depends on its own logit and the statistics alone
_NUM_WARPS = 16


def scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log-probabilities of logits [R, V] at temperatures float32 [R] or [1] -> float32 [R, V]."""
    logits = dense(logits)
    return logprobs_of(logits, temperatures, statistics(logits, temperatures), None)


def selected(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of token_ids int64 [R] -> float32 [R], NaN for tokens beyond V; and the statistics."""
    logits = dense(logits)
    stats = statistics(logits, temperatures)
    return logprobs_of(logits, temperatures, stats, token_ids.unsqueeze(-1)).squeeze(-1), stats


def selected_gradient(logits: Tensor, token_ids: Tensor, temperatures: Tensor, stats: Tensor, grad: Tensor) -> Tensor:
    """Compute the gradient of logits [R, V], in their dtype, from grad [R] of `selected` and the statistics."""
    logits = dense(logits)
    num_rows, vocab_size = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if num_rows:
        with torch.cuda.device_of(logits):
            _gradient_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
                *(logits, temperatures, vocab_size, logits.stride(0), step_of(temperatures), stats),
                *(token_ids.contiguous(), grad.float().contiguous(), out),
                BLOCK=_BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip
    return out


def logprobs_of(logits: Tensor, temperatures: Tensor, stats: Tensor, columns: Tensor | None) -> Tensor:
    """Compute float32 [R, C] at columns int64 [R, C], or at all columns where it is None, from rows' statistics."""
    num_rows, vocab_size = logits.shape
    width = vocab_size if columns is None else columns.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float32, device=logits.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        with torch.cuda.device_of(logits):
            _logprobs_kernel[(num_rows, triton.cdiv(width, block))](
                *(logits, temperatures, vocab_size, logits.stride(0), step_of(temperatures), stats),
                *(None if columns is None else columns.contiguous(), width, out),
                HAS_COLUMNS=columns is not None, BLOCK=block, num_warps=_NUM_WARPS if block == _BLOCK else 1,
            )  # fmt: skip
    return out


@triton.jit
def _logprobs_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, stats_ptr, columns_ptr, width, out_ptr,
    HAS_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    maximum, log_sum = tl.load(stats_ptr + 2 * r), tl.load(stats_ptr + 2 * r + 1)
    v = tl.load(columns_ptr + r * width + c, mask=c < width, other=0) if HAS_COLUMNS else c
    exists = (v >= 0) & (v < vocab_size)
    x = scaled_tile(logits_ptr + r * logits_row, tl.where(exists, v, 0), vocab_size, temperature)
    out = tl.where(exists, x - maximum - log_sum, float("nan"))
    tl.store(out_ptr + r * width + c, out, mask=c < width)


@triton.jit
def _gradient_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, stats_ptr, ids_ptr, grad_ptr, out_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute (onehot - softmax) * grad / temperature for one tile of a row."""
    r = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    maximum, log_sum = tl.load(stats_ptr + 2 * r), tl.load(stats_ptr + 2 * r + 1)
    x = scaled_tile(logits_ptr + r * logits_row, v, vocab_size, temperature)
    chosen = tl.where(v == tl.load(ids_ptr + r), 1.0, 0.0)
    slope = (chosen - tl.exp(x - maximum - log_sum)) * tl.div_rn(tl.load(grad_ptr + r), temperature)
    tl.store(out_ptr + r * vocab_size + v, rounded(slope, out_ptr.dtype.element_ty), mask=v < vocab_size)
