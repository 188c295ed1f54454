"""The context of one step's forward: the places of its rows, and the KV that they see in each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.attention.chunks import chunked_step, in_blocks
from ....kernels.attention.paged import PagedStep
from ..recurrent.states import StepStates


class LayerKV(NamedTuple):
    """The KV that a step's rows see in one layer."""

    keys: Tensor  # [num_blocks, block_size, K, D]
    values: Tensor
    paged: PagedStep  # the rows, and the blocks of their sequences


@dataclass
class StepContext:
    """The context of one rollout forward: the places of its rows and of their KV."""

    slots: Tensor  # int64 [N]: block * block_size + offset of each row
    paged: PagedStep
    key_caches: list[Tensor]  # per layer of this rank [num_blocks, block_size, K, D]
    value_caches: list[Tensor]
    first_layer: int = 0  # index in the whole model of the layer that the first cache belongs to
    states: StepStates | None = None  # of the recurrent layers; None: the module has none
    ends_at: int | None = None  # the layer with whose KV the forward ends (`KVWritten`); None: it runs to its logits
    wanted: Tensor | None = None  # int64 [R]: the rows that the last layer returns; None: all N
    index_caches: list[Tensor] = field(default_factory=list)  # per layer [num_blocks, block_size, D] of its indexer
    places: Mapping[tuple[int, int], int] | None = None  # of KV, by layer and call, where some call several times
    calls: Counter[int] = field(default_factory=Counter)  # of each layer in this forward, where some call several times
    _chunked: dict[int, tuple[PagedStep, int]] = field(default_factory=dict)  # by length of a chunk

    def begun(self, places: Mapping[tuple[int, int], int] | None) -> StepContext:
        """Return itself at the begin of a forward. places: see the attribute."""
        self.places = places
        self.calls.clear()
        return self

    def of_layer(self, layer: int, chunk: int | None) -> LayerKV:
        """Return a layer's KV of its next call. chunk: see `CHUNK`. Raises ValueError for a call that has no place."""
        place = layer - self.first_layer
        if self.places is not None:
            if (layer, self.calls[layer]) not in self.places:
                raise ValueError(f"layer {layer} calls its attention more often than when its module was hosted")
            place = self.places[layer, self.calls[layer]]
            self.calls[layer] += 1
        keys, values = (caches[place] for caches in (self.key_caches, self.value_caches))
        if chunk is None:
            return LayerKV(keys, values, self.paged)
        if chunk not in self._chunked:
            self._chunked[chunk] = chunked_step(self.paged, chunk, keys.shape[1], len(self.slots))
        paged, size = self._chunked[chunk]
        return LayerKV(in_blocks(keys, size), in_blocks(values, size), paged)

    def of_wanted(self) -> StepContext:
        """Return the context of the wanted rows alone, each as a sequence of its own."""
        assert self.wanted is not None
        rows, starts = self.wanted.to(torch.int32), self.paged.query_start
        owner = torch.searchsorted(starts, rows, right=True) - 1
        later = starts[owner + 1] - 1 - rows  # rows of the sequence behind this one
        paged = PagedStep(
            block_tables=self.paged.block_tables[owner],
            query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            context_lens=self.paged.context_lens[owner] - later,
        )
        return replace(self, slots=self.slots[self.wanted], paged=paged, wanted=None, _chunked={})


class KVWritten(Exception):
    """The end of a forward of which only the KV is wanted: that of its last attention is in the cache."""
