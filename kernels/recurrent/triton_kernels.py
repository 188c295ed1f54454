"""The causal convolution and the gated delta rule on a GPU (Triton); `conv.py` and `delta_rule.py` define them.

A program of the rule keeps columns of one head's state in registers and takes the rows of a sequence one after another,
so a row's bits do not depend on the cut of the sequence. No length is read on the host. Letters: R rows, C channels,
w width, S sequences, G key heads, H heads, K key size, V value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED, rounded
from .slots import Slots

COLUMNS = 32  # of a state that one program holds
ROWS, CHANNELS = 16, 64  # of a program of the convolution

# Not specialised by the compiler, and neither are alignments: one binary serves rows in any number and place.
_SIZES = ["num_rows", "channels", "x_row", "q_row", "k_row", "v_row", "has_initial", "value_dim"]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Compute out [R, C] and the last w - 1 inputs of each sequence [S, w - 1, C]."""
    starts = cu_seqlens.to(torch.int64)
    if initial is None:
        initial = x.new_zeros(len(starts) - 1, weight.shape[1] - 1, x.shape[1])
    return _causal_conv(x, weight, bias, initial, starts, starts[:-1], activation)


def causal_conv_in_slots(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots, cu_seqlens: Tensor, activation: str | None
) -> Tensor:
    """Compute out [R, C]; the last w - 1 inputs of each sequence are read from slots and written there."""
    heads, starts = slots.heads(), cu_seqlens.to(torch.int64)
    initial = slots.pool.index_select(0, slots.reads[heads])
    out, final = _causal_conv(x, weight, bias, initial, starts, starts[:-1][heads], activation)
    slots.pool.index_copy_(0, slots.writes, final)
    return out


def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor, starts: Tensor, firsts: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the convolution of sequences, each of which may continue those before it.

    starts: int64 [S + 1]; firsts: int64 [S], the first row of each one's chain; initial: before this row.
    """
    _check(x)
    (rows, channels), width, num_sequences = x.shape, weight.shape[1], len(firsts)
    if x.stride(1) != 1:
        x = x.contiguous()
    weight, initial, out = weight.contiguous(), initial.contiguous(), x.new_empty(rows, channels)
    owners = torch.searchsorted(starts[1:], torch.arange(rows, device=x.device), right=True)
    if out.numel():
        with torch.cuda.device_of(x):
            _conv_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS))](
                *(x, weight, weight if bias is None else bias.contiguous(), initial, firsts, owners, out),
                *(rows, channels, x.stride(0)),
                WIDTH=width, HAS_BIAS=bias is not None, SILU=activation is not None, ROWS=ROWS, CHANNELS=CHANNELS,
            )  # fmt: skip
    # The kept inputs, counted from the chain's first row: below zero they are initial ones.
    place = (starts[1:] - firsts)[:, None] + torch.arange(1 - width, 0, device=x.device)
    every = torch.arange(num_sequences, device=x.device)[:, None]
    before = initial[every, (place + width - 1).clamp(max=max(width - 2, 0))]
    padded = x if rows else x.new_zeros(1, channels)
    own = padded[(firsts[:, None] + place).clamp(0, len(padded) - 1)]
    return out, torch.where((place >= 0)[..., None], own, before)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor,
    scale: float,
    norm_eps: float | None,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute out [R, H, V] and the final states float32 [S, H, K, V]; g and beta are float32."""
    num_sequences, shape = len(cu_seqlens) - 1, (v.shape[1], k.shape[2], v.shape[2])
    final = torch.empty(num_sequences, *shape, dtype=torch.float32, device=v.device)
    starts = cu_seqlens.to(torch.int64)
    own = torch.arange(num_sequences, device=v.device)
    states = final if initial is None else initial.float().contiguous()
    out = _gated_delta_rule(
        (q, k, v, g, beta), (states, final), (starts[:-1], starts[1:]), (own, None), initial is not None,
        scale, norm_eps, corrects,
    )  # fmt: skip
    return out, final


def gated_delta_rule_in_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Slots,
    cu_seqlens: Tensor,
    scale: float,
    norm_eps: float | None,
    corrects: bool = True,
) -> Tensor:
    """Compute out [R, H, V] with states float32 in slots [N, H, K, V], which are read and written in place."""
    starts, heads = cu_seqlens.to(torch.int64), slots.heads()
    # The first sequence of a chain has all of its rows; after the last row of each sequence its slot is written.
    chain_ends = torch.zeros_like(heads).scatter_reduce_(0, heads, starts[1:], "amax")
    ends = torch.where(heads == torch.arange(len(heads), device=v.device), chain_ends, starts[:-1])
    row_slots = torch.full((len(v) + 1,), -1, dtype=torch.int64, device=v.device)
    row_slots.scatter_(0, torch.where(starts[1:] > starts[:-1], starts[1:] - 1, len(v)), slots.writes)
    return _gated_delta_rule(
        (q, k, v, g, beta), (slots.pool, slots.pool), (starts[:-1], ends), (slots.reads, row_slots), True,
        scale, norm_eps, corrects,
    )  # fmt: skip


