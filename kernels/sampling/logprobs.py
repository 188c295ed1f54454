"""Log-probabilities of rows of logits, as the engine reports them and the trainer learns from them.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..machine.gpu import triton_serves
from ..machine.plain_memory import refuse_other_memory
from . import cpp as native_sampling
from .definition import GREEDY_BELOW

_MOST_FLOAT = torch.finfo(torch.float32).max
_MAX_WIDENED = 1 << 20  # logits that the PyTorch path widens to float32 at a time


def scaled_logprobs(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Compute log_softmax(logits / temperature) over the full vocabulary, in float32.

    logits [R, V]; temperature a number, or float32 [R]. Each row depends on itself alone. Differentiable in the logits:
    the trainer calls these same functions on its logits, so both compute the same log-probabilities. A temperature
    under GREEDY_BELOW stands for 1, as in the engine's greedy answers. Raises ValueError for a negative number, and for
    one that float32 has not (an engine takes at most 1e6: from about 1e38 on its inverse is a denormal number), and for
    logits of another number of dimensions.
    """
    refuse_other_memory("scaled_logprobs", logits=logits)
    _refuse_other_shapes(logits)
    temperatures = per_row(temperature, logits)
    if logits.requires_grad and torch.is_grad_enabled():
        return _ScaledLogprobs.apply(logits, temperatures)
    return _scaled(logits, temperatures)


def selected_logprobs(logits: Tensor, token_ids: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Compute the log-probability float32 [R] of one token per row: logits [R, V], token_ids [R], of integers.

    The bits are those of `scaled_logprobs` at these tokens, and no more than a few of its rows are in memory at a time.
    Differentiable in the logits; the gradient is computed from the logits again, and has their dtype. Raises ValueError
    for tokens beyond the vocabulary, where a CPU holds them, and for others than integers.
    """
    refuse_other_memory("selected_logprobs", logits=logits, token_ids=token_ids)
    _refuse_other_shapes(logits, " and token_ids")
    num_rows, vocab_size = logits.shape
    if token_ids.shape != (num_rows,):
        raise ValueError(f"{num_rows} rows of logits, and token_ids of shape {list(token_ids.shape)}")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype is torch.bool:
        raise ValueError(f"token_ids are {token_ids.dtype}, not integers")
    if token_ids.device.type == "cpu" and num_rows:
        first, last = (int(end) for end in token_ids.aminmax())
        if first < 0 or last >= vocab_size:
            raise ValueError(f"token_ids are from {first} to {last}, the vocabulary has {vocab_size}")
    token_ids = token_ids.to(logits.device, torch.int64)  # the kernels read 8 bytes a token
    temperatures = per_row(temperature, logits)
    if logits.requires_grad and torch.is_grad_enabled():
        return _SelectedLogprobs.apply(logits, token_ids, temperatures)
    return _selected(logits, token_ids, temperatures)[0]


def _refuse_other_shapes(logits: Tensor, others: str = "") -> None:
    """Raise ValueError for logits that are not [R, V]. others: what has its dimensions."""
    if logits.dim() != 2:
        raise ValueError(f"logits of shape {list(logits.shape)}, not [rows, vocabulary]: flatten them{others}")


def per_row(temperature: Tensor | float, logits: Tensor) -> Tensor:
    """Return the temperature as float32 [R] or [1]: dividing by a number would multiply by its inverse on a GPU."""
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (1,), (len(logits),)):
            raise ValueError(f"temperatures of shape {list(temperature.shape)} for {len(logits)} rows of logits")
        divisors = temperature.to(logits.device, torch.float32).reshape(-1)
        return divisors.masked_fill((divisors >= 0) & (divisors < GREEDY_BELOW), 1.0)
    if not 0 <= temperature <= _MOST_FLOAT:
        raise ValueError(f"a temperature of {temperature}, not one from 0 to {_MOST_FLOAT:.4g}")
    temperature = 1.0 if temperature < GREEDY_BELOW else temperature
    return torch.full((1,), temperature, dtype=torch.float32, device=logits.device)


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    if native_sampling.serves(logits):
        return native_sampling.scaled(logits, temperatures)
    if triton_serves(logits.device):
        from . import triton_logprobs  # imports Triton, which may not be installed

        return triton_logprobs.scaled(logits, temperatures)
    return torch.log_softmax(logits.float() / temperatures.unsqueeze(-1), dim=-1)


def _selected(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probabilities, and the statistics that the native gradient reads."""
    if native_sampling.serves(logits):
        return native_sampling.selected(logits, token_ids, temperatures)
    if triton_serves(logits.device):
        from . import triton_logprobs

        return triton_logprobs.selected(logits, token_ids, temperatures)
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for rows, its_temperatures in _blocks(logits, temperatures):
        chosen = _scaled(logits[rows], its_temperatures).gather(-1, token_ids[rows].unsqueeze(-1))
        out[rows] = chosen.squeeze(-1)
    return out, None


def _selected_gradient(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor, stats: Tensor | None, grad: Tensor
) -> Tensor:
    """Compute (onehot - softmax) * grad / temperature, [R, V] in the logits' dtype."""
    if stats is not None and logits.device.type != "cpu":
        from . import triton_logprobs

        return triton_logprobs.selected_gradient(logits, token_ids, temperatures, stats, grad)
    if stats is not None:
        return native_sampling.selected_gradient(logits, token_ids, temperatures, stats, grad)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows, its_temperatures in _blocks(logits, temperatures):
        slope = _scaled(logits[rows], its_temperatures).exp_().neg_()
        chosen = token_ids[rows].unsqueeze(-1)
        slope.scatter_add_(-1, chosen, torch.ones_like(chosen, dtype=torch.float32))
        out[rows] = slope.mul_((grad[rows] / its_temperatures).unsqueeze(-1)).to(logits.dtype)
    return out


def _blocks(logits: Tensor, temperatures: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows at a time with their temperatures."""
    count = max(1, _MAX_WIDENED // max(logits.shape[1], 1))
    for start in range(0, len(logits), count):
        rows = slice(start, start + count)
        yield rows, temperatures[rows] if len(temperatures) > 1 else temperatures


def _refusing_a_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a backward that is to be differentiated again: `once_differentiable` alone returns constants where the
    incoming gradient is one, as that of a mean, and a penalty on gradients would be without effect."""

    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("these log-probabilities are differentiable once: create_graph=True has no use here")
        return backward(ctx, *grads)

    return checked


class _ScaledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperatures: Tensor) -> Tensor:
        out = _scaled(logits, temperatures)
        ctx.save_for_backward(out, temperatures)
        ctx.dtype = logits.dtype
        return out

    @staticmethod
    @_refusing_a_graph
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out, temperatures = ctx.saved_tensors
        slope = grad - out.exp() * grad.sum(-1, keepdim=True)
        return (slope / temperatures.unsqueeze(-1)).to(ctx.dtype), None


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
        out, stats = _selected(logits, token_ids, temperatures)
        ctx.save_for_backward(logits, token_ids, temperatures, stats)
        return out

    @staticmethod
    @_refusing_a_graph
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids, temperatures, stats = ctx.saved_tensors
        return _selected_gradient(logits, token_ids, temperatures, stats, grad), None, None
