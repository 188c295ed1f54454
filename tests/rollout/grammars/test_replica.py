"""Grammars on engines of several ranks: masks are applied on the sampling rank, jumps on every rank."""

from __future__ import annotations

import pytest
import torch
import transformers

from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "città": {"enum": ["Paris", "Parma", "Rome"]},
        "value": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
    },
    "required": ["name", "città", "value"],
}
SETTINGS = {"k_blocks": 2, "kv_cache": 64, "chunked_prefill_size": 16, "rank_timeout_s": 60.0, "state_check_steps": 2}


def outcome(completions: list[Completion]) -> list[tuple[object, ...]]:
    return [
        (c.token_ids, c.logprobs, c.text, c.forced, c.masked_probs, c.num_jump_forward_tokens, c.finish_reason)
        for c in completions
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_constrained_outputs_of_a_replica_are_those_of_one_rank(run_world, bpe_tokenizer, shape) -> None:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(5)
    model, (tp, pp) = transformers.LlamaForCausalLM(config).eval(), shape
    prompts = ["a person: ", "the name and the value of the items in the object", "x"]
    params = [SamplingParams(json_schema=SCHEMA, jump_forward=mode, max_new_tokens=50, sampling_seed=7, n=2)
              for mode in ("text", "exact", "off")]  # fmt: skip
    alone = Engine(model, EngineConfig(**SETTINGS), tokenizer=bpe_tokenizer)
    expected = outcome(alone.generate(prompts, params))
    assert sum(c[5] for c in expected) > 30
    alone.close()

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(tp=tp, pp=pp, **SETTINGS), tokenizer=bpe_tokenizer)
        found = outcome(engine.generate(prompts if engine.is_controller else None, params))
        engine.close()
        return found

    for found in run_world(tp * pp, rank):
        assert found == expected
