"""Several optimizer steps on a step's samples: each has the bits of an update of its own, and the gap is of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.microbatches import minibatches
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

RANKS = Ranks(0, 1, torch.device("cpu"))
PROMPTS = [[5, 6, 7] * 7, [9, 10], [3] * 5, [8, 1, 8]]


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield


class Run:
    """A trainer on a fresh model, with samples of four groups of two."""

    def __init__(self, make_model, **settings) -> None:
        self.model = make_model("qwen3")
        engine = Engine(self.model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        service = RolloutService(engine)
        train = TrainSettings(num_warmup_steps=0, learning_rate=1e-2, **settings)
        self.num_optimizer_steps = 0
        self.backend = DdpBackend(train, RANKS)
        self.trainer = GrpoTrainer(
            engine.model, self.backend, train, 1.0, RANKS, announce_step=self._counted(service.optimizer_step)
        )
        params = [SamplingParams(n=2, max_new_tokens=6, sampling_seed=seed, ignore_eos=True) for seed in range(4)]
        answers = engine.generate(PROMPTS, params)
        self.samples = [
            Sample(c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** at, group=at // 2) for at, c in enumerate(answers)
        ]

    def _counted(self, announce):
        def counted():
            self.num_optimizer_steps += 1
            return announce()

        return counted

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def flat(samples: list[Sample]) -> list[Sample]:
    """Take every second group's advantages away."""
    return [replace(s, advantage=0.0) if s.group % 2 else s for s in samples]


def test_samples_are_divided_by_whole_groups():
    samples = [Sample((1,), (2,), (-1.0,), 1.0, group=group) for group in (0, 0, 1, 2, 2, 2, 3)]
    parts = minibatches(iter(samples), 2)
    assert [[one.group for one in part] for part in parts] == [[0, 0, 1], [2, 2, 2, 3]]
    with pytest.raises(ValueError, match="4 groups of samples do not divide into 3 mini-batches"):
        minibatches(samples, 3)
    with pytest.raises(ValueError, match="0 groups"):
        minibatches([], 2)


@pytest.mark.parametrize("loss", ["token_mean", "gspo"])
@pytest.mark.parametrize("skip_forward", [False, True])
def test_each_part_has_the_bits_of_an_update_of_its_own_with_the_ratios_of_the_weights_before(
    group, make_model, loss, skip_forward
):
    together = Run(make_model, minibatches_per_step=2, loss=loss, skip_forward=skip_forward, microbatch_tokens=20)
    stats = together.trainer.update(flat(together.samples), 0)
    apart = Run(make_model, loss=loss, skip_forward=skip_forward, microbatch_tokens=20)
    gaps = []
    for part in minibatches(flat(apart.samples), 2):
        gaps.append(apart.trainer.update(part, 0).logprob_gap)
    assert torch.equal(together.weights(), apart.weights())
    assert stats.logprob_gap == 0.0 == gaps[0] and gaps[1] > 0.0
    assert together.num_optimizer_steps == apart.num_optimizer_steps == 2
    # Four samples have no gradient; without a forward before the first step the two of the second part have no gap.
    assert (stats.num_without_gradient, stats.num_unmeasured) == ((4, 6) if skip_forward else (4, 0))


def test_epochs_go_over_all_parts_in_turn(group, make_model):
    together = Run(make_model, minibatches_per_step=4, epochs_per_step=3)
    before = together.weights()
    stats = together.trainer.update(together.samples, 0)
    assert together.num_optimizer_steps == 12 and stats.logprob_gap == 0.0
    assert stats.grad_norm > 0.0 and not torch.equal(before, together.weights())
    assert stats.clip_fraction > 0.0, "the later steps are off the policy that drew the samples"


@pytest.mark.parametrize("at", [0, 7])
def test_a_gap_in_any_part_is_reported_before_the_first_optimizer_step(group, make_model, at):
    run = Run(make_model, minibatches_per_step=2)
    odd = replace(run.samples[at], logprobs=(run.samples[at].logprobs[0] - 0.25, *run.samples[at].logprobs[1:]))
    seen = []
    run.trainer.on_gap = lambda step, gap, own: seen.append((step, gap, own.sample, run.num_optimizer_steps))
    stats = run.trainer.update([odd if s is run.samples[at] else s for s in run.samples], 3)
    assert seen == [(3, 0.25, odd, 0)] and stats.logprob_gap == 0.25


def test_ratios_of_older_tokens_are_those_of_the_weights_before_the_first_step(group, make_model):
    """Also where the forward is skipped: without it their part would be compared with weights that have moved."""
    found = []
    for skip_forward in (False, True):
        run = Run(make_model, minibatches_per_step=2, skip_forward=skip_forward)
        older = [replace(s, logprobs=tuple(p - 0.25 for p in s.logprobs), num_older=6) for s in run.samples]
        stats = run.trainer.update(older, 0)
        found.append(run.weights())
        assert stats.ratios.num == 48 and stats.ratios.total == pytest.approx(48 * torch.tensor(0.25).exp().item())
        assert stats.logprob_gap == 0.0 and stats.num_unmeasured == 0
    assert torch.equal(*found)
