"""Steps of AdamW on an adapter: kept where the weights stay finite, otherwise undone."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.tinker.training.adapter import AdamParams, TrainedAdapter
from lockstep.integration.tinker.training.data import BadInput
from lockstep.integration.tinker.training.targets import AdapterSpec

NAMES = ("a.lora_A.weight", "a.lora_B.weight")


def adapter() -> TrainedAdapter:
    values = {name: torch.arange(1.0, 5.0).reshape(2, 2) for name in NAMES}
    return TrainedAdapter(AdapterSpec(2), values, torch.float32, torch.device("cpu"))


def add(one: TrainedAdapter, names: tuple[str, ...] = NAMES) -> None:
    one.add_gradients({name: torch.ones(2, 2) for name in names})


def bits(one: TrainedAdapter) -> list[dict[str, list]]:
    return [{name: own.tolist() for name, own in part.items()} for part in one.state()]


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("params", [{"learning_rate": 1e38, "weight_decay": 10.0}, {"learning_rate": 3e39}])
def test_a_step_whose_weights_are_not_finite_is_refused_and_undone(num_before, params):
    one, other = adapter(), adapter()
    for both in (one, other):
        for _ in range(num_before):
            add(both)
            both.step(AdamParams())
    before = bits(one)
    add(one)
    with pytest.raises(BadInput, match=r"the new weights are not finite \(learning_rate is"):
        one.step(AdamParams(**params))
    assert bits(one) == before and not one.has_gradients and one.num_steps == num_before
    for both in (one, other):
        add(both)
        both.step(AdamParams())
    assert bits(one) == bits(other), "as if the refused step had not been"


def test_a_refused_step_leaves_weights_that_had_no_moments_without_them():
    one = adapter()
    add(one, names=NAMES[:1])
    one.step(AdamParams())
    before = bits(one)
    add(one)
    with pytest.raises(BadInput, match="the new weights are not finite"):
        one.step(AdamParams(learning_rate=3e39))
    assert bits(one) == before and not any(NAMES[1] in name for name in before[1])


def test_eps_is_above_0():
    with pytest.raises(BadInput, match="eps must be above 0"):
        AdamParams(eps=0.0)
