"""Attention of rows to a window of tokens and to the entries that a compressor has pooled (`compressor.py`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.attention.compressed import Closings, Places, entry_slots
from ....kernels.attention.paged import AttentionPath, PagedStep, paged_attention
from ....kernels.attention.selected import selected_attention
from ....kernels.attention.selection import IndexQueries, SelectedKeys
from ....kernels.attention.step import RowLayout
from .indexer import WATCHING

COMPRESSOR = "lockstep_compressor"  # attribute of an attention that has one: the identity of the compressor

_waiting = threading.local()  # .entries: of compressors whose attention has not been called yet, by identity


@dataclass(frozen=True)
class Entries:
    """The result of a compressor in a forward, but for the entries themselves, which stand beside the rows' keys."""

    rate: int  # tokens of a window
    closings: Closings
    asked: IndexQueries | None  # of the rows, where an indexer selects
    keys: Tensor | None  # [E, D] of the indexer, in the order of the closings


def hand_on(compressor: nn.Module, entries: Entries) -> None:
    """Keep entries for the attention around a compressor, which this thread calls next."""
    if not hasattr(_waiting, "entries"):
        _waiting.entries = {}
    _waiting.entries[id(compressor)] = entries


def take(attention: nn.Module) -> Entries | None:
    """Return, once, what the compressor of an attention has handed on; None for an attention without one."""
    compressor = vars(attention).get(COMPRESSOR)
    return None if compressor is None else _waiting.entries.pop(compressor)


def beside_tokens(keys: Tensor, num_rows: int) -> Tensor:
    """Put the entries of keys [B, 1, 2 T, D], which stand behind the tokens, beside them: [B, 2, T, D]."""
    return torch.cat(keys.split(num_rows, 2), 1)


def attend_in_step(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    index_cache: Tensor | None,
    paged: PagedStep,
    slots: Tensor,
    entries: Entries,
    options: Mapping[str, Any],
) -> Tensor:
    """Write a step's rows, and attend -> [N, H, D].

    query [N, H, D]; new: keys and values of tokens and entries [N, 2, D]; caches [num_blocks, block_size, 2, D]; slots
    int64 [N]; options as of `paged_attention`, with the window of tokens.
    """
    write_rows(new, caches, index_cache, slots, entries)
    places = Places.of(paged.layout, len(query), caches[0].shape[1])
    chosen = None
    if entries.asked is not None and places.most_entries(entries.rate) > entries.asked.most:
        assert index_cache is not None
        chosen = places.choose(entries.asked, index_cache, entries.rate, entries.closings, options["path"])
    seen = places.seen(options["window"], entries.rate, chosen)
    layout = seen.layout()
    assert layout.context_lens is not None
    step = PagedStep(seen.places, layout.query_start, layout.context_lens)
    keys, values = (cache.flatten(0, 2)[:, None, None] for cache in caches)
    return paged_attention(query, keys, values, step, **{**options, "window": None})


def write_rows(
    new: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], index_cache: Tensor | None, slots: Tensor,
    entries: Entries,
) -> None:  # fmt: skip
    """Write the keys and values of a step's rows, and the indexer's keys of the entries that they close."""
    for cache, rows in zip(caches, new, strict=True):
        cache.flatten(0, 1).index_copy_(0, slots, rows)
    if index_cache is not None and entries.keys is not None:
        write_entries(entries.keys, index_cache, slots, entries.closings, entries.rate)


def write_entries(keys: Tensor, index_cache: Tensor, slots: Tensor, closings: Closings, rate: int) -> None:
    """Write an indexer's keys [E, D], of windows that rows close, to its cache [num_blocks, block_size, D]."""
    block_size = index_cache.shape[1]
    own = entry_slots(slots[closings.rows], block_size, rate)
    unused = slots[:1] // block_size * block_size + block_size - 1  # entries fill the beginnings of blocks alone
    index_cache.flatten(0, 1).index_copy_(0, torch.where(closings.is_real, own, unused), keys)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, query_start: Tensor, entries: Entries, options: Mapping[str, Any]
) -> Tensor:
    """Attend within packed sequences -> [N, H, D]. key and value [N, 2, D] of tokens and entries. Differentiable."""
    path: AttentionPath = options["path"]
    places = Places.of(RowLayout(query_start, None, None), len(query), 0)
    chosen = None
    if entries.asked is not None and places.most_entries(entries.rate) > entries.asked.most:
        assert entries.keys is not None
        chosen = places.choose(entries.asked, entries.keys, entries.rate, entries.closings, path)
        if (watch := WATCHING.get()) is not None:
            watch(SelectedKeys(chosen.places // entries.rate, chosen.counts))  # the entries of one whole sequence
    seen = places.seen(options["window"], entries.rate, chosen)
    keys, values = (each.reshape(-1, 1, each.shape[2]) for each in (key, value))
    rule = {name: options[name] for name in ("scale", "softcap", "sinks")}
    return selected_attention(query, keys, values, seen, path=path, **rule)
