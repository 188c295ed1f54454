"""Tests of attention with a bias by distance: which parts of a module are recognised, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.operations.distance_bias import distance_bias_forward, reach_of, without_distances
from lockstep.rollout.sampling_params import SamplingParams


class Spread(nn.Module):
    """A part that mixes profiles and spreads them over keys, written otherwise than in transformers."""

    def __init__(self, width: int = 4, reach: int = 12) -> None:
        super().__init__()
        self.profiles = nn.Parameter(torch.zeros(width, reach))  # zeros: the values must not matter

    def forward(self, states: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        distance = queries[:, None] - keys
        known = self.profiles.T[distance.clamp(0, self.profiles.shape[1] - 1)]  # [q, k, width]
        near = (distance >= 0) & (distance < self.profiles.shape[1])
        return torch.einsum("bqhd,qkd->bhqk", states, known) * near


class Ahead(Spread):
    """A part that counts distances to keys behind the query, too."""

    def forward(self, states: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return super().forward(states, queries, 2 * queries[-1] - keys)


class Endless(Spread):
    """A part whose last profile goes on beyond the reach."""

    def forward(self, states: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return super().forward(states, queries, torch.maximum(keys, queries[0] - self.profiles.shape[1] + 1))


class Scaled(Spread):
    """A part with a second parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        return states * self.weight * (1 + positions[..., None, None])


class Making(nn.Module):
    """A part that makes the states itself, of hidden ones, as Inkling 2's since transformers 5.24."""

    def __init__(self, width: int = 4, reach: int = 12) -> None:
        super().__init__()
        self.profiles = nn.Parameter(torch.zeros(width, reach))
        self.scale, self.project = Norm(width), nn.Linear(10, 3 * width, bias=False)

    def forward(self, hidden: Tensor, distance: Tensor, positions: Tensor) -> Tensor:
        states = self.scale(self.project(hidden).view(*hidden.shape[:2], 3, -1), positions)
        near = (distance >= 0) & (distance < self.profiles.shape[1])
        mixed = torch.einsum("bqhd,dr->bhqr", states, self.profiles)
        return mixed.gather(3, distance.clamp(0, self.profiles.shape[1] - 1).expand(*mixed.shape[:2], -1, -1)) * near


class Late(Making):
    """A part whose positions count from one."""

    def forward(self, hidden: Tensor, distance: Tensor, positions: Tensor) -> Tensor:
        return super().forward(hidden, distance, positions) + positions[0, 0]


class Attention(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


@pytest.mark.parametrize("reach", [1, 3, 12, 700])
def test_a_part_that_spreads_mixed_profiles_is_recognised_and_stays_by_distance(reach: int) -> None:
    part = Spread(reach=reach)
    forward = distance_bias_forward(part)
    assert forward is not None and reach_of(Attention(part)) == reach
    part.profiles.data.normal_()
    states, positions = torch.randn(2, 30, 3, 4), torch.arange(30)
    found = forward(states, positions, positions)
    assert found.shape == (2, 3, 30, reach)
    spread = part(states, positions, positions)
    for query in range(30):
        for key in range(query + 1):
            near = found[:, :, query, query - key] if query - key < reach else torch.zeros(2, 3)
            torch.testing.assert_close(spread[:, :, query, key], near)


@pytest.mark.parametrize("reach", [1, 12, 700])
def test_a_part_that_makes_its_states_is_recognised_and_stays_by_distance(reach: int) -> None:
    part = Making(reach=reach)
    forward = distance_bias_forward(part)
    assert forward is not None and reach_of(Attention(part)) == reach
    for parameter in part.parameters():
        parameter.data.normal_()
    hidden, positions = torch.randn(2, 30, 10), torch.arange(30).expand(2, -1) + torch.tensor([[0], [7]])
    found = forward(hidden, torch.zeros(0, 0), positions)
    assert found.shape == (2, 3, 30, reach)
    spread = part(hidden, torch.arange(30)[:, None] - torch.arange(30), positions)
    near = spread.new_zeros(spread.shape)
    for query in range(30):
        for key in range(max(0, query - reach + 1), query + 1):
            near[:, :, query, key] = found[:, :, query, query - key]
    torch.testing.assert_close(spread, near)


OTHERS = [Ahead(), Endless(), Scaled(), Late(), nn.Linear(4, 12, bias=False), nn.Bilinear(2, 3, 4)]


@pytest.mark.parametrize("part", OTHERS, ids=lambda part: type(part).__name__)
def test_other_parts_are_not_recognised(part: nn.Module) -> None:
    assert distance_bias_forward(part) is None and reach_of(Attention(part)) is None


def distances(inputs_embeds: Tensor, cache: object, is_sliding: bool) -> Tensor:
    rows = torch.arange(inputs_embeds.shape[1])
    return rows[:, None] - rows


def reversed_distances(inputs_embeds: Tensor, cache: object, is_sliding: bool) -> Tensor:
    return -distances(inputs_embeds, cache, is_sliding)


class Model(nn.Module):
    """A model that gives its parts the distances between all rows."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.attention = Attention(part)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        distance = distances(hidden, None, is_sliding=False)
        return distance, self.attention.part(hidden, distance, torch.arange(hidden.shape[1])[None])


class Backwards(Model):
    def forward(self, hidden: Tensor) -> Tensor:
        return reversed_distances(hidden, None, is_sliding=False)


def test_distances_that_no_part_reads_are_not_computed(monkeypatch) -> None:
    model, hidden = Model(Making()), torch.randn(1, 30, 10)
    forward = without_distances(model)
    monkeypatch.setattr(model.attention.part, "forward", distance_bias_forward(model.attention.part))
    distance, bias = forward(hidden)
    assert distance.numel() == 0 and bias.shape == (1, 3, 30, 12) and model(hidden)[0].shape == (30, 30)
    assert without_distances(Model(Late())) is None and without_distances(Backwards(Making())) is None


def test_an_attention_whose_bias_is_not_recognised_is_refused_by_name(make_model, monkeypatch) -> None:
    model = make_model("inkling")
    kind = type(model.model.layers[0].self_attn.rel_logits_proj)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, states, queries, keys: own(self, states, queries, keys) * 2)
    with pytest.raises(ValueError, match="InklingAttention asks its attention for position_bias: not supported"):
        Engine(model, EngineConfig(kv_cache="16 blocks"))


def test_tokens_of_padding_behind_the_vocabulary_are_never_drawn(make_model) -> None:
    model = make_model("inkling", unpadded_vocab_size=200)
    with torch.no_grad():
        model.lm_head.weight[200:] *= 100  # else they would be the most likely ones
    engine = Engine(model, EngineConfig(kv_cache="16 blocks"))
    [sample] = engine.generate([[3, 17, 90]], SamplingParams(max_new_tokens=60, temperature=1.5, sampling_seed=1))
    assert engine.model.vocab_size == 200 and max(sample.token_ids) < 200
    with pytest.raises(ValueError, match="integers from 0 to 199"):
        engine.generate([[3, 200]], SamplingParams(max_new_tokens=1))
