"""The gated delta rule, one token after another in fp32: S *= exp(g); d = beta (v - S'k); S += k d'; o = S'q.

The bits of a row depend on its own sequence up to it, however the sequence is cut into calls. The backward pass
differentiates the form in chunks (`delta_chunks.py`) and keeps no states. A decay of each element of S is that of
Mamba-1 (`selective_scan.py`). Letters: R rows, S sequences, G key heads, H heads, K key size, V value size.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..machine import native
from ..machine.gpu import triton_serves
from .delta_chunks import SequencesSideBySide, chunked_gated_delta_rule, normalized, similar_lengths
from .slots import Slots, run_in_slots, state_pointers

SOURCE = "recurrent/gated_delta_rule.cpp"
PARALLEL_ELEMENTS = 1 << 14  # of all updated states; with fewer, starting threads costs more than it saves

HEAD, CHANNEL, ELEMENT = range(3)  # what has a decay of its own


@dataclass(frozen=True)
class DeltaRule:
    """Options of the rule."""

    scale: float  # of the queries
    norm_eps: float | None  # added to the squared length by which q and k are divided; None: they are not divided
    corrects: bool = True  # d = beta (v - S'k); else d = beta v


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial: Tensor | None = None,
    *,
    norm_eps: float | None = 1e-6,
    scale: float | None = None,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute out [R, H, V], in v's dtype, and each sequence's final state float32 [S, H, K, V]. Differentiable once.

    q, k [R, G, K], v [R, H, V]: one dtype; each key head serves H / G heads in a row. g <= 0, the logarithm of the
    decay [R, H] or, per channel, [R, H, K]; beta [R, H]. cu_seqlens: int32 [S + 1], the rows at which sequences start,
    and their number. initial [S, H, K, V], None for zeros. norm_eps: divide q and k by their lengths, this added to the
    squares. scale: of q, else K ** -0.5. corrects: False for d = beta v, with a decay per head and without bfloat16; or
    with a beta of each value [R, H, V] and g [H, K, V], so that S *= exp(beta g), without gradients. float64 inputs are
    computed, and give states, in float64. Raises ValueError for operands that do not fit each other.
    """
    _check(q, k, v, g, beta, initial, corrects, states_fit=initial is None or len(initial) == len(cu_seqlens) - 1)
    rule = DeltaRule(q.shape[-1] ** -0.5 if scale is None else scale, norm_eps, corrects)
    wide = torch.promote_types(v.dtype, torch.float32)
    rows = (q, k, v, g.to(wide), beta.to(wide))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*rows, initial)):
        if _decays(g, beta) == ELEMENT:
            raise ValueError("gated_delta_rule: the gradients with a decay of each element are those of selective_scan")
        return _GatedDeltaRule.apply(*rows, initial, cu_seqlens, rule)
    return _forward(*rows, initial, cu_seqlens, rule)


def gated_delta_rule_in_slots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, slots: Slots,
    *, norm_eps: float | None = 1e-6, scale: float | None = None, corrects: bool = True,
) -> Tensor:  # fmt: skip
    """Compute `gated_delta_rule` with states in slots [N, H, K, V] that are read and written in place. Returns out."""
    wide = torch.promote_types(v.dtype, torch.float32)
    _check(q, k, v, g, beta, slots.pool, corrects, states_fit=slots.pool.dtype == wide)
    rule = DeltaRule(q.shape[-1] ** -0.5 if scale is None else scale, norm_eps, corrects)
    if v.is_cpu and v.dtype in (torch.bfloat16, torch.float32) and _native() is not None:
        return _run_native(q, k, v, g.float(), beta.float(), cu_seqlens, rule, slots)
    if triton_serves(v.device) and v.dtype != torch.float64:
        from . import triton_kernels  # Triton is imported only where it is used

        return triton_kernels.gated_delta_rule_in_slots(
            q, k, v, g.float(), beta.float(), slots, cu_seqlens, rule.scale, rule.norm_eps, rule.corrects
        )

    def compute(rows: Sequence[Tensor], starts: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, beta, *by_row = rows
        decay = by_row[0] if by_row else g
        options: Any = {"norm_eps": norm_eps, "scale": scale, "corrects": corrects}
        return gated_delta_rule(q, k, v, decay, beta, starts, initial, **options)

    by_row = () if _decays(g, beta) == ELEMENT else (g,)
    return run_in_slots((q, k, v, beta, *by_row), cu_seqlens, slots, compute)


def reference_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, cu_seqlens: Tensor,
    rule: DeltaRule,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the rule with PyTorch's operations, as transformers' recurrent form has it."""
    wide, groups = g.dtype, v.shape[1] // k.shape[1]
    q, k = (normalized(x.to(wide), rule.norm_eps).repeat_interleave(groups, 1) for x in (q, k))
    q, k = (q * rule.scale).unsqueeze(-1), k.unsqueeze(-1)
    form = _decays(g, beta)
    beta = beta if form == ELEMENT else beta.unsqueeze(-1)
    logs = g if form == ELEMENT else g.unsqueeze(-1) if form == CHANNEL else g[..., None, None]
    out, starts = torch.empty_like(v, memory_format=torch.contiguous_format), cu_seqlens.tolist()
    final = g.new_zeros(len(starts) - 1, *k.shape[1:3], v.shape[2]) if initial is None else initial.to(wide, copy=True)
    for sequence, state in enumerate(final):
        for t in range(starts[sequence], starts[sequence + 1]):
            state *= (beta[t].unsqueeze(-2) * logs if form == ELEMENT else logs[t]).exp()
            change = v[t].to(wide)
            if rule.corrects:
                change = change - (state * k[t]).sum(-2)
            change = change * beta[t]
            state += k[t] * change.unsqueeze(-2)
            out[t] = (state * q[t]).sum(-2)
    return out, final


def _decays(g: Tensor, beta: Tensor) -> int:
    """Return what has a decay of its own, by the operands' dimensions. The native kernel has the same numbers."""
    return ELEMENT if beta.dim() == 3 else CHANNEL if g.dim() == 3 else HEAD


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor | None, corrects: bool, *,
    states_fit: bool,
) -> None:  # fmt: skip
    """Raise ValueError for operands that do not fit each other: kernels read them by address. states_fit: in what
    depends on their use."""
    rows, heads, value_dim = v.shape
    _, key_heads, key_dim = k.shape
    if states is not None:
        states_fit = states_fit and states.shape[1:] == (heads, key_dim, value_dim)
    by_row = (rows, heads)
    forms = ((by_row, by_row), (by_row, (*by_row, key_dim)), ((*by_row, value_dim), (heads, key_dim, value_dim)))
    if not (
        q.dtype == k.dtype == v.dtype and q.shape == k.shape and len(k) == rows
        and key_heads > 0 and heads % key_heads == 0 and states_fit
        and (tuple(beta.shape), tuple(g.shape)) in forms
    ):  # fmt: skip
        named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "states": states}
        shapes = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in named.items() if t is not None)
        raise ValueError(f"gated_delta_rule: {shapes} do not belong together")
    form = _decays(g, beta)
    if not corrects and (form == CHANNEL or v.dtype is torch.bfloat16):
        raise ValueError("gated_delta_rule: without the correction it takes a decay per head, and no bfloat16")
    if corrects and form == ELEMENT:
        raise ValueError("gated_delta_rule: with the correction it takes a decay per head or per channel")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, cu_seqlens: Tensor,
    rule: DeltaRule,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if triton_serves(v.device) and v.dtype != torch.float64:
        from . import triton_kernels  # Triton is imported only where it is used

        return triton_kernels.gated_delta_rule(
            q, k, v, g, beta, initial, cu_seqlens, rule.scale, rule.norm_eps, rule.corrects
        )
    if not v.is_cpu or v.dtype not in (torch.bfloat16, torch.float32) or _native() is None:
        return reference_gated_delta_rule(q, k, v, g, beta, initial, cu_seqlens, rule)
    final = g.new_empty(len(cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2])
    initial = None if initial is None else initial.float().contiguous()
    return _run_native(q, k, v, g, beta, cu_seqlens, rule, initial, final), final


