"""Compressors of an attention: they pool windows of tokens to entries that later rows see (DeepSeek-V4).

A compressor's own code keeps tokens and entries in the cache. Here each window is pooled when a row closes it, from the
rows of this forward and a state with the inputs before them; its entry stands beside that row, and in the KV cache
beside its token. The attention's own code appends the entries to the keys of its tokens, and the hosted attention finds
with them which of them a row sees. Compressors are recognised by the results of their code on a trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....kernels.attention.compressed import Closings
from ....kernels.attention.selection import IndexQueries
from ....kernels.attention.step import RowLayout
from ....kernels.recurrent.windows import last_inputs, look_back
from ..recurrent.rows import RecurrentRows, rows_of
from .copied_code import innermost
from .entries import Entries, hand_on
from .row_positions import RowCache, contexts_of

Forward = Callable[..., Any]

_ROTARY = "apply_rotary_pos_emb"
_PARTS = ("kv_proj", "gate_proj", "kv_norm", "rotary_emb")
# Errors that code of another form raises on the trial. It then counts as not recognised.
_UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError)


def compressor_of(attention: nn.Module) -> tuple[nn.Module, Forward] | None:
    """Return the compressor of an attention, and its forward in the engine and in the trainer; None without one."""
    if not isinstance(getattr(attention, "layer_idx", None), int):
        return None
    for part in attention.children():
        rate = getattr(part, "compress_rate", None)
        if isinstance(rate, int) and all(hasattr(part, name) for name in _PARTS):
            # Windows of one token would fill the indexer's cache, which needs an unused slot in a block (`entries.py`).
            return (part, _forward_of(attention, part)) if rate > 1 and _is_like(part) else None
    return None


def _forward_of(attention: nn.Module, part: nn.Module) -> Forward:
    def forward(
        hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: RowCache | None, _: int
    ) -> tuple[Tensor, None]:
        batch, num_rows = hidden_states.shape[:2]
        keywords = {} if past_key_values is None else past_key_values.keywords
        rows = rows_of(attention, batch, num_rows, hidden_states.device, keywords)
        rate, layout = cast(int, part.compress_rate), RowLayout(rows.cu_seqlens, contexts_of(keywords), None)
        closings = Closings.of(layout, batch * num_rows, rate)
        entries = _pooled(part, hidden_states, rows, closings, "compressor")
        keys = asked = None
        if (indexer := getattr(part, "indexer", None)) is not None:
            with torch.no_grad():
                keys = _pooled(indexer, hidden_states, rows, closings, "indexer")
                asked = _queries(indexer, hidden_states, q_residual, position_ids)
        hand_on(part, Entries(rate, closings, asked, keys))
        return closings.by_row(entries, batch * num_rows).view(batch, 1, num_rows, -1), None

    return forward


def _pooled(part: Any, hidden: Tensor, rows: RecurrentRows, closings: Closings, name: str) -> Tensor:
    """Pool the windows that rows of hidden [B, T, D] close -> [E, D], with the inputs of earlier rows in a state.

    A window's entry is the mean of its tokens by gates of each channel. Where tokens have two of each, an entry is that
    of the first of the window before and of the second of its own window.
    """
    x = torch.cat([part.kv_proj(hidden), part.gate_proj(hidden)], -1).flatten(0, 1)
    rate, width = part.compress_rate, part.head_dim
    overlaps = x.shape[1] == 4 * width
    span, slots = rate * (1 + overlaps), rows.slots(name)
    kv, gate = look_back(x, rows.cu_seqlens, closings.rows + 1, closings.owners, span, slots).chunk(2, -1)
    final = last_inputs(x, rows.cu_seqlens, span, slots)
    rows.leave(name, final)
    gate = gate + part.position_bias.repeat(span // rate, 1)
    if overlaps:
        kv, gate = (torch.cat([t[:, :rate, :width], t[:, rate:, width:]], 1) for t in (kv, gate))
        is_before = torch.arange(span, device=x.device) < rate  # there is no window before the first
        lacks = ((closings.windows == 0)[:, None] & is_before)[:, :, None]
        kv, gate = kv.masked_fill(lacks, 0), gate.masked_fill(lacks, -torch.inf)
    # Along the last dimension: along another one PyTorch's threads share the numbers of an entry, with other bits.
    weights = gate.transpose(1, 2).softmax(-1, dtype=torch.float32).transpose(1, 2).to(kv.dtype)
    entries = part.kv_norm((kv * weights).sum(dim=1))
    cos, sin = part.rotary_emb(entries, position_ids=closings.windows[None] * rate, layer_type=part.rope_layer_type)
    return cast(Tensor, _rotary_of(part)(entries[None, None], cos, sin)[0, 0])


def _queries(indexer: Any, hidden: Tensor, q_residual: Tensor, position_ids: Tensor) -> IndexQueries:
    """Return the questions of an indexer's rows."""
    batch, num_rows = hidden.shape[:2]
    cos, sin = indexer.rotary_emb(hidden, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = indexer.q_b_proj(q_residual).view(batch, num_rows, -1, indexer.head_dim).transpose(1, 2)
    query = _rotary_of(indexer)(query, cos, sin).transpose(1, 2).float().flatten(0, 1)
    scorer = indexer.scorer
    weight = scorer.weights_proj(hidden).float() * scorer.weights_scaling
    return IndexQueries(query, weight.flatten(0, 1), scorer.softmax_scale, indexer.index_topk)


def _rotary_of(part: nn.Module) -> Forward:
    code = innermost(type(part).forward)
    assert code is not None
    return cast(Forward, code.__globals__[_ROTARY])


# -- the trial ---------------------------------------------------------------------------------------------------------


def _is_like(part: Any) -> bool:
    """Return whether a compressor's code pools the same entries on a trial, and shows rows those that are closed."""
    try:
        with torch.no_grad():
            return _trial(part)
    except _UNLIKE:
        return False


def _trial(part: Any) -> bool:
    weight, rate = part.kv_proj.weight, part.compress_rate
    num_rows, generator = 4 * rate - 1, torch.Generator().manual_seed(0)  # three windows, and most of another

    def drawn(width: int) -> Tensor:
        drawn = torch.randn(1, num_rows, width, generator=generator, dtype=torch.float32)
        return drawn.to(weight.device, weight.dtype)

    indexer = getattr(part, "indexer", None)
    hidden, residual = drawn(weight.shape[1]), drawn(1 if indexer is None else indexer.q_b_proj.weight.shape[1])
    positions = torch.arange(num_rows, device=weight.device)[None]
    found, bias = type(part).forward(part, hidden, residual, positions, None, 0)
    rows = RecurrentRows(torch.tensor([0, num_rows], dtype=torch.int32, device=weight.device), 0, None)
    closings = Closings.of(RowLayout(rows.cu_seqlens, None, None), num_rows, rate)
    tolerance = 1e-3 if weight.dtype == torch.float32 else 5e-2
    entries = _pooled(part, hidden, rows, closings, "")[:3]
    if found.shape != (1, 1, *entries.shape) or not torch.allclose(found[0, 0], entries, atol=tolerance):
        return False
    closed, most = (positions[0] + 1) // rate, 3
    if indexer is not None:
        keys, asked = _pooled(indexer, hidden, rows, closings, "")[:3], _queries(indexer, hidden, residual, positions)
        own = indexer.scorer(asked.query[None], keys[None], hidden)[0]
        products = torch.relu(asked.query @ keys.float().t() * asked.scale)  # [N, H, 3]
        if not torch.allclose(own, (products * asked.weight[:, :, None]).sum(1), atol=tolerance):
            return False
        most = asked.most
    return torch.equal((bias[0, 0] == 0).sum(1), closed.clamp(max=min(most, 3)))
