"""Numbers of keys that a model adds to scores: their slopes are found, and others are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lockstep.rollout.model.own_attention.key_bias import KeyBias, key_bias_of
from lockstep.rollout.model.own_attention.layers import own_attentions

SIZES = {"vocab_size": 20, "n_layer": 2, "n_head": 6, "hidden_size": 24}
MPT = {"vocab_size": 20, "n_layers": 2, "n_heads": 6, "d_model": 24, "max_seq_len": 40}


def slopes(bias: KeyBias | None) -> Tensor:
    assert bias is not None
    return -bias.table(1.0, torch.float32, 1)[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_are_those_of_the_models_code(dtype):
    bloom, mpt = BloomForCausalLM(BloomConfig(**SIZES)).to(dtype), MptForCausalLM(MptConfig(**MPT)).to(dtype)
    # Press et al. 2022: powers of 2^(-8/4) for four heads, then every second one of 2^(-8/8) for two more.
    expected = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    found = slopes(key_bias_of(bloom, own_attentions(bloom)[0], 30))
    assert torch.equal(found, expected)
    # MPT has every second one of powers of 2^(-8/8) first, which are the same numbers.
    assert torch.equal(slopes(key_bias_of(mpt, own_attentions(mpt)[0], 30)), expected)


def test_a_table_falls_with_the_distance_and_reaches_the_longest_row():
    bias = KeyBias(torch.tensor([0.5, 0.125]), 10)
    table = bias.table(2.0, torch.bfloat16, 3)
    assert table.shape == (2, 10) and table.dtype == torch.bfloat16
    assert torch.equal(table.float(), torch.tensor([[-1.0], [-0.25]]) * torch.arange(10))
    assert bias.table(2.0, torch.bfloat16, 33).shape == (2, 64) and bias.table(2.0, torch.bfloat16, 3) is table
    with torch.inference_mode():
        assert not KeyBias(torch.ones(2), 4).table(1.0, torch.float32, 1).is_inference()
    assert bias.is_like(torch.ones(4, 1, 9)) and not bias.is_like(torch.ones(3, 1, 9))
    assert not bias.is_like(torch.ones(1, 1, 1, 1)) and not bias.is_like(torch.ones(2, 9, 9))


def test_attentions_that_get_no_such_numbers_have_none_and_uneven_ones_are_refused(monkeypatch):
    config = Qwen3Config(vocab_size=20, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=12,
                         num_key_value_heads=2, intermediate_size=8)  # fmt: skip
    other = Qwen3ForCausalLM(config)
    assert own_attentions(other) == [] and key_bias_of(other, other.model.layers[0].self_attn, 30) is None
    bloom = BloomForCausalLM(BloomConfig(**SIZES))
    attention, block = own_attentions(bloom)[0], type(bloom.transformer.h[0])
    forward = block.forward
    monkeypatch.setattr(
        block, "forward", lambda self, hidden, alibi, **named: forward(self, hidden, alibi=alibi.square(), **named)
    )
    with pytest.raises(ValueError, match="BloomAttention adds numbers to scores that do not grow evenly"):
        key_bias_of(bloom, attention, 30)


def test_a_trial_leaves_no_forward_behind_also_where_the_part_had_one():
    bloom = BloomForCausalLM(BloomConfig(**SIZES))
    attention = own_attentions(bloom)[0]
    key_bias_of(bloom, attention, 30)
    assert "forward" not in vars(attention)
    attention.forward = mine = functools.partial(type(attention).forward, attention)
    key_bias_of(bloom, attention, 30)
    assert attention.forward is mine
