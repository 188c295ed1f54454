"""Indexers that select pools of tokens (GLM-5-Next): each pool's key is the mean of its tokens' keys, by learnt gates.

A row attends to the tokens of the pools that its indexer scores highest, and to those behind the last whole pool. The
indexer's own code builds all pools anew from the cache; here a pool is computed by the row that ends it, from the rows
of this forward and a state with the inputs before them, and its key stands in the index cache. A module is recognised
by the results of its code on a trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....kernels.attention.compressed import Closings
from ....kernels.attention.selection import IndexQueries
from ....kernels.attention.step import RowLayout
from ....kernels.recurrent.windows import last_inputs, look_back
from ..recurrent.rows import RecurrentRows, rows_of
from .pool_choice import PoolChoice, selects_like
from .row_positions import RowCache, contexts_of

Forward = Callable[..., Any]

MASK_OF = "build_attention_mask_from_topk"  # the method by which an attention turns a selection into a mask
_PARTS = ("wq_b", "wk", "k_norm", "weights_proj", "index_kpool_compress_ape", "index_kpool_compress_gate")
# Errors that code of another form raises on the trial. It then counts as not recognised.
_UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)


def pooled_indexer_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an indexer of pools that gives a `PoolChoice`; None for any other module."""
    if not hasattr(module, "layer_idx") or not all(hasattr(module, name) for name in _PARTS) or not _is_like(module):
        return None
    indexer: Any = module

    def forward(
        hidden_states: Tensor, q_resid: Tensor, past_key_values: RowCache | None = None, **named: object
    ) -> PoolChoice:
        cache = named.get("cache", past_key_values)  # its name since transformers 5.24
        assert cache is None or isinstance(cache, RowCache)
        rows, closings = rows_and_closings(module, hidden_states, cache, indexer.index_kpool)
        with torch.no_grad():
            keys = _pooled(indexer, hidden_states, rows, closings)
            asked = _queries(indexer, hidden_states, q_resid)
        return PoolChoice(indexer.index_kpool, closings, asked, keys, indexer.layer_idx)

    return forward


def rows_and_closings(
    indexer: nn.Module, hidden: Tensor, cache: RowCache | None, rate: int
) -> tuple[RecurrentRows, Closings]:
    """Return the rows of an indexer's hidden [B, T, D] in their sequences, and the pools of `rate` tokens they end."""
    batch, num_rows = hidden.shape[:2]
    keywords = {} if cache is None else cache.keywords
    rows = rows_of(indexer, batch, num_rows, hidden.device, keywords)
    return rows, Closings.of(RowLayout(rows.cu_seqlens, contexts_of(keywords), None), batch * num_rows, rate)


def mask_of_choice(module: nn.Module) -> Forward | None:
    """Return what replaces the method by which an attention of pools makes its mask; None for any other module."""
    if not hasattr(type(module), MASK_OF) or not hasattr(module, "layer_idx"):
        return None
    return lambda topk_indices, query_states, kv_length: topk_indices


def _pooled(indexer: Any, hidden: Tensor, rows: RecurrentRows, closings: Closings) -> Tensor:
    """Pool the keys of the windows that rows of hidden [B, T, D] close -> [E, D], with earlier inputs in a state."""
    keys = indexer.k_norm(indexer.wk(hidden))
    gates = F.linear(hidden, indexer.index_kpool_compress_gate)
    x, rate = torch.cat([keys, gates], -1).flatten(0, 1), indexer.index_kpool
    slots = rows.slots("indexer")
    keys, gates = look_back(x, rows.cu_seqlens, closings.rows + 1, closings.owners, rate, slots).chunk(2, -1)
    final = last_inputs(x, rows.cu_seqlens, rate, slots)
    rows.leave("indexer", final)
    gates = gates.float() + indexer.index_kpool_compress_ape.float()
    # Along the last dimension: along another one PyTorch's threads share the numbers of a pool, with other bits.
    weights = gates.transpose(1, 2).softmax(-1).transpose(1, 2)
    return (weights.to(keys.dtype) * keys).sum(dim=1)


def _queries(indexer: Any, hidden: Tensor, residual: Tensor) -> IndexQueries:
    """Return the questions of an indexer's rows."""
    query = indexer.wq_b(residual).flatten(0, 1).unflatten(-1, (-1, indexer.head_dim)).float()
    weight = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
    return IndexQueries(query, weight.flatten(0, 1), indexer.softmax_scale, indexer.index_topk // indexer.index_kpool)


# -- the trial ---------------------------------------------------------------------------------------------------------


def _is_like(indexer: Any) -> bool:
    """Return whether an indexer's code selects the best of the same pools, and the tail behind them."""
    most = indexer.index_topk
    try:
        indexer.index_topk = indexer.index_kpool  # one pool: which one tells of the scores
        with torch.no_grad():
            return bool(indexer.index_kpool_always_select_tail) and _trial(indexer)
    except _UNLIKE:
        return False
    finally:
        indexer.index_topk = most


def _trial(indexer: Any) -> bool:
    weight, rate, generator = indexer.wk.weight, indexer.index_kpool, torch.Generator().manual_seed(0)
    num_rows = 4 * rate + max(rate - 1, 0)

    def drawn(width: int) -> Tensor:
        found = torch.randn(1, num_rows, width, generator=generator, dtype=torch.float32)
        return found.to(weight.device, weight.dtype)

    hidden, residual = drawn(weight.shape[1]), drawn(indexer.wq_b.weight.shape[1])
    is_token = torch.ones(1, num_rows, dtype=torch.bool, device=weight.device)
    found = type(indexer).forward(indexer, hidden, residual, is_token, None)[0]
    rows = RecurrentRows(torch.tensor([0, num_rows], dtype=torch.int32, device=weight.device), 0, None)
    closings = Closings.of(RowLayout(rows.cu_seqlens, None, None), num_rows, rate)
    keys, asked = _pooled(indexer, hidden, rows, closings)[:4], _queries(indexer, hidden, residual)
    sees = torch.zeros(num_rows, num_rows + 1, dtype=torch.bool, device=weight.device)
    sees.scatter_(1, torch.where(found < 0, num_rows, found).long(), True)
    return selects_like(sees[:, :-1], asked, keys.float(), rate)
