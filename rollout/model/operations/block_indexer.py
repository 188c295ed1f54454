"""Indexers that select blocks of tokens by the mean of their keys (Qwen 4); the choice is that of pools (`pools.py`).

The key of a block has the rotation of the block's first token, which may be one of an earlier forward: the state has
the rotations of its tokens beside their keys. A module is recognised by the results of its code on a trial.
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
from ..recurrent.rows import RecurrentRows
from .copied_code import innermost
from .pool_choice import PoolChoice, selects_like
from .pools import rows_and_closings
from .row_positions import RowCache

Forward = Callable[..., Any]

_PARTS = ("index_qk_proj", "q_layernorm", "k_layernorm", "compress_ratio", "token_budget")
_ROTARY = "apply_rotary_pos_emb"
# Errors that code of another form raises on the trial. It then counts as not recognised.
_UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError)


def block_indexer_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an indexer of blocks that gives a `PoolChoice`; None for any other module."""
    if not hasattr(module, "layer_idx") or not all(hasattr(module, name) for name in _PARTS) or not _is_like(module):
        return None
    indexer: Any = module

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], _: object, past_key_values: RowCache | None
    ) -> PoolChoice:
        rows, closings = rows_and_closings(module, hidden_states, past_key_values, indexer.compress_ratio)
        with torch.no_grad():
            asked, keys = _index(indexer, hidden_states, position_embeddings, rows, closings)
        return PoolChoice(indexer.compress_ratio, closings, asked, keys, indexer.layer_idx)

    return forward


def _index(
    indexer: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], rows: RecurrentRows, closings: Closings
) -> tuple[IndexQueries, Tensor]:
    """Return the questions of rows of hidden [B, T, D], and the keys [E, d] of the blocks that they end.

    rotation: cosines and sines of their positions, [B, T, r] or [1, T, r].
    """
    batch, num_rows = hidden.shape[:2]
    cos, sin = (each.expand(batch, -1, -1) for each in rotation)
    width, heads = indexer.index_head_dim, indexer.index_n_heads
    query, key = indexer.index_qk_proj(hidden).split([heads * width, width], -1)
    rotate = cast(Forward, _globals_of(indexer)[_ROTARY])
    query = rotate(indexer.q_layernorm(query.unflatten(-1, (heads, width))), cos=cos, sin=sin, unsqueeze_dim=2)
    x, rate = torch.cat([key, cos.to(key.dtype), sin.to(key.dtype)], -1).flatten(0, 1), indexer.compress_ratio
    slots = rows.slots("indexer")
    taps = look_back(x, rows.cu_seqlens, closings.rows + 1, closings.owners, rate, slots)
    final = last_inputs(x, rows.cu_seqlens, rate, slots)
    rows.leave("indexer", final)
    blocks, first_cos, first_sin = taps.split([width, cos.shape[-1], sin.shape[-1]], -1)
    pooled = indexer.k_layernorm(blocks.float().mean(dim=1).to(key.dtype))
    keys = rotate(pooled[:, None], cos=first_cos[:, 0], sin=first_sin[:, 0])[:, 0]
    weight = query.new_full((batch * num_rows, heads), width**-0.5, dtype=torch.float32)
    return IndexQueries(query.float().flatten(0, 1), weight, 1.0, indexer.token_budget // rate), keys


def _globals_of(module: nn.Module) -> dict[str, Any]:
    code = innermost(type(module).forward)
    assert code is not None
    return code.__globals__


# -- the trial ---------------------------------------------------------------------------------------------------------


def _is_like(indexer: Any) -> bool:
    """Return whether an indexer's code selects the best of the same blocks, and the tail behind them."""
    most = indexer.token_budget, indexer.block_topk
    try:
        indexer.token_budget, indexer.block_topk = indexer.compress_ratio, 1  # which one tells of the scores
        with torch.no_grad():
            return _trial(indexer)
    except _UNLIKE:
        return False
    finally:
        indexer.token_budget, indexer.block_topk = most


def _trial(indexer: Any) -> bool:
    weight, rate, generator = indexer.index_qk_proj.weight, indexer.compress_ratio, torch.Generator().manual_seed(0)
    num_rows, width = 4 * rate + max(rate - 1, 0), indexer.index_head_dim // 2 * 2
    hidden = torch.randn(1, num_rows, weight.shape[1], generator=generator, dtype=torch.float32)
    angles = torch.arange(num_rows, dtype=torch.float32)[None, :, None] * torch.linspace(
        0.1, 1, width // 2, dtype=torch.float32
    )
    angles = torch.cat([angles, angles], -1)
    hidden, cos, sin = (each.to(weight.device, weight.dtype) for each in (hidden, angles.cos(), angles.sin()))
    sees = torch.ones(num_rows, num_rows, dtype=torch.bool, device=weight.device).tril()[None, None]
    found = type(indexer).forward(indexer, hidden, (cos, sin), sees, None)[0, 0]
    rows = RecurrentRows(torch.tensor([0, num_rows], dtype=torch.int32, device=weight.device), 0, None)
    closings = Closings.of(RowLayout(rows.cu_seqlens, None, None), num_rows, rate)
    asked, keys = _index(indexer, hidden, (cos, sin), rows, closings)
    return selects_like(found, asked, keys[:4].float(), rate)
