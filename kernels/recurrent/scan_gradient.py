"""The gradient of the selective scan: its steps in reverse, from states that are computed again, some tokens at a time.

With the decays E = exp(a dt') and what a token adds, U = b (dt x)', the state is S = E S + U, and the gradient of each
state is G = c y' + E G of the token after it, y the gradient of the result. Both take one operation a token; all else
is computed for all tokens of a part at once, as in the backward pass of Gu & Dao 2023 ("Mamba"). Letters: R rows,
T tokens, B sequences, H heads, N state size, P channels of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .delta_chunks import SequencesSideBySide, similar_lengths

PART_ELEMENTS = 1 << 21  # of the states of a part's tokens, which it holds a few times


def scan_gradient(
    operands: Sequence[Tensor], initial: Tensor | None, cu_seqlens: Tensor, grad_out: Tensor | None,
    grad_final: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, dt, a, b, c and of the states before the first rows, None without such states.

    operands: x and dt [R, H, P], a [H, N, P], b and c [R, H, N], of one dtype; initial [S, H, N, P]. cu_seqlens: int32
    [S + 1]. grad_out [R, H, P] and grad_final [S, H, N, P], None for zeros.
    """
    x, dt, a, b, c = operands
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in operands]
    grad_initial = None if initial is None else torch.zeros_like(initial)
    starts = cu_seqlens.tolist()
    for group in similar_lengths([end - first for first, end in itertools.pairwise(starts)]):
        beside = SequencesSideBySide(starts, group, x.device)
        rows = [beside.stand(t) for t in (x, dt, b, c)]
        of_out = torch.zeros_like(rows[0]) if grad_out is None else beside.stand(grad_out)
        rates = a.repeat(len(group), 1, 1)  # [B * H, N, P]
        before = torch.zeros_like(rates) if initial is None else initial[group].flatten(0, 1)
        behind = torch.zeros_like(rates) if grad_final is None else grad_final[group].flatten(0, 1)
        found, of_rates, first = _of_sequences(rows, rates, before, of_out, behind)
        for grad, part in zip((grads[0], grads[1], grads[3], grads[4]), found, strict=True):
            beside.put_back(part, grad)
        grads[2] += of_rates.unflatten(0, (len(group), -1)).sum(0)
        if grad_initial is not None:
            grad_initial[group] = first.unflatten(0, (len(group), -1))
    return [*grads, grad_initial]


def _of_sequences(
    rows: Sequence[Tensor], a: Tensor, state: Tensor, grad_out: Tensor, grad: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the gradients of the rows, of a, and of the first state, for heads side by side.

    rows: x, dt [T, H, P], b, c [T, H, N]; a and state, before the first token, [H, N, P]; grad: of the last state.
    """
    x, dt, b, _ = rows
    size = max(PART_ELEMENTS // a.numel(), 1)
    parts = [slice(first, first + size) for first in range(0, len(grad_out), size)]
    befores = []  # the state before each part
    for part in parts:
        befores.append(state)
        state = _states(x[part], dt[part], b[part], a, state)[-1]
    found: list[list[Tensor]] = []
    of_rates = torch.zeros_like(a)
    for part, before in zip(reversed(parts), reversed(befores), strict=True):
        of_rows, of_part, grad = _of_part([t[part] for t in rows], a, before, grad_out[part], grad)
        found.append(of_rows)
        of_rates += of_part
    return [torch.cat(tensors) for tensors in zip(*reversed(found), strict=True)], of_rates, grad


def _of_part(
    rows: Sequence[Tensor], a: Tensor, before: Tensor, grad_out: Tensor, grad: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return `_of_sequences` for some tokens. grad: of the state after them, by what is behind."""
    x, dt, b, c = rows
    states, decays = _states(x, dt, b, a, before), _decays(dt, a)
    of_states = c.unsqueeze(-1) * grad_out.unsqueeze(-2)
    for token in range(len(x) - 1, -1, -1):
        of_states[token] += grad
        grad = of_states[token] * decays[token]
    of_c = (states * grad_out.unsqueeze(-2)).sum(-1)
    of_b = (of_states * (dt * x).unsqueeze(-2)).sum(-1)
    of_added = (of_states * b.unsqueeze(-1)).sum(-2)  # of dt x
    of_logs = torch.cat([before[None], states[:-1]]).mul_(decays).mul_(of_states)  # of dt a
    of_dt = of_added * x + (of_logs * a).sum(-2)
    of_a = (of_logs * dt.unsqueeze(-2)).sum(0)
    return [of_added * dt, of_dt, of_b, of_c], of_a, grad


def _states(x: Tensor, dt: Tensor, b: Tensor, a: Tensor, before: Tensor) -> Tensor:
    """Return the state after each token [T, H, N, P]."""
    states, decays = b.unsqueeze(-1) * (dt * x).unsqueeze(-2), _decays(dt, a)
    for token in range(len(x)):
        states[token].addcmul_(decays[token], before)
        before = states[token]
    return states


def _decays(dt: Tensor, a: Tensor) -> Tensor:
    """Return what each token leaves of the state [T, H, N, P]."""
    return (dt.unsqueeze(-2) * a).exp_()
