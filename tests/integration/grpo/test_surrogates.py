"""The losses by name, each against a hand-computed example; masks; divisions into micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.training import CLIP_BOUNDS, TrainSettings
from lockstep.integration.grpo.training.loss import kl_k3, policy_loss
from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.grpo.training.surrogates import SURROGATES, amount
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

LENGTHS = (1, 3)
ADVANTAGES = torch.tensor([2.0, -1.0, -1.0, -1.0])
RANKS = Ranks(0, 1, torch.device("cpu"))


def num_answers(mask):
    return sum(bool(part.any()) for part in mask.split(list(LENGTHS)))


def loss_of(name, ratios, *, mask=(True,) * 4, bounds=None, kl=None):
    """Return the loss of two samples of one and three tokens, and its gradient in their log-probabilities."""
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -0.25])
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    its_mask = torch.tensor(mask)
    divisor = amount(SURROGATES[name].divisor, its_mask, num_answers(its_mask), max_new_tokens=5)
    low, high = bounds or CLIP_BOUNDS[name]
    more = {} if kl is None else {"reference_logprobs": behaviour + math.log(2), "kl_coefficient": kl}
    result = policy_loss(
        logprobs, behaviour, ADVANTAGES, its_mask, divisor, low, high, name=name, lengths=LENGTHS,
        num_counted=int(its_mask.sum()), **more,
    )  # fmt: skip
    result.loss.backward()
    return result, logprobs


def test_every_loss_has_bounds_and_is_reinforce_where_trainer_and_engine_agree():
    assert set(CLIP_BOUNDS) == set(SURROGATES)
    expected = {  # -A / divisor of each token
        "token_mean": [-2 / 4, 1 / 4, 1 / 4, 1 / 4],
        "dapo": [-2 / 4, 1 / 4, 1 / 4, 1 / 4],
        "cispo": [-2 / 4, 1 / 4, 1 / 4, 1 / 4],
        "grpo": [-2 / 2, 1 / 6, 1 / 6, 1 / 6],
        "gspo": [-2 / 2, 1 / 6, 1 / 6, 1 / 6],
        "dr_grpo": [-2 / 10, 1 / 10, 1 / 10, 1 / 10],
    }
    for name, gradient in expected.items():
        result, logprobs = loss_of(name, [1.0] * 4)
        torch.testing.assert_close(logprobs.grad, torch.tensor(gradient), msg=name)
        assert result.clip_fraction == 0.0


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        # objectives: min(2 * 1.5, 2 * 1.2) = 2.4; min(-0.5, -0.8), -1.1, -1.0
        ("token_mean", -(2.4 - 0.8 - 1.1 - 1.0) / 4),
        ("dapo", -(2.56 - 0.8 - 1.1 - 1.0) / 4),
        ("grpo", -(2.4 + (-0.8 - 1.1 - 1.0) / 3) / 2),
        ("dr_grpo", -(2.4 - 0.8 - 1.1 - 1.0) / 10),
    ],
)
def test_the_clipped_losses_are_those_computed_by_hand(name, loss):
    result, logprobs = loss_of(name, [1.5, 0.5, 1.1, 1.0])
    assert result.loss.item() == pytest.approx(loss)
    assert result.clip_fraction == pytest.approx(2 / 4), "of all tokens, whatever the loss averages"
    assert logprobs.grad[0] == 0 and logprobs.grad[1] == 0 and logprobs.grad[2] != 0


def test_gspo_clips_whole_samples_by_the_geometric_mean_of_their_ratios():
    ratios = [1.1, 0.5, 2.0, 1.0]  # of the second sample: the geometric mean is 1, whatever its tokens do
    result, logprobs = loss_of("gspo", ratios)
    assert result.loss.item() == pytest.approx(-(2 * (1 + 4e-4) - 1.0) / 2)
    assert logprobs.grad[0] == 0
    torch.testing.assert_close(logprobs.grad[1:], torch.full((3,), 1 / 6))
    free, logprobs = loss_of("gspo", ratios, bounds=(0.5, 0.5))
    assert free.loss.item() == pytest.approx(-(2 * 1.1 - 1.0) / 2) and logprobs.grad[0] == pytest.approx(-1.1)


def test_cispo_gives_every_token_a_gradient_and_bounds_its_weight():
    result, logprobs = loss_of("cispo", [8.0, 0.5, 1.1, 1.0])
    assert result.clip_fraction == 1 / 4
    torch.testing.assert_close(logprobs.grad, -torch.tensor([5.0, 0.5, 1.1, 1.0]) * ADVANTAGES / 4)


@pytest.mark.parametrize("name", SURROGATES)
def test_what_is_masked_changes_nothing(name):
    mask = (True, False, True, False)
    values = []
    for others in (1.0, 3.0, float("inf")):
        result, logprobs = loss_of(name, [1.1, others, 1.05, others], mask=mask, kl=0.1)
        values.append((result.loss.item(), result.clip_fraction, result.kl, tuple(logprobs.grad.tolist())))
        assert logprobs.grad[1] == 0 and logprobs.grad[3] == 0
    assert values[0] == values[1] == values[2]


def test_amounts_are_of_what_counts():
    mask = torch.tensor([False, True, False, True])
    found = [amount(SURROGATES[name].divisor, mask, num_answers(mask), 5) for name in ("dapo", "grpo", "dr_grpo")]
    assert found == [2, 1, 5]


@pytest.mark.parametrize("name", SURROGATES)
def test_the_kl_that_is_told_is_the_mean_over_tokens(name):
    result, _ = loss_of(name, [1.0] * 4, kl=0.1)
    assert result.kl == pytest.approx(kl_k3(torch.tensor([math.log(2)])).item())


@pytest.mark.parametrize("name", SURROGATES)
def test_an_answer_in_parts_counts_once(name):
    """An agent's conversations are samples of their own, and together they weigh as one sample of all their tokens."""
    mask = (True, False, True, True)
    whole = [Sample((1,), (2, 3, 4, 5), (-1.0,) * 4, 2.0, forced=tuple(not one for one in mask))]
    parts = [
        Sample((1,), (2, 3), (-1.0,) * 2, 2.0, forced=(False, True), answer_size=3),
        Sample((1,), (4, 5), (-1.0,) * 2, 2.0, forced=(False, False), answer_size=3, is_first=False),
    ]
    other = Sample((1,), (6,), (-1.0,), -1.0)
    gradients = []
    for samples in ([*whole, other], [*parts, other]):
        batch = pack(samples, torch.device("cpu"))
        logprobs = batch.logprobs.clone().requires_grad_()
        divisor = amount(SURROGATES[name].divisor, batch.mask, batch.num_answers, max_new_tokens=5)
        policy_loss(
            logprobs, batch.logprobs, batch.advantages, batch.mask, divisor, name=name, lengths=batch.lengths,
            sizes=batch.sizes,
        ).loss.backward()  # fmt: skip
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield
    assert not dist.is_initialized()


