"""The gap is a real measurement: 0.0 when trainer and engine are equal, and more when one bit differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lockstep.integration.grpo.backends.backend import TrainerState
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.backends.lora import add_adapters
from lockstep.integration.grpo.settings.training import LoraSettings, TrainSettings
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

RANKS = Ranks(0, 1, torch.device("cpu"))
TEMPERATURE = 0.8


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield
    assert not dist.is_initialized()


def make_trainer(model, settings=None, temperature=TEMPERATURE, *, invariant=True):
    settings = settings or TrainSettings(num_warmup_steps=0)
    engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8, invariant=invariant))
    service, backend = RolloutService(engine), DdpBackend(settings, RANKS)
    return service, GrpoTrainer(
        engine.model, backend, settings, temperature, RANKS, announce_step=service.optimizer_step
    )


def sample(service):
    params = SamplingParams(n=3, max_new_tokens=9, temperature=TEMPERATURE, sampling_seed=3, ignore_eos=True)
    completions = service.engine.generate([[5, 6, 7] * 7, [9, 10]], params)
    return [Sample(c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** i) for i, c in enumerate(completions)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("microbatch_tokens", [20, 10_000])
def test_the_gap_is_zero_to_the_bit(group, make_model, dtype, microbatch_tokens):
    model = make_model("qwen3", dtype)
    settings = TrainSettings(num_warmup_steps=0, microbatch_tokens=microbatch_tokens, kl_coefficient=0.1)
    service, trainer = make_trainer(model, settings)
    for step in range(2):
        before = service.model_digest()
        stats = trainer.update(sample(service), step)
        assert stats.logprob_gap == 0.0
        assert stats.grad_norm > 0.0 and service.model_digest() != before
        assert (stats.kl > 0.0) == (step > 0)  # the first step is the reference itself
        service.commit_in_place(str(step), source=model.named_parameters())


def test_adapters_are_trained_with_a_gap_of_zero_and_their_base_is_the_reference(group, make_model):
    model = make_model("qwen3")
    add_adapters(model, LoraSettings(rank=4), 0)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    settings = TrainSettings(num_warmup_steps=0, kl_coefficient=0.1, learning_rate=1e-2)
    service, trainer = make_trainer(model, settings)
    for step in range(2):
        before = service.model_digest()
        stats = trainer.update(sample(service), step)
        assert stats.logprob_gap == 0.0 and service.model_digest() != before
        assert (stats.kl > 0.0) == (step > 0)  # the first values of adapters change nothing
        assert service.commit_in_place(str(step), source=model.named_parameters()).bytes_copied == 0
    assert trainer._maker._reference is not None and trainer._maker._reference.model is service.engine.model
    assert all(torch.equal(base[name], p) for name, p in model.named_parameters() if name in base)
    state = TrainerState(dict(trainer.backend.state().model), dict(trainer.backend.state().optimizer))
    assert state.model and all("lora_" in name for name in [*state.model, *state.optimizer])
    trained = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).zero_()
    trainer.backend.load_state(TrainerState({n: trained[n] for n in state.model}, state.optimizer))
    assert all(torch.equal(trained[name], p) for name, p in model.named_parameters())


def test_one_ulp_in_one_weight_opens_the_gap(group, make_model):
    model = make_model("qwen3")
    service, trainer = make_trainer(model)
    samples = sample(service)
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(torch.inf))
    assert 0.0 < trainer.update(samples, 0).logprob_gap < 1e-3


def test_another_temperature_opens_the_gap(group, make_model):
    service, trainer = make_trainer(make_model("qwen3"), temperature=TEMPERATURE + 1e-6)
    assert trainer.update(sample(service), 0).logprob_gap > 0.0


def test_without_the_invariant_mode_the_gap_is_not_promised_but_measured(group, make_model):
    service, trainer = make_trainer(make_model("qwen3"), invariant=False)
    assert trainer.update(sample(service), 0).logprob_gap < 1e-4


def test_microbatches_do_not_change_the_update(group, make_model):
    digests = set()
    updated = []
    for rows in (20, 10_000):
        model = make_model("qwen3")
        service, trainer = make_trainer(model, TrainSettings(num_warmup_steps=0, microbatch_tokens=rows))
        digests.add(service.model_digest())
        trainer.update(sample(service), 0)
        updated.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert len(digests) == 1
    torch.testing.assert_close(updated[0], updated[1], atol=2e-4, rtol=1e-3)


def test_an_advantage_pushes_its_tokens_up(group, make_model):
    model = make_model("qwen3")
    service, trainer = make_trainer(model, TrainSettings(num_warmup_steps=0, learning_rate=1e-3))
    samples = sample(service)
    best = samples[0]

    def logprob() -> float:
        ids = torch.tensor([best.prompt_ids + best.token_ids])
        with torch.no_grad(), service.training_numerics():
            logprobs = (model(ids, use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[len(best.prompt_ids) - 1 :].sum().item()

    before = logprob()
    trainer.update([Sample(s.prompt_ids, s.token_ids, s.logprobs, float(s is best)) for s in samples], 0)
    assert logprob() > before


def test_tokens_of_older_weights_do_not_count_in_the_gap(group, make_model):
    service, trainer = make_trainer(make_model("qwen3"))
    others = [replace(s, logprobs=(*(p - 0.5 for p in s.logprobs[:4]), *s.logprobs[4:])) for s in sample(service)]
    assert trainer.update([replace(s, num_older=4) for s in others], 0).logprob_gap == 0.0
    service.commit_in_place("1", source=service.engine.model.trained_module.named_parameters())
    assert trainer.update([replace(s, num_older=0) for s in others], 1).logprob_gap > 0.4


def test_the_first_samples_are_trained_on_before_the_last_ones_are_there(group, make_model, monkeypatch):
    service, trainer = make_trainer(make_model("qwen3"), TrainSettings(num_warmup_steps=0, microbatch_tokens=40))
    samples, forwards, seen = sample(service), [], []
    forward = trainer.backend.forward
    monkeypatch.setattr(trainer.backend, "forward", lambda **given: forwards.append(1) or forward(**given))

    def come():
        for one in samples:
            seen.append(len(forwards))
            yield one

    stats = trainer.update(come(), 0)
    assert stats.logprob_gap == 0.0
    assert seen[0] == 0 and seen[-1] > 0
    assert len(forwards) > seen[-1]


def test_one_rank_trains_on_a_full_micro_batch_before_the_next_sample_is_there(group, make_model, monkeypatch):
    service, trainer = make_trainer(make_model("qwen3"), TrainSettings(num_warmup_steps=0, microbatch_tokens=1))
    samples, forwards = sample(service), []
    forward = trainer.backend.forward
    monkeypatch.setattr(trainer.backend, "forward", lambda **given: forwards.append(1) or forward(**given))

    def come():
        for number, one in enumerate(samples):
            assert len(forwards) == number
            yield one

    assert trainer.update(come(), 0).logprob_gap == 0.0
    assert len(forwards) == len(samples)
