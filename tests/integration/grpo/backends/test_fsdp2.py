"""FSDP2 on one rank shards models of many kinds, and its forward has the engine's bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lockstep.integration.grpo.backends.fsdp2 import Fsdp2Backend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import PROMPTS, random_model

RANK = Ranks(0, 1, torch.device("cpu"))
SETTINGS = TrainSettings(learning_rate=1e-3, num_warmup_steps=0)
NUM_STEPS = 2
IN_TWO_DTYPES = ("ernie4_5_moe", "bailing_hybrid", "inkling2_text")  # routers, sinks and others are in float32
NESTED = ("mamba", "zamba2")  # a class of transformers' list of units inside another one
TIED = ("bert",)  # a unit owns the embedding, which is the head too


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch.set_num_threads(1)
    with process_group(RANK, 60):
        yield


def gaps_of_steps(model_type: str, settings: TrainSettings) -> list[float]:
    """Train a tiny random model in bfloat16 for some steps. Returns the gap of each."""
    model = random_model("text", model_type, torch.bfloat16)
    engine = Engine(copy.deepcopy(model), EngineConfig(kv_cache="32 blocks", max_num_seqs=4))
    resident = dict(engine.weights.resident_tensors())
    dtypes = {name: tensor.dtype for name, tensor in resident.items()}
    assert (set(dtypes.values()) == {torch.float32, torch.bfloat16}) == (model_type in IN_TWO_DTYPES)
    backend = Fsdp2Backend(settings, RANK)
    trainer = GrpoTrainer(
        HostedModel.adopt(model, dtype=None, device=None, invariant=True), backend, settings, 1.0, RANK
    )
    gaps = []
    for step in range(NUM_STEPS):
        params = SamplingParams(n=2, max_new_tokens=8, temperature=1.0, sampling_seed=step)
        drawn = engine.generate(PROMPTS, params)
        samples = [Sample(c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** i) for i, c in enumerate(drawn)]
        before = {name: tensor.clone() for name, tensor in resident.items()}
        gaps.append(trainer.update(samples, step).logprob_gap)
        for name, tensor in backend.named_tensors():
            if name in resident:  # the others are buffers
                assert tensor.dtype == dtypes[name], name
                resident[name].data.copy_(tensor)
        changed = {dtypes[name] for name, tensor in resident.items() if not torch.equal(tensor, before[name])}
        assert changed == set(dtypes.values()), "weights of all dtypes are trained"
        engine.weights.commit_weights(str(step + 1), None)
    return gaps


@pytest.mark.parametrize("model_type", [*IN_TWO_DTYPES, *NESTED, *TIED])
def test_the_forward_of_shards_has_the_bits_of_the_engine(model_type: str) -> None:
    assert gaps_of_steps(model_type, SETTINGS) == [0.0] * NUM_STEPS


def test_shards_without_masters_leave_float32_parameters_whole() -> None:
    assert gaps_of_steps("ernie4_5_moe", replace(SETTINGS, low_precision="stochastic")) == [0.0] * NUM_STEPS
