"""Tests of AdamW for bfloat16 parameters: no update is lost."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lockstep.integration.grpo.backends.adamw import (
    StochasticAdamW,
    TrainerAdamW,
    learning_rate,
    make_adamw,
    rounded_stochastically,
)
from lockstep.integration.grpo.backends.backend import TrainerState
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sections import ModelSettings, RunSettings
from lockstep.integration.grpo.settings.training import LoraSettings, TrainSettings
from lockstep.integration.ranks import Ranks
from lockstep.tests.support.random_models import random_model

SETTINGS = TrainSettings(learning_rate=1e-6, weight_decay=0.01)
NUM_STEPS = 100
BETAS = (SETTINGS.beta1, SETTINGS.beta2)


def gradients(parameters: list[nn.Parameter], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(one.shape, generator=generator).to(one.dtype) for one in parameters]


def a_module() -> nn.Module:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5)).to(torch.bfloat16)
    module[1].bias.requires_grad_(False)
    return module


def test_masters_are_those_of_adamw_in_float32_and_the_weights_their_rounding():
    module = a_module()
    trained = [one for one in module.parameters() if one.requires_grad]
    reference = [one.detach().float().requires_grad_() for one in trained]
    lossy = [nn.Parameter(one.detach().clone()) for one in trained]
    storage, before = [one.data_ptr() for one in trained], [one.detach().clone() for one in trained]
    optimizer = make_adamw(module, SETTINGS)
    plain = torch.optim.AdamW(reference, lr=1e-6, betas=BETAS, weight_decay=0.01)
    without = torch.optim.AdamW(lossy, lr=1e-6, betas=BETAS, weight_decay=0.01)
    for step in range(NUM_STEPS):
        for one, widened, other, gradient in zip(trained, reference, lossy, gradients(trained, step), strict=True):
            one.grad, widened.grad, other.grad = gradient, gradient.float(), gradient.clone()
        optimizer.take_gradients()
        assert all(one.grad is None for one in trained)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        plain.step()
        without.step()
    for one, widened in zip(trained, reference, strict=True):
        master = optimizer.state_of(one)["master"]
        assert torch.equal(master, widened) and master.dtype == torch.float32
        assert torch.equal(one, widened.to(torch.bfloat16))
    assert [one.data_ptr() for one in trained] == storage, "an engine aliases it"

    def share_changed(now: list[nn.Parameter]) -> float:
        num = sum((a != b).sum().item() for a, b in zip(now, before, strict=True))
        return num / sum(one.numel() for one in now)

    assert share_changed(trained) > 2 * share_changed(lossy), "the updates are too large to show anything"


def test_parameters_in_float32_have_no_masters_and_are_updated_as_ever():
    module = a_module().float()
    trained = [one for one in module.parameters() if one.requires_grad]
    other = [nn.Parameter(one.detach().clone()) for one in trained]
    optimizer, plain = make_adamw(module, SETTINGS), torch.optim.AdamW(other, lr=1e-6, betas=BETAS, weight_decay=0.01)
    for step in range(3):
        for one, same, gradient in zip(trained, other, gradients(trained, step), strict=True):
            one.grad, same.grad = gradient, gradient.clone()
        assert all(a is b.grad for a, b in zip(optimizer.take_gradients(), trained, strict=True))
        optimizer.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(trained, other, strict=True))
    assert set(optimizer.state_of(trained[0])) == {"step", "exp_avg", "exp_avg_sq"}


def test_stochastic_rounding_is_right_in_the_mean_and_keeps_what_bfloat16_can_hold():
    values = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8, 1e-30, 0.0, torch.inf, -torch.inf, 3e38])
    draws = torch.stack([rounded_stochastically(values, seed).double() for seed in range(4000)])
    below, above = draws.amin(0), draws.amax(0)
    assert (below[:2] < values[:2].double()).all() and (above[:2] > values[:2].double()).all()
    step = (above - below)[:2]
    assert (((draws.mean(0) - values.double())[:2] / step).abs() < 0.04).all()  # 5 standard deviations
    exact = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(rounded_stochastically(exact.float(), 3), exact)
    assert draws[:, 4].eq(torch.inf).all() and draws[:, 5].eq(-torch.inf).all()
    assert rounded_stochastically(torch.tensor([torch.nan]), 1).isnan().all()
    assert torch.equal(rounded_stochastically(values, 7), rounded_stochastically(values, 7))


def test_stochastic_updates_move_weights_by_what_adamw_moves_them_in_the_mean():
    def moved(optimizer_of) -> float:
        parameter = nn.Parameter(torch.full((20_000,), 1.0).to(torch.bfloat16))
        optimizer = optimizer_of([parameter])
        for _ in range(NUM_STEPS):
            parameter.grad = torch.ones_like(parameter)
            if isinstance(optimizer, StochasticAdamW):
                optimizer.take_gradients()
            optimizer.step()
        return (parameter.detach().double() - 1).mean().item()

    settings = replace(SETTINGS, weight_decay=0.0)
    assert moved(lambda given: StochasticAdamW(given, settings)) == pytest.approx(-NUM_STEPS * 1e-6, rel=0.2)
    assert moved(lambda given: torch.optim.AdamW(given, lr=1e-6, betas=BETAS, weight_decay=0)) == 0.0, "all are lost"


def test_stochastic_runs_repeat():
    finals = []
    for _ in range(2):
        module = a_module()
        optimizer = make_adamw(module, replace(SETTINGS, low_precision="stochastic", learning_rate=1e-3))
        trained = [one for one in module.parameters() if one.requires_grad]
        for step in range(3):
            for one, gradient in zip(trained, gradients(trained, step), strict=True):
                one.grad = gradient
            optimizer.take_gradients()
            optimizer.step()
        finals.append(copy.deepcopy(trained))
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))
    moments = optimizer.state_of(trained[0])
    assert moments["exp_avg"].dtype == torch.float32 and "master" not in moments


class OneRank(DdpBackend):
    """A backend without a process group."""

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings, Ranks(0, 1, torch.device("cpu")))
        self.model = random_model("qwen3").to(torch.bfloat16)
        self._ddp, self.optimizer = self.model, self.adamw(self.model)

    def train(self, first: int, num: int) -> None:
        trained = list(self._trained().values())
        for step in range(first, first + num):
            for one, gradient in zip(trained, gradients(trained, step), strict=True):
                one.grad = gradient
            self.step()


@pytest.mark.parametrize("precision", ["masters", "stochastic"])
def test_a_state_holds_all_that_later_steps_follow_from(precision):
    settings = replace(SETTINGS, low_precision=precision)
    straight, resumed = OneRank(settings), OneRank(settings)
    straight.train(0, 3)
    state = straight.state()
    saved = TrainerState(*({name: tensor.clone() for name, tensor in part} for part in (state.model, state.optimizer)))
    assert any(name.startswith("master/") for name in saved.optimizer) == (precision == "masters")
    straight.train(3, 2)
    resumed.train(90, 1)  # its own state is forgotten
    resumed.load_state(saved)
    resumed.train(3, 2)
    for (name, one), (_, other) in zip(
        straight.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        for key, value in straight.optimizer.state_of(one).items():
            assert torch.equal(value, resumed.optimizer.state_of(other)[key]), (key, name)


def test_a_state_with_masters_and_one_without_are_not_taken_for_each_other():
    with_masters, without = OneRank(SETTINGS), OneRank(replace(SETTINGS, low_precision="stochastic"))
    for backend, other in ((with_masters, without), (without, with_masters)):
        backend.train(0, 1)
        before = {name: one.detach().clone() for name, one in other.model.named_parameters()}
        with pytest.raises(ValueError, match="of another trainer: master/"):
            other.load_state(TrainerState(dict(backend.state().model), dict(backend.state().optimizer)))
        assert all(torch.equal(one, before[name]) for name, one in other.model.named_parameters())


def config(**given: object) -> JobConfig:
    return JobConfig(RunSettings("x"), **given)  # type: ignore[arg-type]


def test_settings_that_would_lose_updates_are_refused_with_the_remedy():
    low, nearest = ModelSettings(dtype="bfloat16"), TrainSettings(low_precision="nearest")
    with pytest.raises(ValueError, match=r'train.low_precision "nearest" would lose updates.*Take "masters" or'):
        config(model=low, train=nearest)
    config(model=ModelSettings(dtype="float32"), train=nearest)
    config(model=low, train=replace(nearest, lora=LoraSettings(rank=4)))  # adapters are in float32
    with pytest.raises(ValueError, match=r'train\.low_precision must be "masters" with trainer="deepspeed"'):
        config(model=low, train=TrainSettings(low_precision="stochastic"), trainer="deepspeed")
    with pytest.raises(ValueError, match="low_precision"):
        config(train=TrainSettings(low_precision="half"))


def test_adamw_of_the_job_has_its_settings():
    optimizer = make_adamw(a_module(), replace(SETTINGS, weight_decay=0.25, beta1=0.8, beta2=0.99))
    assert isinstance(optimizer, TrainerAdamW) and not isinstance(optimizer, StochasticAdamW)
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-6, 0.25, (0.8, 0.99))
    assert group["fused"]  # on a CPU


def test_a_shard_of_a_tensor_is_updated_as_the_tensor_is():
    """Ranks that hold parts of a parameter train as one that holds it, wherever the parts begin."""
    torch.manual_seed(0)
    whole, steps = torch.randn(1003), [torch.randn(1003) * 10.0 ** torch.randint(-6, 2, (1003,)) for _ in range(3)]

    def updated(first: int, end: int) -> torch.Tensor:
        module = nn.ParameterList([nn.Parameter(whole[first:end].clone())])
        optimizer = make_adamw(module, replace(SETTINGS, learning_rate=1e-3))
        for gradient in steps:
            module[0].grad = gradient[first:end].clone()
            optimizer.take_gradients()
            optimizer.step()
        return module[0].detach()

    expected = updated(0, 1003)
    for cut in (1, 7, 16, 500):
        assert torch.equal(torch.cat([updated(0, cut), updated(cut, 1003)]), expected), cut


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_the_learning_rate_rises_and_then_follows_its_schedule_to_the_end(schedule, expected):
    settings = TrainSettings(learning_rate=2e-5, num_warmup_steps=4, schedule=schedule, final_share=0.2)
    rates = [learning_rate(settings, step, 8) / 2e-5 for step in range(9)]
    assert rates == pytest.approx(expected)
    assert learning_rate(replace(settings, num_warmup_steps=0, final_share=0.0), 8, 8) == pytest.approx(
        2e-5 if schedule == "constant" else 0.0
    )


def test_a_schedule_needs_the_end_of_the_run():
    with pytest.raises(ValueError, match='"linear" needs the number of steps'):
        learning_rate(TrainSettings(schedule="linear"), 0, 0)


@pytest.mark.parametrize("given", [{"schedule": "wsd"}, {"beta1": 1.0}, {"beta2": -0.1}, {"final_share": 1.5}])
def test_wrong_settings_of_the_optimizer_are_named(given):
    with pytest.raises(ValueError, match=f"train.{next(iter(given))} must be"):
        config(train=TrainSettings(**given))
