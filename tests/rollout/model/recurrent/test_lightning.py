"""Tests of Lightning attention: which classes are recognised, and its numbers in the trainer's forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.recurrent.layers import recurrent_forward

MASK = torch.arange(40) < torch.tensor([[40], [29]])


@pytest.fixture
def layer(make_model) -> torch.nn.Module:
    return make_model("minimax").model.layers[2].self_attn


@pytest.mark.parametrize("mask", [None, MASK.long(), MASK.flip(1)], ids=["whole", "right", "left"])
def test_the_forward_is_that_of_the_modules_code_and_so_are_its_gradients(layer, mask) -> None:
    forward = recurrent_forward(layer)
    assert forward is not None and layer.block_size == 16
    hidden, found = torch.randn(2, 40, 64), []
    for function in (forward, layer.forward):
        layer.zero_grad()
        leaf = hidden.clone().requires_grad_()
        out, _ = function(hidden_states=leaf, position_embeddings=None, attention_mask=mask)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(each.grad.clone() for each in layer.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5 * float(theirs.detach().abs().max()), rtol=1e-3)


def test_in_bfloat16_the_numbers_are_nearer_to_the_exact_ones_than_the_modules_own(layer) -> None:
    hidden = torch.randn(2, 40, 64).bfloat16()
    exact = copy.deepcopy(layer.bfloat16()).double()  # with the rounded parameters
    exact.query_decay, exact.key_decay, exact.diagonal_decay = exact.decay_factors(exact.slope_rate)
    with torch.no_grad():
        (mine, _), (own, _), (true, _) = (
            function(hidden_states=x, position_embeddings=None, attention_mask=None)
            for function, x in ((recurrent_forward(layer), hidden), (layer.forward, hidden), (exact, hidden.double()))
        )
    assert mine.dtype == torch.bfloat16
    assert (mine - true).norm() < (own - true).norm() < 0.1 * true.norm()


def test_packed_sequences_start_without_a_state_and_padding_leaves_none(make_model) -> None:
    model = make_model("minimax")
    layer = model.model.layers[2].self_attn
    hidden = torch.randn(1, 40, 64)
    starts = torch.tensor([0, 7, 29, 40], dtype=torch.int32)
    # A row of PyTorch's own products may depend on their number.
    with HostedModel.adopt(model, dtype=None, device=None, invariant=True).training_numerics():
        forward = layer.forward
        packed, _ = forward(hidden, cu_seq_lens_q=starts)
        parts = [forward(part)[0] for part in hidden.split([7, 22, 11], 1)]
        assert torch.equal(packed, torch.cat(parts, 1))
        padded, _ = forward(torch.cat([hidden, torch.randn(1, 3, 64)], 1), attention_mask=torch.arange(43)[None] < 40)
        assert torch.equal(padded[:, :40], forward(hidden)[0])


def test_code_that_computes_otherwise_is_not_recognised(layer) -> None:
    own = type(layer)

    class Doubled(own):
        def forward(self, hidden_states: Tensor, *args: object, **named: object) -> tuple[Tensor, Tensor]:
            out, state = super().forward(hidden_states, *args, **named)
            return out * 2, state

    class Faster(own):
        def decay_factors(self, slope_rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().decay_factors(slope_rate * 1.5)

    class Heedless(own):
        def forward(self, hidden_states: Tensor, position_embeddings: object, attention_mask: object, **named: object):
            return super().forward(hidden_states, position_embeddings, None, **named)

    for kind in (Doubled, Faster, Heedless):
        layer.__class__ = kind
        assert recurrent_forward(layer) is None
    layer.__class__ = own
    assert recurrent_forward(layer) is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpoints_change_no_bit(make_model, reentrant) -> None:
    model = make_model("minimax").train()
    hosted, ids, found = HostedModel.adopt(model, dtype=None, device=None, invariant=True), torch.arange(40)[None], []
    for checkpoints in (None, {"use_reentrant": reentrant}):
        if checkpoints is not None:
            model.gradient_checkpointing_enable(checkpoints)
        model.zero_grad()
        with hosted.training_numerics():
            loss = model(ids, use_cache=False).logits.logsumexp(-1).square().mean()
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