def updated(model, settings, change=lambda samples: samples):
    """Return the parameters after one step with six samples of several lengths."""
    engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
    service, backend = RolloutService(engine), DdpBackend(settings, RANKS)
    trainer = GrpoTrainer(
        engine.model, backend, settings, 1.0, RANKS, max_new_tokens=9, announce_step=service.optimizer_step
    )
    params = [SamplingParams(n=3, max_new_tokens=num, sampling_seed=num, ignore_eos=True) for num in (4, 9)]
    answers = engine.generate([[5, 6, 7] * 7, [9, 10]], params)
    samples = [Sample(c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** i) for i, c in enumerate(answers)]
    stats = trainer.update(change(samples), 0)
    assert stats.logprob_gap == 0.0
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", SURROGATES)
def test_micro_batches_do_not_change_the_update_of_any_loss(group, make_model, name):
    settings = TrainSettings(num_warmup_steps=0, loss=name, scale_rewards="none")
    one, several = (updated(make_model("qwen3"), replace(settings, microbatch_tokens=rows)) for rows in (10_000, 20))
    torch.testing.assert_close(one, several, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", SURROGATES)
def test_samples_that_do_not_count_are_as_if_they_were_not_there(group, make_model, name):
    settings = TrainSettings(num_warmup_steps=0, loss=name, scale_rewards="none", microbatch_tokens=30)
    without = updated(make_model("qwen3"), settings, lambda samples: samples[1:4])
    masked = updated(
        make_model("qwen3"), settings, lambda s: [replace(one, counts=1 <= i < 4) for i, one in enumerate(s)]
    )  # fmt: skip
    torch.testing.assert_close(without, masked, atol=2e-4, rtol=1e-3)


def test_a_step_in_which_nothing_counts_changes_nothing(group, make_model):
    model = make_model("qwen3")
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    after = updated(model, TrainSettings(num_warmup_steps=0), lambda s: [replace(one, counts=False) for one in s])
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "ppo"}, "loss must be"),
        ({"loss": "dr_grpo"}, 'scale_rewards must be "none" with loss'),
        ({"loss": "cispo", "clip_low": 0.2}, 'clip_low must be 0 with loss="cispo"'),
        ({"clip_high": -0.1}, "clip_high must not be negative"),
        ({"truncated": "drop"}, "truncated must be"),
        ({"truncated_penalty": -1.0}, "truncated_penalty must not be negative"),
        ({"overlong_tokens": 5}, "overlong_tokens needs truncated_penalty"),
        ({"minibatches_per_step": 0}, "minibatches_per_step must be at least 1"),
        ({"baseline": "mean"}, "baseline must be"),
        ({"baseline": "batch"}, 'scale_rewards must be "batch" or "none" with baseline="batch"'),
        ({"baseline": "none", "scale_rewards": "batch"}, 'scale_rewards must be "none" with baseline="none"'),
        ({"kl_in": "reward"}, "kl_in must be"),
    ],
)
def test_losses_that_cannot_be_are_named(settings, words):
    found = [f"{key} {why}" for key, why in TrainSettings(**settings).faults()]
    assert any(words in one for one in found), found
