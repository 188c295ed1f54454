"""The numerics of a trainer that shards its model."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lockstep.rollout.errors import PhaseError
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.trainer_numerics import TrainerNumerics
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.world import run_world

CPU = torch.device("cpu")
IDS = torch.arange(5, 45)[None]


def logits_of(module, numerics, ids=IDS):
    with numerics.training_numerics(), torch.no_grad():
        return module(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_5", "mamba2"])
def test_a_module_that_gets_its_weights_later_computes_the_engines_bits(family):
    module = random_model(family)
    expected = logits_of(module, HostedModel.adopt(module, dtype=None, device=None, invariant=True))
    with torch.device("meta"):
        empty = type(module)(module.config).eval()
    numerics = TrainerNumerics(empty, device=CPU)
    empty.to_empty(device=CPU)
    empty.load_state_dict(module.state_dict())
    for mine, theirs in zip(empty.buffers(), module.buffers(), strict=True):
        mine.copy_(theirs)
    assert torch.equal(logits_of(empty, numerics), expected)
    assert not torch.equal(empty(input_ids=IDS, use_cache=False).logits, expected)  # its own are others


def sharded_rank(rank: int) -> list[bool]:
    """Shard a module with float32 weights, which the second rank gets from the first, and compare its bits with those
    of a bfloat16 engine."""
    module = random_model("qwen3")
    engine = copy.deepcopy(module)
    for parameter in engine.parameters():  # buffers stay in float32, as from_pretrained leaves them
        parameter.data = parameter.data.bfloat16()
    expected = logits_of(engine, HostedModel.adopt(engine, dtype=None, device=None, invariant=True))
    weights = module.state_dict() if rank == 0 else {}
    with torch.device("meta"):
        module = type(module)(module.config).eval()
    numerics = TrainerNumerics(module, device=CPU, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    module.to_empty(device=CPU)
    set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for mine, theirs in zip(module.buffers(), random_model("qwen3").buffers(), strict=True):
        mine.copy_(theirs)
    is_equal = torch.equal(logits_of(module, numerics), expected)
    with numerics.training_numerics():
        module(input_ids=IDS, use_cache=False).logits.float().sum().backward()
    return [
        is_equal,
        "torch.bfloat16 on cpu" in numerics.describe(),
        all(p.grad is not None for p in module.parameters()),
    ]


def test_sharded_float32_weights_that_compute_in_bfloat16_have_the_bits_of_a_bfloat16_engine():
    assert run_world(2, sharded_rank) == [[True] * 3] * 2


def test_what_engines_refuse_is_refused_here_too():
    with pytest.raises(ValueError, match="not Linear"):
        TrainerNumerics(torch.nn.Linear(2, 2), device=CPU)
    module = random_model("qwen3", attention_dropout=0.5)
    numerics = TrainerNumerics(module, device=CPU)
    module.train()
    with pytest.raises(ValueError, match="dropout"), numerics.training_numerics():
        pass


def test_two_numerics_cannot_be_on_a_module_at_once():
    module = random_model("qwen3")
    mine, other = TrainerNumerics(module, device=CPU), TrainerNumerics(module, device=CPU)
    refused = pytest.raises(PhaseError, match="in use by another engine")
    with mine.training_numerics(), mine.training_numerics(), refused, other.training_numerics():  # re-entrant
        pass
    with other.training_numerics():
        pass
