"""Prompts that are scored while the module changes: all of their log-probabilities are of the weights that draw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

PROMPT = [5 + i % 90 for i in range(60)]
SCORED = RequestOptions(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(7,))
PARAMS = SamplingParams(max_new_tokens=4, sampling_seed=3)


def engine_of(model: torch.nn.Module) -> Engine:
    return Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=16))


def scored(engine: Engine, change: Callable[[], object]) -> Completion:
    """Return the answer to a prompt of which a part has run when the module changes."""
    engine.add(PROMPT, PARAMS, options=SCORED)
    with engine.model.rollout_phase():
        assert engine.step() == [] and engine.live_sequences()
    change()
    answers: list[Completion] = []
    with engine.model.rollout_phase():
        while not answers:
            answers = engine.step()
    return answers[0]


def assert_equal(found: Completion, expected: Completion) -> None:
    for name in ("token_ids", "logprobs", "prompt_logprobs", "prompt_top_logprobs", "prompt_listed_logprobs"):
        assert getattr(found, name) == getattr(expected, name), name


def write(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def test_weights_written_without_a_commit_score_all_of_the_prompt(make_model):
    model, other = make_model("qwen2"), make_model("qwen2")
    write(other)
    assert_equal(scored(engine_of(model), lambda: write(model)), scored(engine_of(other), lambda: None))


@pytest.mark.parametrize("is_on_first", [True, False])
def test_adapters_that_are_switched_score_all_of_the_prompt(make_model, is_on_first):
    def adapted() -> torch.nn.Module:
        torch.manual_seed(0)
        return get_peft_model(make_model("qwen3"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    def answer(model: torch.nn.Module, first: bool, then: bool) -> Completion:
        engine = engine_of(model)
        engine.add(PROMPT, PARAMS, options=SCORED)
        with nullcontext() if first else model.disable_adapter():
            assert engine.step() == []
        answers: list[Completion] = []
        with nullcontext() if then else model.disable_adapter():
            while not answers:
                answers = engine.step()
        return answers[0]

    switched = answer(adapted(), is_on_first, not is_on_first)
    assert_equal(switched, answer(adapted(), not is_on_first, not is_on_first))
