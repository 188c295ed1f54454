"""Constrained generation by an engine: valid texts, true log-probabilities, the same tokens however they come about."""

from __future__ import annotations

import json

import jsonschema
import pytest
import regex
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

EOS = 0
VOCAB = 1024
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "città": {"enum": ["Paris", "Parma", "Rome"]},
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "value": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "città", "items", "value"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def make_engine(bpe_tokenizer):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config).eval()

    def make(**settings) -> Engine:
        return Engine(model, EngineConfig(**{"kv_cache": "256 blocks", **settings}), tokenizer=bpe_tokenizer)

    return make


def record(completion) -> tuple:
    return completion.token_ids, completion.logprobs, completion.forced, completion.masked_probs, completion.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_exact_jumps_change_no_bit(make_engine, temperature, overlap):
    prompts = ["a person: ", "the name and the value", "{", "x"]
    answers = {}
    for mode in ("off", "exact"):
        engine = make_engine(overlap=overlap)
        params = SamplingParams(json_schema=PERSON, jump_forward=mode, temperature=temperature, max_new_tokens=80,
                                sampling_seed=5)  # fmt: skip
        answers[mode] = engine.generate(prompts, params)
        metrics = engine.state()["metrics"]
        if mode == "off":
            assert metrics["num_jumps"] == 0 and metrics["num_forwards_saved"] == 0
        else:
            assert metrics["num_jump_forward_tokens"] > 60
            assert sum(c.num_jump_forward_tokens for c in answers[mode]) == metrics["num_jump_forward_tokens"]
        engine.close()
    for off, exact in zip(answers["off"], answers["exact"], strict=True):
        assert record(off) == record(exact)
        assert exact.num_jump_forward_tokens > 0 == off.num_jump_forward_tokens
        if exact.finish_reason.type == "stop":
            jsonschema.validate(json.loads(exact.text), PERSON)


@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_finished_outputs_follow_their_schema_and_logprobs_are_the_models(make_engine, mode):
    engine = make_engine()
    params = SamplingParams(json_schema=PERSON, jump_forward=mode, max_new_tokens=120, sampling_seed=1)
    answers = engine.generate(["a", "b", "c", "d", "e", "f"], params)
    assert any(a.finish_reason.type == "stop" for a in answers)
    for answer in answers:
        if answer.finish_reason.type == "stop":
            jsonschema.validate(json.loads(answer.text), PERSON)
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.forced) == len(answer.masked_probs)
        assert all(prob == 1.0 for prob, forced in zip(answer.masked_probs, answer.forced, strict=True) if forced)
        # The trainer's own pass over prompt and output gives these very log-probabilities.
        scored = score(engine, answer.prompt_ids + answer.token_ids)
        assert scored[len(answer.prompt_ids) :] == answer.logprobs
    engine.close()


def score(engine, token_ids) -> tuple:
    from lockstep.rollout.request import RequestOptions

    [scored] = engine.generate(
        [list(token_ids)], SamplingParams(max_new_tokens=0), options=RequestOptions(logprob_start_len=0)
    )
    return scored.prompt_logprobs


def test_regexes_and_ebnf(make_engine):
    engine = make_engine()
    patterns = ["(name|value): [0-9]{2,4}", "[a-f]+x", "(true|false)( and (true|false)){1,3}", "città [α-ω]{3}"]
    answers = engine.generate(
        ["q"] * len(patterns), [SamplingParams(regex=p, max_new_tokens=40, sampling_seed=2) for p in patterns]
    )
    for pattern, answer in zip(patterns, answers, strict=True):
        match = regex.fullmatch(pattern, answer.text, partial=True)
        assert match and (match.partial or answer.finish_reason.type == "stop"), (pattern, answer.text)
    ebnf = 'root ::= "(" (root | "a") ")" | "b"'
    for answer in engine.generate(["q"] * 4, SamplingParams(ebnf=ebnf, max_new_tokens=60)):
        assert answer.finish_reason.type == "length" or regex.fullmatch(r"\(*[ab]\)*", answer.text)
    engine.close()


def test_constrained_and_free_requests_share_steps_and_the_free_ones_do_not_change(make_engine):
    engine = make_engine()
    free = SamplingParams(max_new_tokens=30, sampling_seed=9, ignore_eos=True)
    alone = engine.generate(["the name"], free)[0]
    constrained = [SamplingParams(json_schema=PERSON), SamplingParams(regex="a+")]
    together = engine.generate(["the name", "p", "q"], [free, *constrained])
    assert record(together[0]) == record(alone) and alone.forced is None
    engine.close()


def test_wrong_grammars_are_the_callers_fault_and_disturb_nobody(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"regex: .*position 4"):
        engine.add("a", SamplingParams(regex="a(b"))
    with pytest.raises(ValueError, match="#/minimum"):
        engine.generate(["a"], {"json_schema": {"minimum": 3}})
    assert not engine.has_work
    engine.close()


def test_without_a_stop_token_the_end_of_the_grammar_ends_the_output(make_engine):
    engine = make_engine()
    for mode in ("text", "exact", "off"):
        params = SamplingParams(regex="name: (true|null)", ignore_eos=True, jump_forward=mode, max_new_tokens=50)
        [answer] = engine.generate(["q"], params)
        assert answer.text in ("name: true", "name: null") and EOS not in answer.token_ids
        assert answer.finish_reason.type == "stop"
    engine.close()
