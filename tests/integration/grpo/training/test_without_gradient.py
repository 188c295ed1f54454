"""Samples without a gradient have no backward pass, and leave everything else as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.surrogates import SURROGATES
from lockstep.integration.grpo.training.trainer import GrpoTrainer, TrainStats
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

RANKS = Ranks(0, 1, torch.device("cpu"))
SETTINGS = TrainSettings(learning_rate=1e-3, num_warmup_steps=0, microbatch_tokens=1)  # one sample each
NUM_FLAT = 4  # of eight


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield


class CountingBackend(DdpBackend):
    """A backend that counts its passes."""

    num_forwards = num_backwards = 0

    def forward(self, **inputs: object) -> Tensor:
        self.num_forwards += 1
        return super().forward(**inputs)

    def backward(self, loss: Tensor) -> None:
        self.num_backwards += 1
        super().backward(loss)


class Run:
    """A trainer of a small model. The second of its three groups has equal rewards, and a sample of the third too."""

    def __init__(self, model, settings: TrainSettings) -> None:
        self.model = model
        engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        self.service, self.backend = RolloutService(engine), CountingBackend(settings, RANKS)
        self.trainer = GrpoTrainer(
            engine.model, self.backend, settings, 1.0, RANKS, max_new_tokens=9,
            announce_step=self.service.optimizer_step,
        )  # fmt: skip

    def samples(self) -> list[Sample]:
        params = [SamplingParams(n=n, max_new_tokens=9, sampling_seed=n, ignore_eos=True) for n in (2, 3, 3)]
        completions = self.service.engine.generate([[5, 6, 7] * 4, [9, 10], [11, 3, 8]], params)
        advantages = (1.0, -1.0, 0.0, 0.0, 0.0, 0.5, 0.0, -0.5)
        return [Sample(c.prompt_ids, c.token_ids, c.logprobs, a) for c, a in zip(completions, advantages, strict=True)]

    def update(self, samples: list[Sample], step: int = 0) -> TrainStats:
        self.backend.num_forwards = self.backend.num_backwards = 0
        stats = self.trainer.update(samples, step)
        self.service.commit_in_place(str(step), source=self.model.named_parameters())
        return stats

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def all_backward(monkeypatch):
    """Return a function that gives every sample a backward pass, of zeros where it has no gradient."""
    return lambda: monkeypatch.setattr(Sample, "has_gradient", lambda self, always: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", SURROGATES)
def test_the_update_has_the_bits_of_one_with_backward_passes_of_zeros(group, make_model, all_backward, loss, dtype):
    settings = replace(SETTINGS, loss=loss, scale_rewards="none")
    run = Run(make_model("qwen3", dtype), settings)
    samples = run.samples()
    stats = run.update(samples)
    assert (run.backend.num_forwards, run.backend.num_backwards) == (8, 8 - NUM_FLAT)
    assert (stats.num_without_gradient, stats.num_unmeasured) == (NUM_FLAT, 0)
    all_backward()
    other = Run(make_model("qwen3", dtype), settings)
    expected = other.update(samples)
    assert other.backend.num_backwards == 8
    assert stats == replace(expected, num_without_gradient=NUM_FLAT) and stats.logprob_gap == 0.0
    assert all(map(torch.equal, run.weights(), other.weights()))


def test_the_rows_of_a_group_of_their_own_leave_the_bits_of_the_others(group, make_model, all_backward):
    settings = replace(SETTINGS, microbatch_tokens=40)  # the first two samples have 40 rows, the next three 30
    run = Run(make_model("qwen3"), settings)
    samples = run.samples()[:5]
    run.update(samples)
    assert run.backend.num_forwards == 2 and run.backend.num_backwards == 1
    all_backward()
    other = Run(make_model("qwen3"), settings)
    other.update(samples)
    assert other.backend.num_backwards == 2
    assert all(map(torch.equal, run.weights(), other.weights()))


def test_mixed_micro_batches_differ_by_rounding_alone(group, make_model, all_backward):
    settings = replace(SETTINGS, microbatch_tokens=10_000, learning_rate=1e-4)
    run = Run(make_model("qwen3"), settings)
    samples = run.samples()
    stats = run.update(samples)
    all_backward()
    other = Run(make_model("qwen3"), settings)
    assert stats.grad_norm == pytest.approx(other.update(samples).grad_norm, rel=1e-4)
    for one, another in zip(run.weights(), other.weights(), strict=True):
        torch.testing.assert_close(one, another, atol=2e-4, rtol=1e-3)


def test_their_gap_is_measured_unless_their_forward_is_left_out(group, make_model):
    run, without = (Run(make_model("qwen3"), replace(SETTINGS, skip_forward=skips)) for skips in (False, True))
    samples = run.samples()
    samples[3] = replace(samples[3], logprobs=(samples[3].logprobs[0] - 0.5, *samples[3].logprobs[1:]))
    assert run.update(samples).logprob_gap == pytest.approx(0.5, abs=1e-5)
    stats = without.update(samples)
    assert stats.logprob_gap == 0.0
    assert (stats.num_without_gradient, stats.num_unmeasured) == (NUM_FLAT, NUM_FLAT)
    assert without.backend.num_forwards == without.backend.num_backwards == 8 - NUM_FLAT
    assert all(map(torch.equal, run.weights(), without.weights())), "they count in the divisor in either case"


def test_samples_that_do_not_count_have_no_backward_pass_and_a_kl_gives_the_others_one(group, make_model):
    run = Run(make_model("qwen3"), replace(SETTINGS, kl_coefficient=0.1))
    samples = run.samples()
    samples[0] = replace(samples[0], counts=False)
    stats = run.update(samples)
    assert stats.num_without_gradient == 1 and run.backend.num_backwards == 7


def test_later_passes_over_a_step_leave_them_out(group, make_model):
    run = Run(make_model("qwen3"), replace(SETTINGS, epochs_per_step=3))
    run.update(run.samples())
    assert (run.backend.num_forwards, run.backend.num_backwards) == (8 + 4 + 4, 12)


@pytest.mark.parametrize("skips", [False, True])
def test_a_step_without_any_gradient_moves_the_weights_by_the_moments_as_zeros_do(
    group, make_model, all_backward, skips
):
    def steps(run: Run) -> list[Tensor]:
        run.update(run.samples())
        before = run.weights()
        last = run.update([replace(sample, advantage=0.0) for sample in run.samples()], 1)
        assert last.grad_norm == last.loss == last.logprob_gap == 0.0
        assert not any(map(torch.equal, run.weights(), before))
        return run.weights()

    run = Run(make_model("qwen3"), replace(SETTINGS, skip_forward=skips))
    weights = steps(run)
    assert (run.backend.num_forwards, run.backend.num_backwards) == (1 if skips else 8, 1)
    all_backward()
    assert all(map(torch.equal, weights, steps(Run(make_model("qwen3"), SETTINGS))))


@pytest.mark.parametrize(
    ("sizes", "num_backwards"),
    [({"gradient_accumulation_steps": 3}, 3), ({"microbatch_bytes": "1B"}, 4), ({"microbatch_bytes": "1GiB"}, 1)],
)
def test_each_size_of_micro_batches_trains_alike(group, make_model, sizes, num_backwards):
    reference = Run(make_model("qwen3"), replace(SETTINGS, learning_rate=1e-4))
    samples = reference.samples()
    expected = reference.update(samples)
    run = Run(make_model("qwen3"), replace(reference.backend.settings, microbatch_tokens=0, **sizes))
    stats = run.update(samples)
    assert run.backend.num_backwards == num_backwards
    assert stats.logprob_gap == 0.0 and stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    for one, another in zip(run.weights(), reference.weights(), strict=True):
        torch.testing.assert_close(one, another, atol=2e-4, rtol=1e-3)
