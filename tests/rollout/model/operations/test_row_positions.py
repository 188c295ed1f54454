"""Layers with parts that know of their sequences by the cache alone: in packed rows of a trainer that checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.operations.indexer import indexer_forward
from lockstep.rollout.model.operations.packed_rows import NO_MASK
from lockstep.rollout.model.operations.row_positions import RowCache, counting_forward, telling_forward

LENGTHS = [1, 37, 2, 1, 50, 3]  # some are shorter than a convolution, or than a window that is compressed


@pytest.mark.parametrize(
    "family", ["inkling", "inkling2", "deepseek_v4", "llama4", "zaya", "jamba", "mamba2", "mamba", "zamba", "zamba2"]
)
def test_checkpoints_of_packed_rows_give_the_same_bits(make_model, restore_threads, family):
    torch.set_num_threads(1)
    model = make_model(family).train()
    engine = Engine(model, EngineConfig(kv_cache="16 blocks", max_num_seqs=4))
    ids = torch.tensor([[(13 * i + 5) % 250 for i in range(sum(LENGTHS))]])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = {"position_ids": positions, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "use_cache": False}
    with engine.model.training_numerics():
        alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    found = []
    for checkpoints in (None, False, True):
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        model.zero_grad()
        with engine.model.training_numerics():
            logits = model(ids, max_length_q=50, max_length_k=50, **packed).logits
            logits.float().logsumexp(-1).square().mean().backward()
        assert torch.equal(logits, torch.cat(alone, 1))
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed, reentrant = found
    assert checkpointed.keys() == plain.keys() and all(torch.equal(checkpointed[name], plain[name]) for name in plain)
    for name, gradient in reentrant.items():  # autograd adds the gradients of a state in another order
        torch.testing.assert_close(gradient, plain[name], atol=1e-5 * float(plain[name].abs().max()), rtol=1e-4)


class OfOldName(GradientCheckpointingLayer):
    """The cache's name up to transformers 5.23."""

    conv_idx = 0

    def forward(self, hidden_states: Tensor, past_key_values: object = None, **named: object) -> object:
        return past_key_values


class OfNewName(OfOldName):
    def forward(self, hidden_states: Tensor, cache: object = None, **named: object) -> object:
        return cache


class OfAnyName(OfOldName):
    def forward(self, hidden_states: Tensor, **named: object) -> object:
        return next(value for name, value in named.items() if name in ("past_key_values", "cache"))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("kind", [OfOldName, OfNewName, OfAnyName])
def test_a_layers_cache_is_found_by_its_name(kind, name):
    forward, starts = counting_forward(kind()), torch.tensor([0, 2, 5], dtype=torch.int32)
    hidden, keys = torch.zeros(1, 5, 4), torch.ones(1, 1, 5, 4)
    found = forward(hidden, **{name: object(), "cu_seq_lens_q": starts})
    assert isinstance(found, RowCache) and found.keywords["cu_seq_lens_q"] is starts
    assert found.update(keys, keys, 0, kwargs={"more": 1}) == (keys, keys)
    if kind is not OfAnyName:
        assert isinstance(forward(hidden, object(), cu_seq_lens_q=starts), RowCache)  # by its place


def test_a_layer_keeps_the_cache_that_its_model_told_it():
    told = RowCache(nn.Identity(), 3, torch.tensor([0, 3]), torch.tensor([3]))
    assert counting_forward(OfNewName())(torch.zeros(1, 3, 4), cache=told) is told


class OldModel(PreTrainedModel):
    """A model of recurrent layers alone, with the cache's name up to transformers 5.23."""

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self.layer = OfNewName()

    def forward(self, inputs_embeds: Tensor, cache_params: object = None, attention_mask: object = None, **_: object):
        return cache_params, attention_mask


class NewModel(OldModel):
    def forward(self, inputs_embeds: Tensor, cache: object = None, attention_mask: object = None, **_: object):
        return cache, attention_mask


class OfPositions(NewModel):
    def forward(self, inputs_embeds: Tensor, position_ids: object = None, cache: object = None, **_: object):
        return cache, None


@pytest.mark.parametrize("kind", [OldModel, NewModel])
def test_a_model_of_recurrent_layers_alone_tells_them_of_its_rows(kind):
    model, starts = kind(), torch.tensor([0, 2, 5], dtype=torch.int32)
    forward = telling_forward(model, {model.layer})
    cache, mask = forward(torch.zeros(1, 5, 4), attention_mask=NO_MASK, cu_seq_lens_q=starts)
    assert isinstance(cache, RowCache) and cache.keywords["cu_seq_lens_q"] is starts and mask is None
    name = "cache_params" if kind is OldModel else "cache"
    with pytest.raises(ValueError, match=f"{kind.__name__} was given a cache"):
        forward(torch.zeros(1, 5, 4), **{name: object()})
    with pytest.raises(ValueError, match="start over"):
        forward(torch.zeros(1, 4, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_models_with_positions_or_with_other_layers_tell_theirs_nothing():
    model = NewModel()
    assert telling_forward(model, set()) is None and telling_forward(OfPositions(), set(model.modules())) is None


class OldIndexer(nn.Module):
    layer_idx = 0

    def forward(self, x: Tensor, past_key_values: object) -> Tensor:
        return past_key_values.update_indexer(x, 1)


class NewIndexer(OldIndexer):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        return cache.update_indexer(x, 1)


@pytest.mark.parametrize(("kind", "name"), [(OldIndexer, "past_key_values"), (NewIndexer, "cache")])
def test_an_indexer_finds_its_cache_by_its_name(kind, name):
    with pytest.raises(ValueError, match=r"Indexer caches keys \[1, 2, 3\] for layer 1: not supported"):
        indexer_forward(kind())(torch.zeros(1, 2, 3), **{name: None})