def _run_native(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, rule: DeltaRule,
    before: Slots | Tensor | None, after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run the native kernel. before, after: the states before and after the rows; slots are both."""
    function = _native()
    assert function is not None
    rows, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    num_sequences = len(cu_seqlens) - 1
    q, k, v = (_dense_rows(t) for t in (q, k, v))
    g, beta, starts = g.contiguous(), beta.contiguous(), cu_seqlens.to(torch.int32).contiguous()
    out = v.new_empty(rows, heads, value_dim)
    threads = torch.get_num_threads() if rows * heads * key_dim * value_dim > PARALLEL_ELEMENTS else 1
    native.run(
        function,
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr()),
        *state_pointers(before, out, after),
        starts.data_ptr(),
        *(num_sequences, q.stride(0), k.stride(0), v.stride(0), key_heads, heads, key_dim, value_dim),
        *(rule.scale, -1.0 if rule.norm_eps is None else rule.norm_eps),
        *(_decays(g, beta), rule.corrects, v.dtype is torch.bfloat16, threads),
        kept=(q, k, v, g, beta, before, starts),
    )
    return out


def _dense_rows(x: Tensor) -> Tensor:
    """Return x [R, H, D] with the values of each row next to each other; the rows may be apart."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, cu_seqlens: Tensor,
        rule: DeltaRule,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(q, k, v, g, beta, initial, cu_seqlens)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return _forward(q, k, v, g, beta, initial, cu_seqlens, rule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the chunk form, sequences of similar length together."""
        *rows, initial, cu_seqlens = ctx.saved_tensors
        wide = rows[3].dtype
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in rows]
        grad_initial = None if initial is None else torch.zeros_like(initial)
        starts = cu_seqlens.tolist()
        for group in similar_lengths([b - a for a, b in itertools.pairwise(starts)]):
            beside = SequencesSideBySide(starts, group, rows[2].device)
            states = () if initial is None else (initial[group].flatten(0, 1),)
            leaves: list[Any] = [t.detach().to(wide).requires_grad_() for t in (*map(beside.stand, rows), *states)]
            with torch.enable_grad():
                start = leaves[5] if states else None
                q, k, v, g, beta = leaves[:5]
                options = (ctx.rule.scale, ctx.rule.norm_eps, ctx.rule.corrects)
                out, final = chunked_gated_delta_rule(q, k, v, g, beta, start, *options, grad_final is not None)
            known = [] if grad_out is None else [(out, beside.stand(grad_out))]
            if final is not None and grad_final is not None:
                known.append((final, grad_final[group].flatten(0, 1)))
            found = torch.autograd.grad(
                [o for o, _ in known], leaves, [grad.to(wide) for _, grad in known], materialize_grads=True
            )
            for grad, part in zip(grads, found, strict=False):
                beside.put_back(part, grad)
            if grad_initial is not None:
                grad_initial[group] = found[5].unflatten(0, (len(group), -1)).to(grad_initial.dtype)
        return *grads, grad_initial, None, None


@cache
def _native() -> Callable[..., int] | None:
    types = [*[ctypes.c_void_p] * 11, *[ctypes.c_int64] * 8, *[ctypes.c_float] * 2, *[ctypes.c_int64] * 4]
    return native.function(SOURCE, "lockstep_gated_delta_rule", types, ctypes.c_int64)
