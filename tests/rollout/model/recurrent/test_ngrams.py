"""Tests of embeddings of n-grams and of the dilated convolution behind them: what is recognised, and the gradients."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.recurrent.ngrams import SHORT_CONV, ngram_forward, short_conv_of


@pytest.fixture
def layer(make_model) -> torch.nn.Module:
    return make_model("qwen4_exp").model.layers[0].ple


def test_ngrams_are_the_modules_own_and_end_at_an_end_of_text(layer):
    module = layer.ple_embedding
    forward = ngram_forward(module)
    assert forward is not None
    ids = torch.randint(0, 250, (3, 30))
    ids[0, [4, 5, 11]] = ids[2, 0] = module.eos_token_id
    assert torch.equal(forward(ids, None), module(ids, None))


def test_the_dilated_convolution_and_its_gradients_are_the_modules_own(layer):
    convolve = short_conv_of(layer)
    assert convolve is not None
    found = []
    for function in (convolve, getattr(layer, SHORT_CONV)):
        layer.zero_grad()
        hidden = torch.randn(2, 25, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = function(hidden, None)
        out.square().sum().backward()
        found.append([out, hidden.grad, layer.conv1d.weight.grad.clone()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("part", "method"), [("ple_embedding", "forward"), ("", SHORT_CONV)])
def test_code_that_computes_otherwise_is_not_recognised_and_refused(make_model, monkeypatch, part, method):
    model = make_model("qwen4_exp")
    module = model.model.layers[0].ple.get_submodule(part)
    own = getattr(type(module), method)
    monkeypatch.setattr(type(module), method, lambda self, *args: own(self, *args) * 2)
    assert (ngram_forward if part else short_conv_of)(module) is None
    with pytest.raises(ValueError, match=r"asks the cache for (get|update)_conv_state: not supported"):
        Engine(model, EngineConfig(kv_cache="16 blocks"))
