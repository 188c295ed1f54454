"""Tests of convolutions with weights of each row: which modules are recognised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.rollout.model.operations.carried import PACKING
from lockstep.rollout.model.operations.row_positions import RowCache
from lockstep.rollout.model.recurrent.layers import recurrent_forward
from lockstep.tests.optional_packages import needs_transformers


@pytest.fixture
def convolution(make_model) -> torch.nn.Module:
    needs_transformers(5, 23)
    return next(part for part in make_model("inkling2").modules() if hasattr(part, "static_weight"))


def test_the_forward_is_that_of_the_modules_code_and_so_are_its_gradients(convolution) -> None:
    forward = recurrent_forward(convolution)
    assert forward is not None
    hidden, dynamic_input = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    found = []
    for function in (forward, convolution.forward):
        convolution.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (hidden, dynamic_input)]
        out = function(*leaves)
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves), *(each.grad.clone() for each in convolution.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_sequences_are_those_that_the_layers_cache_tells_of(convolution, name) -> None:
    forward, lengths = recurrent_forward(convolution), (4, 5)
    hidden, dynamic_input = torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    cache = RowCache(convolution, 9, torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([4, 5]))
    cache.keywords = {PACKING: torch.tensor([0, 4, 9], dtype=torch.int32)}
    parts = zip(hidden.split(lengths, 1), dynamic_input.split(lengths, 1), strict=True)
    alone = torch.cat([forward(*part) for part in parts], 1)
    assert torch.equal(forward(hidden, dynamic_input, **{name: cache}), alone)
    assert torch.equal(forward(hidden, dynamic_input, cache), alone)


def test_code_that_computes_otherwise_is_not_recognised(convolution) -> None:
    class Doubled(type(convolution)):
        def forward(self, hidden_states: Tensor, dynamic_input: Tensor, **named: object) -> Tensor:
            return super().forward(hidden_states, dynamic_input, **named) * 2

    convolution.__class__ = Doubled
    assert recurrent_forward(convolution) is None