def _gated_delta_rule(
    rows: tuple[Tensor, ...], states: tuple[Tensor, Tensor], edges: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor | None], has_initial: bool, scale: float, norm_eps: float | None, corrects: bool,
) -> Tensor:  # fmt: skip
    """Launch the rule; returns out. states: before and after, which may be the same; edges: int64 [S] each, the first
    row of each sequence and the row after its last. slots: int64 [S], where each finds its state, and int64 [R], where
    the state after each row goes (-1: nowhere), or None: after a sequence's last row to its own place."""
    q, k, v, g, beta = (t.contiguous() for t in rows)
    _check(v)
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    (before, after), (reads, row_slots), out = states, slots, torch.empty_like(v)
    if len(reads) and after.numel():
        with torch.cuda.device_of(v):
            _delta_kernel[(len(reads) * heads, triton.cdiv(value_dim, COLUMNS))](
                *(q, k, v, g, beta, before, out, after, *edges, reads, reads if row_slots is None else row_slots),
                *(int(has_initial), value_dim, scale, 0.0 if norm_eps is None else norm_eps),
                KEY_HEADS=key_heads, HEADS=heads, KEY_DIM=key_dim, NORM=norm_eps is not None,
                BY_CHANNEL=g.dim() == 3, BY_ELEMENT=beta.dim() == 3, CORRECTS=corrects, BY_ROW=row_slots is not None,
                KEYS=triton.next_power_of_2(key_dim), COLUMNS=COLUMNS, num_warps=4,
            )  # fmt: skip
    return out


def _check(x: Tensor) -> None:
    if not (x.is_cuda or INTERPRETED.value):
        raise ValueError(f"the Triton recurrences serve a GPU, not {x.device}")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["x_ptr", "initial_ptr", "out_ptr"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, starts_ptr, owners_ptr, out_ptr, num_rows, channels, x_row,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_row, is_channel = r < num_rows, c < channels
    owner = tl.load(owners_ptr + r, mask=is_row, other=0)
    place = r - tl.load(starts_ptr + owner, mask=is_row, other=0)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + c, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        is_own = is_row & (place >= back)
        own = x_ptr + (r - back)[:, None] * x_row + c[None, :]
        before = initial_ptr + (owner * (WIDTH - 1) + place + tap)[:, None] * channels + c[None, :]
        x = tl.load(own, mask=is_own[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        x += tl.load(before, mask=(is_row & (place < back))[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + c * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    out = rounded(total, dtype)
    if SILU:
        wide = out.to(tl.float32)
        out = rounded(wide / (1.0 + tl.exp(-wide)), dtype)
    tl.store(out_ptr + r[:, None] * channels + c[None, :], out, mask=is_row[:, None] & is_channel[None, :])


@triton.jit
def _unit(x, eps, NORM: tl.constexpr):
    """Divide the row x by its length."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) + eps)) if NORM else x


@triton.jit(
    do_not_specialize=_SIZES,
    do_not_specialize_on_alignment=["q_ptr", "k_ptr", "v_ptr", "g_ptr", "beta_ptr", "initial_ptr", "out_ptr"],
)
def _delta_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, initial_ptr, out_ptr, final_ptr, starts_ptr, ends_ptr, reads_ptr,
    row_slots_ptr, has_initial, value_dim, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, NORM: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BY_ELEMENT: tl.constexpr, CORRECTS: tl.constexpr, BY_ROW: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    owner = tl.program_id(0).to(tl.int64)
    sequence, head = owner // HEADS, owner % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = i < KEY_DIM, column < value_dim
    place = (head * KEY_DIM + i)[:, None] * value_dim + column[None, :]
    size = HEADS * KEY_DIM * value_dim
    is_state = is_key[:, None] & is_column[None, :]
    is_given = is_key[:, None] & (column < value_dim * has_initial)[None, :]
    state = tl.load(initial_ptr + tl.load(reads_ptr + sequence) * size + place, mask=is_given, other=0.0)
    if BY_ELEMENT:
        rate = tl.load(g_ptr + place, mask=is_state, other=0.0)
    for r in range(tl.load(starts_ptr + sequence), tl.load(ends_ptr + sequence)):
        keys = (r * KEY_HEADS + key_head) * KEY_DIM + i
        q = _unit(tl.load(q_ptr + keys, mask=is_key, other=0.0).to(tl.float32), eps, NORM) * scale
        k = _unit(tl.load(k_ptr + keys, mask=is_key, other=0.0).to(tl.float32), eps, NORM)
        v = tl.load(v_ptr + (r * HEADS + head) * value_dim + column, mask=is_column, other=0.0).to(tl.float32)
        if BY_ELEMENT:
            beta = tl.load(beta_ptr + (r * HEADS + head) * value_dim + column, mask=is_column, other=0.0)
            state *= tl.exp(beta[None, :] * rate)
        elif BY_CHANNEL:
            g = tl.load(g_ptr + (r * HEADS + head) * KEY_DIM + i, mask=is_key, other=0.0)
            state *= tl.exp(g)[:, None]
        else:
            state *= tl.exp(tl.load(g_ptr + r * HEADS + head))
        if not BY_ELEMENT:
            beta = tl.load(beta_ptr + r * HEADS + head)
        change = (v - tl.sum(state * k[:, None], 0) if CORRECTS else v) * beta
        state += k[:, None] * change[None, :]
        out = tl.sum(state * q[:, None], 0)
        tl.store(out_ptr + (r * HEADS + head) * value_dim + column, rounded(out, dtype), mask=is_column)
        if BY_ROW:
            slot = tl.load(row_slots_ptr + r)
            if slot >= 0:
                tl.store(final_ptr + slot * size + place, state, mask=is_state)
    if not BY_ROW:
        tl.store(final_ptr + sequence * size + place, state, mask=is_state)
