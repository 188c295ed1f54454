"""The terms of the loss beside the reward: the KL to a reference, as a loss or as an advantage, and the entropy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

RANKS = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield


class Student:
    """A trainer, maybe with another model as its reference."""

    def __init__(self, make_model, teacher=None, **settings) -> None:
        self.model = make_model("qwen3")
        self.engine = Engine(self.model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        self.service = RolloutService(self.engine)
        train = TrainSettings(num_warmup_steps=0, **settings)
        self.backend = DdpBackend(train, RANKS)
        self.trainer = GrpoTrainer(
            self.engine.model, self.backend, train, 1.0, RANKS, announce_step=self.service.optimizer_step,
            reference=teacher,
        )  # fmt: skip

    def samples(self, step: int, advantage: float = 0.0) -> list[Sample]:
        params = SamplingParams(n=8, max_new_tokens=8, sampling_seed=step, ignore_eos=True)
        answers = self.engine.generate([[5, 6, 7], [9, 10]], params)
        return [Sample(c.prompt_ids, c.token_ids, c.logprobs, advantage) for c in answers]

    def step(self, step: int, advantage: float = 0.0):
        stats = self.trainer.update(self.samples(step, advantage), step)
        self.service.commit_in_place(str(step), source=self.model.named_parameters())
        return stats

    def entropy(self) -> float:
        """Mean entropy of what follows the first prompt, in nats."""
        with torch.no_grad():
            logprobs = self.model(torch.tensor([[5, 6, 7]])).logits.log_softmax(-1)
        return float(-(logprobs.exp() * logprobs).sum(-1).mean())


@pytest.fixture
def teacher(make_model):
    """Another model with the same tokens, of another depth."""
    return make_model("qwen3", num_hidden_layers=1)


@pytest.mark.parametrize("kl_in", ["loss", "advantage"])
def test_a_student_without_rewards_comes_to_its_teacher(group, make_model, teacher, kl_in):
    student = Student(make_model, teacher, kl_coefficient=1.0, kl_in=kl_in, learning_rate=3e-3)
    before = [parameter.clone() for parameter in teacher.parameters()]
    found = [student.step(step) for step in range(50)]
    assert all(stats.logprob_gap == 0.0 and stats.num_without_gradient == 0 for stats in found)
    first, last = (sum(stats.kl for stats in some) / 10 for some in (found[:10], found[-10:]))
    assert last < 0.8 * first, [stats.kl for stats in found]
    assert all(torch.equal(*pair) for pair in zip(before, teacher.parameters(), strict=True))


def test_the_kl_in_the_advantage_is_the_gradient_of_reinforce(group, make_model, teacher):
    """It is A - c (log p - log p_teacher) of each token, of which none is an estimate with a gradient of its own."""
    student = Student(make_model, teacher, kl_coefficient=0.5, kl_in="advantage")
    samples = student.samples(0, advantage=0.25)
    packed = pack(samples, RANKS.device)
    with torch.no_grad(), student.service.training_numerics():
        reference = teacher(**packed.model_inputs()).logits[0].log_softmax(-1).gather(-1, packed.targets[:, None])[:, 0]
    gradients = {}
    take = student.backend.optimizer.take_gradients
    student.backend.optimizer.take_gradients = lambda: [one.clone() for one in gradients.setdefault("ours", take())]
    student.trainer.update(samples, 0)
    plain = Student(make_model)
    logits = plain.model(**packed.model_inputs()).logits[0]
    logprobs = logits.log_softmax(-1).gather(-1, packed.targets[:, None])[:, 0]
    advantages = 0.25 - 0.5 * (packed.logprobs - reference)
    (-(advantages * logprobs).mean()).backward()
    theirs = [parameter.grad for parameter in plain.model.parameters()]
    ours = torch.cat([one.flatten() for one in gradients["ours"]])
    expected = torch.cat([one.flatten() for one in theirs])
    torch.testing.assert_close(ours / ours.norm(), expected / expected.norm(), atol=1e-4, rtol=1e-3)


def test_samples_that_count_nothing_add_no_entropy_either(group, make_model):
    student = Student(make_model, entropy_coefficient=0.1, sequence_bound=1.5)
    older = [replace(s, logprobs=tuple(p - 0.5 for p in s.logprobs), num_older=8) for s in student.samples(0, 1.0)]
    stats = student.trainer.update(older, 0)
    assert stats.ratios.num_dropped == stats.ratios.num == 128 and stats.grad_norm == 0.0


@pytest.mark.parametrize("first", [0, 1])
def test_a_gap_that_is_no_number_is_not_hidden_by_another_one(group, make_model, first):
    student = Student(make_model, microbatch_tokens=8)
    broken, odd, *rest = student.samples(0, 1.0)
    broken = replace(broken, logprobs=(math.nan, *broken.logprobs[1:]))
    odd = replace(odd, logprobs=(odd.logprobs[0] - 0.25, *odd.logprobs[1:]))
    seen = []
    student.trainer.on_gap = lambda step, gap, own: seen.append((gap, own.sample))
    stats = student.trainer.update([broken, odd, *rest] if first == 0 else [odd, *rest, broken], 0)
    assert stats.logprob_gap == math.inf and seen == [(math.inf, broken)]


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_an_entropy_bonus_spreads_what_is_drawn(group, make_model, coefficient):
    student = Student(make_model, entropy_coefficient=coefficient, learning_rate=3e-3)
    with torch.no_grad():
        student.model.lm_head.weight.mul_(8.0)  # else there is little left to gain
        student.service.commit_in_place("start", source=student.model.named_parameters())
    before = student.entropy()
    found = [student.step(step) for step in range(8)]
    assert all(stats.logprob_gap == 0.0 for stats in found)
    assert (student.entropy() > before + 0.05) == bool(coefficient)
