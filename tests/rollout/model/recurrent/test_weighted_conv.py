"""Tests of convolutions with weights of each row: which modules are recognised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.rollout.model.recurrent.layers import recurrent_forward
from lockstep.tests.optional_packages import needs_transformers


@pytest.fixture
def convolution(make_model) -> torch.nn.Module:
    needs_transformers(5, 23)
    return make_model("inkling2").model.layers[1].self_attn.k_sconv


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


def test_code_that_computes_otherwise_is_not_recognised(convolution) -> None:
    class Doubled(type(convolution)):
        def forward(self, hidden_states: Tensor, dynamic_input: Tensor, **named: object) -> Tensor:
            return super().forward(hidden_states, dynamic_input, **named) * 2

    convolution.__class__ = Doubled
    assert recurrent_forward(convolution) is None
