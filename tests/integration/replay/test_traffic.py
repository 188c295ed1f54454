"""Samples of random traffic are all proven by one replay, and whatever was changed in a receipt is found and named."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.integration.replay.present import PresentWeights
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import sealed
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.speculation.lengths import WholeDrafts

ASKED = RequestOptions(return_receipt=True)
VOCAB = 256
SETTINGS = (
    {}, {}, {"temperature": 0}, {"top_k": 12}, {"top_p": 0.8, "temperature": 1.4}, {"min_p": 0.05},
    {"frequency_penalty": 0.7}, {"logit_bias": {9: 3.0}}, {"stop_token_ids": [7, 60, 90, 200], "min_new_tokens": 2},
)  # fmt: skip


def prompts() -> list[list[int]]:
    """Make prompts of which many share their first blocks."""
    draw = random.Random(3)
    stems = [[draw.randrange(VOCAB) for _ in range(num)] for num in (0, 16, 33, 70)]
    return [[*draw.choice(stems), *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 20)))] for _ in range(48)]


def traffic(engine: Engine, num_samples: int, seed: int) -> list[dict]:
    """Run requests that come and go between steps, with pauses and flushes; returns the receipts of so many samples.

    The pool is small, so that sequences are preempted, and prompts are read in chunks and hit cached prefixes.
    """
    engine.parts.speculation.lengths = WholeDrafts()  # whatever a step costs here
    draw, pool, receipts = random.Random(seed), prompts(), []
    num_asked = 0
    while len(receipts) < num_samples:
        while num_asked - len(receipts) < 24 and draw.random() < 0.7:
            params = SamplingParams(max_new_tokens=draw.randint(2, 40), n=draw.choice([1, 1, 2, 4]),
                                    **draw.choice(SETTINGS))  # fmt: skip
            engine.add(draw.choice(pool), params, options=ASKED)
            num_asked += params.n
        if draw.random() < 0.03:
            engine.pause_generation(draw.choice(["retract", "in_place"]))
            engine.continue_generation()
        if draw.random() < 0.01:
            engine.flush_cache(retracts=True)
        receipts += [completion.receipt for completion in engine.step()]
    return receipts


CONFIG = {
    "kv_cache": "26 blocks",
    "admission_ratio": 0.0,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "chunked_prefill_size": 24,
    "k_blocks": 2,
}


def service_of(module: PreTrainedModel, **config: object) -> RolloutService:
    service = RolloutService(Engine(module, EngineConfig(**{**CONFIG, **config})))
    service.commit_in_place("1", source=module.named_parameters())
    return service


@pytest.fixture
def module(make_model, restore_threads) -> PreTrainedModel:
    torch.set_num_threads(1)
    return make_model("qwen3").train()


@pytest.mark.parametrize(
    ("num_alone", "num_of_two"),
    [pytest.param(300, 60, marks=pytest.mark.slow), pytest.param(7000, 3000, marks=pytest.mark.exhaustive)],
)
def test_every_sample_of_random_traffic_is_proven_by_one_replay(module, run_world, num_alone, num_of_two):
    digest = service_of(module).engine.weight_digest

    def rank(rank: int) -> object:
        engine = Engine(module, EngineConfig(tp=2, **CONFIG))
        if rank == 1:
            engine.follow()
            found = None
        else:
            engine.weights.commit_weights("1", digest)
            with engine.model.rollout_phase():
                found = traffic(engine, num_of_two, 2)
                engine.dismiss()
        engine.close()
        return found

    of_two, _ = run_world(2, rank, timeout_s=900.0)
    receipts = list(of_two)
    for seed, config in enumerate(
        ({}, {"overlap": True}, {"policy": "lrs", "block_size": 32, "kv_cache": "13 blocks"})
    ):
        service = service_of(module, **config)
        with service.rollout():
            receipts += traffic(service.engine, -(-num_alone // 3), seed + 5)
        metrics = service.engine.metrics
        assert metrics.num_retractions and metrics.num_cached_tokens and metrics.num_accepted_tokens
    random.Random(1).shuffle(receipts)
    report = service_of(module).replay(receipts)
    assert len(receipts) >= num_alone + num_of_two
    assert report.num("equal") == len(receipts) and not report.chain, list(report.lines())


def with_item(values: list[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


def changed_receipts(receipts: list[dict], num: int, other_digest: str) -> list[tuple[str, int, dict]]:
    """Return receipts in which one thing was changed, with its kind and position; the hash is made anew."""
    draw, found = random.Random(9), []
    for index in range(num):
        receipt = copy.deepcopy(draw.choice(receipts))
        kind, position = ("bit", "token", "seed", "version")[index % 4], draw.randrange(128)
        if kind == "bit":
            bits = receipt["logprobs"][position] ^ 1 << draw.randrange(32)
            receipt["logprobs"] = with_item(receipt["logprobs"], position, bits)
        elif kind == "token":
            other = (receipt["output"][position] + draw.randrange(1, VOCAB)) % VOCAB
            receipt["output"] = with_item(receipt["output"], position, other)
        elif kind == "seed":
            receipt["seed"] ^= 1 << draw.randrange(63)
        else:
            receipt["spans"][0] |= {"digest": other_digest, "version": "2"}
        found.append((kind, position, sealed(receipt)))
    return found


class TwoVersions(PresentWeights):
    """The weights of two versions, each of which is written into the module when it is wanted."""

    def __init__(self, service: RolloutService, states: dict[str, dict[str, torch.Tensor]]) -> None:
        super().__init__(service)
        self._service, self._states = service, states

    def has(self, digest: str) -> bool:
        return digest in self._states

    def switch(self, digest: str) -> None:
        module = self._service.engine.model.module
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self._states[digest][name])
        self._service.commit_in_place(digest[:6], source=module.named_parameters())


@pytest.mark.parametrize(
    "num", [pytest.param(40, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.exhaustive)]
)
def test_every_change_of_a_receipt_and_every_ulp_of_a_weight_is_found_and_named(module, num):
    service, states = service_of(module, kv_cache="128 blocks"), {}
    params = SamplingParams(max_new_tokens=128, n=2)

    def keep() -> str:
        digest = str(service.engine.weight_digest)
        states[digest] = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        return digest

    first = keep()
    receipts = [c.receipt for c in service.engine.generate(prompts()[:8], params, options=ASKED)]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    service.commit_in_place("2", source=module.named_parameters())
    changes = changed_receipts(receipts, num * 4 // 5, keep())
    report = service.replay([receipt for _, _, receipt in changes], weights=TwoVersions(service, states))
    for (kind, position, _), verdict in zip(changes, report.verdicts, strict=True):
        assert verdict.status == "differs", (kind, position, verdict)
        if kind in ("bit", "token"):
            assert (verdict.what, verdict.position) == ({"bit": "logprob"}.get(kind, kind), position)
        else:
            assert verdict.what in ("token", "logprob") and verdict.claimed != verdict.found
    TwoVersions(service, states).switch(first)
    assert service.replay(receipts).num("equal") == len(receipts)
    draw, parameters = random.Random(4), list(module.parameters())
    for _ in range(num - num * 4 // 5):
        weights = draw.choice(parameters).detach().view(-1)
        place, toward = draw.randrange(len(weights)), torch.tensor(draw.choice([-9.0, 9.0]))
        before = weights[place].clone()
        weights[place] = torch.nextafter(before, toward)
        service.commit_in_place("ulp", source=module.named_parameters())
        [verdict] = service.replay([draw.choice(receipts)]).verdicts
        assert verdict.status == "unproven" and f"no weights of digest {first}" in verdict.what
        weights[place] = before
