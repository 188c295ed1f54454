"""Tests of compressors: which are recognised, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.operations.compressor import compressor_of
from lockstep.rollout.model.operations.indexer import freeze_indexers


@pytest.fixture
def model(make_model):
    return make_model("deepseek_v4")


def test_compressors_of_both_kinds_are_recognised_and_a_window_alone_has_none(model):
    found = [compressor_of(layer.self_attn) for layer in model.model.layers]
    assert [each is not None for each in found] == [False, True, True, True]


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (1, lambda part, found: (found[0] * 1.5, found[1])),  # other entries
        (2, lambda part, found: (found[0], found[1].roll(1, 2))),  # seen by other rows
    ],
)
def test_code_that_pools_or_shows_otherwise_is_refused_by_the_kind_of_its_layers(model, layer, change):
    part = model.model.layers[layer].self_attn.compressor
    kind = type(part)

    class Other(kind):
        def forward(self, *args):
            return change(self, kind.forward(self, *args))

    part.__class__ = Other
    assert compressor_of(model.model.layers[layer].self_attn) is None
    with pytest.raises(ValueError, match=r"layers of type (heavily_compressed|compressed_sparse)_attention"):
        Engine(model, EngineConfig(kv_cache="16 blocks"))


def test_an_indexer_with_another_score_is_refused(model):
    scorer = model.model.layers[1].self_attn.compressor.indexer.scorer
    kind = type(scorer)

    class Squared(kind):
        def forward(self, *args):
            return super().forward(*args).square()

    scorer.__class__ = Squared
    with pytest.raises(ValueError, match="layers of type compressed_sparse_attention"):
        Engine(model, EngineConfig(kv_cache="16 blocks"))


def test_blocks_that_windows_do_not_divide_are_refused_at_the_start(make_model, model):
    rates = {"compressed_sparse_attention": 5, "heavily_compressed_attention": 6}
    with pytest.raises(ValueError, match="an indexer of entries of 5 tokens: block_size must be a multiple, not 16"):
        Engine(make_model("deepseek_v4", compress_rates=rates), EngineConfig(kv_cache="16 blocks"))
    shapes = Engine(model, EngineConfig(kv_cache="16 blocks")).model.kv_shapes
    assert [shape.index_dim for shape in shapes] == [0, 24, 0, 24]


def test_windows_of_one_token_are_refused(make_model):
    rates = {"compressed_sparse_attention": 1, "heavily_compressed_attention": 6}
    with pytest.raises(ValueError, match=r"cannot be hosted: layers of type compressed_sparse_attention$"):
        Engine(make_model("deepseek_v4", compress_rates=rates), EngineConfig(kv_cache="16 blocks"))


def test_entries_of_several_threads_do_not_depend_on_their_number(model, restore_threads):
    torch.set_num_threads(3)  # which do not divide an entry's numbers
    engine = Engine(model.train(), EngineConfig(kv_cache="16 blocks"))
    ids = torch.arange(5, 65)[None]
    with engine.model.training_numerics(), torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for length in (8, 13, 31, 59):
            assert torch.equal(model(ids[:, :length], use_cache=False).logits, whole[:, :length]), length


def test_the_indexers_are_frozen_since_they_get_no_gradients(model):
    assert freeze_indexers(model) == 2
    engine = Engine(model.train(), EngineConfig(kv_cache="16 blocks"))
    with engine.model.training_numerics():
        model(torch.arange(60)[None], use_cache=False).logits.square().mean().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
