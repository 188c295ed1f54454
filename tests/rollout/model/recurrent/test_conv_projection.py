"""Tests of the projection of compressed convolutional attention: which classes are recognised, and its numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.rollout.model.recurrent.layers import recurrent_forward
from lockstep.tests.optional_packages import needs_transformers

MASK = torch.arange(40) < torch.tensor([[40], [29]])


@pytest.fixture
def projection(make_model) -> torch.nn.Module:
    needs_transformers(5, 23)
    return make_model("zaya").model.layers[1].self_attn.qkv_proj


@pytest.mark.parametrize("mask", [None, MASK.long(), MASK.flip(1)], ids=["whole", "right", "left"])
def test_the_forward_is_that_of_the_modules_code_and_so_are_its_gradients(projection, mask) -> None:
    forward = recurrent_forward(projection)
    assert forward is not None
    hidden, found = torch.randn(2, 40, 64), []
    for function in (forward, projection.forward):
        projection.zero_grad()
        leaf = hidden.clone().requires_grad_()
        results = function(leaf, None, mask)
        sum(out.square().sum() * (index + 1) for index, out in enumerate(results)).backward()
        found.append([*results, leaf.grad, *(each.grad.clone() for each in projection.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5 * float(theirs.detach().abs().max()), rtol=1e-4)


@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_sequences_do_not_see_each_other(make_model, has_bias) -> None:
    needs_transformers(5, 23)
    forward = recurrent_forward(make_model("zaya", attention_bias=has_bias).model.layers[1].self_attn.qkv_proj)
    hidden, lengths = torch.randn(1, 40, 64), [1, 7, 2, 30]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = forward(hidden, SimpleNamespace(keywords={"cu_seq_lens_q": starts}))
    alone = [forward(part) for part in hidden.split(lengths, 1)]
    for found, parts in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts, 1))


def test_convolutions_of_another_kind_are_not_recognised(projection) -> None:
    class Adapted(torch.nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    projection.conv_qk_grouped.__class__ = Adapted
    assert recurrent_forward(projection) is None
    projection.conv_qk_grouped.__class__ = torch.nn.Conv1d
    projection.conv_qk_depthwise.dilation = (2,)
    assert recurrent_forward(projection) is None


def test_code_that_computes_otherwise_is_not_recognised(projection) -> None:
    own = type(projection)

    class Turned(own):
        def forward(self, *args: object) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().forward(*args)
            return query, key, value.roll(1, -1)

    class Heedless(own):
        def forward(self, hidden: Tensor, cache: object, conv_mask: object) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(hidden, cache, None)

    for kind in (Turned, Heedless):
        projection.__class__ = kind
        assert recurrent_forward(projection) is None
    projection.__class__ = own
    assert recurrent_forward(projection) is not None
