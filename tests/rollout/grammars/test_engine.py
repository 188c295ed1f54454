"""Constrained generation by an engine: valid texts, true log-probabilities, and the same tokens in every mode of
jumps."""

from __future__ import annotations

import gc
import json
import time

import jsonschema
import pytest
import regex
import torch
import transformers

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.grammars.matcher import MAX_TOKEN_S
from lockstep.rollout.grammars.state import GrammarState
from lockstep.rollout.loop.assemble import make_runner
from lockstep.rollout.loop.parts import MakeRunner
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.covering import covering

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
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen3ForCausalLM(config).eval()

    def make(make_runner: MakeRunner = make_runner, **settings) -> Engine:
        config = EngineConfig(**{"kv_cache": "256 blocks", **settings})
        return Engine(model, config, tokenizer=bpe_tokenizer, make_runner=make_runner)

    return make


def record(completion) -> tuple:
    return completion.token_ids, completion.logprobs, completion.forced, completion.masked_probs, completion.text


@covering(1, rest="slow", overlap=[False, True], temperature=[0.0, 1.0])
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
        # The trainer's own pass over prompt and output gives the same log-probabilities.
        scored = score(engine, answer.prompt_ids + answer.token_ids)
        assert scored[len(answer.prompt_ids) :] == answer.logprobs
    engine.close()


def score(engine, token_ids) -> tuple:
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
    with pytest.raises(ValueError, match="the empty output only"):
        engine.add("q", SamplingParams(regex="()", ignore_eos=True))
    engine.close()


def finish(engine) -> dict[str, object]:
    """Run steps until no request is left; returns answers by id, also those of requests that have ended before."""
    answers = {answer.id: answer for answer in engine.step()}
    while engine.has_work:
        answers |= {answer.id: answer for answer in engine.step()}
    return answers


@covering(2, rest="slow", overlap=[False, True], pause=["retract", "in_place"], mode=["text", "exact"])
def test_a_pause_after_any_step_changes_nothing(make_engine, mode, pause, overlap):
    params = [
        SamplingParams(json_schema=PERSON, jump_forward=mode, max_new_tokens=60, sampling_seed=seed) for seed in (3, 4)
    ]
    engine = make_engine(overlap=overlap)
    with engine.model.rollout_phase():
        for index, one in enumerate(params):
            engine.add("a person: ", one, rid=f"r{index}")
        wanted = finish(engine)
        for num_steps in range(1, 16, 2):
            for index, one in enumerate(params):
                engine.add("a person: ", one, rid=f"r{index}")
            found = {}
            for _ in range(num_steps):
                found |= {answer.id: answer for answer in engine.step()}
            engine.pause_generation(mode=pause)
            if pause == "retract":
                assert engine.flush_cache().success
            engine.continue_generation()
            found |= finish(engine)
            assert {id: record(a) for id, a in found.items()} == {id: record(a) for id, a in wanted.items()}
    engine.parts.ledger.check()
    engine.close()


@covering(1, rest="slow", num_stages=[2, 3], mode=["text", "exact"])
def test_stages_give_the_tokens_of_one_and_preempt_what_is_in_flight(make_engine, in_stages, mode, num_stages):
    settings = {"json_schema": PERSON, "jump_forward": mode, "max_new_tokens": 60}
    params = [SamplingParams(**settings, sampling_seed=seed) for seed in range(6)]
    prompts = [f"person {index} of six, with a name: " for index in range(6)]
    engine = make_engine()
    wanted = engine.generate(prompts, params)
    engine.close()
    for pool in ("256 blocks", "12 blocks"):
        engine = make_engine(in_stages(num_stages), kv_cache=pool, admission_ratio=0.0)
        found = engine.generate(prompts, params)
        assert (sum(a.num_retractions for a in found) > 0) == (pool == "12 blocks")
        assert [record(a) for a in found] == [record(a) for a in wanted]
        engine.parts.ledger.check()
        engine.close()


@pytest.mark.parametrize("mode", ["text", "exact"])
def test_an_abort_between_two_steps_gives_a_valid_beginning(make_engine, mode):
    engine = make_engine()
    with engine.model.rollout_phase():
        for num_steps in range(1, 10):
            engine.add("x", SamplingParams(json_schema=PERSON, jump_forward=mode, sampling_seed=3), rid="r")
            done = []
            for _ in range(num_steps):
                done += engine.step()
            engine.pause_generation(mode="abort")
            engine.continue_generation()
            [answer] = done or finish(engine).values()
            assert len(answer.token_ids) == len(answer.logprobs) == len(answer.forced)
            assert engine.tokenizer.decode(list(answer.token_ids)).startswith(answer.text.rstrip("\ufffd")[:5])
            assert answer.text.startswith('{"')
    engine.parts.ledger.check_idle()
    engine.close()


@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_a_small_pool_preempts_and_changes_nothing(make_engine, mode):
    settings = {"json_schema": PERSON, "jump_forward": mode, "max_new_tokens": 60}
    params = [SamplingParams(**settings, sampling_seed=seed) for seed in range(6)]
    prompts = [f"person {index} of six, with a name: " for index in range(6)]
    roomy, tight = make_engine(), make_engine(kv_cache="11 blocks", admission_ratio=0.0)
    wanted, found = roomy.generate(prompts, params), tight.generate(prompts, params)
    assert sum(a.num_retractions for a in found) > 0
    assert [record(a) for a in found] == [record(a) for a in wanted]
    tight.parts.ledger.check()
    roomy.close()
    tight.close()


@pytest.mark.parametrize("mode", ["text", "exact"])
def test_streams_give_every_byte_once_and_tokens_that_are_replaced_are_taken_back(make_engine, mode):
    properties = {"città": {"enum": ["日本", "日本語€", "ключ"]}, "name": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["città", "name"]}
    engine = make_engine()
    num_taken_back = 0
    for seed in range(12):
        text, token_ids, logprobs = "", [], []
        params = SamplingParams(json_schema=schema, jump_forward=mode, max_new_tokens=50, sampling_seed=seed)
        for chunk in engine.stream("q", params):
            kept = len(token_ids) - chunk.num_taken_back
            num_taken_back += chunk.num_taken_back
            token_ids[kept:], logprobs[kept:] = chunk.token_ids, chunk.logprobs
            text += chunk.text
            last = chunk
        assert text == last.completion.text
        assert tuple(token_ids) == last.completion.token_ids and tuple(logprobs) == last.completion.logprobs
    assert (num_taken_back > 0) == (mode == "text")
    engine.close()


@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_stops_and_lengths_inside_forced_text_cut_exactly(make_engine, mode):
    engine = make_engine()
    name = "value of the name"
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}

    def run(**settings):
        params = SamplingParams(json_schema=schema, jump_forward=mode, temperature=0, **settings)
        return engine.generate(["q"], params)[0]

    whole = run(max_new_tokens=40)
    for length in range(1, 8):
        answer = run(max_new_tokens=length)
        assert len(answer.token_ids) == len(answer.logprobs) == length and answer.finish_reason.type == "length"
        if mode != "text":
            assert answer.token_ids == whole.token_ids[:length] and answer.logprobs == whole.logprobs[:length]
    answer = run(max_new_tokens=40, stop=" of")
    assert answer.text == '{"value' and answer.finish_reason.matched == " of"
    assert engine.tokenizer.decode(list(answer.token_ids[:-1])) in '{"value of'
    stop_id = whole.token_ids[3]
    answer = run(max_new_tokens=40, stop_token_ids=[stop_id])
    assert answer.token_ids[-1] == stop_id and answer.token_ids.count(stop_id) == 1
    assert answer.finish_reason.matched == stop_id and len(answer.logprobs) == len(answer.token_ids)
    engine.close()


def test_samples_of_one_prompt_share_it_and_jump_each_for_itself(make_engine):
    engine = make_engine()
    prompt = "the name and the value of " * 4
    for mode in ("text", "exact"):
        params = SamplingParams(json_schema=PERSON, jump_forward=mode, n=4, sampling_seed=8, max_new_tokens=80)
        group = engine.generate([prompt], params)
        assert len({a.token_ids for a in group}) > 1 and all(a.num_jump_forward_tokens for a in group)
        assert any(a.num_cached_tokens for a in group)
    engine.close()


def test_penalties_bias_and_alternatives_go_with_jumps(make_engine):
    answers = {}
    for mode in ("off", "exact"):
        engine = make_engine()
        params = SamplingParams(json_schema=PERSON, jump_forward=mode, frequency_penalty=1.0, repetition_penalty=1.3,
                                logit_bias={40: 3.0}, top_k=20, sampling_seed=4, max_new_tokens=80)  # fmt: skip
        options = RequestOptions(logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=(5, 6))
        [answers[mode]] = engine.generate(["a person"], params, options=options)
        engine.close()
    off, exact = answers["off"], answers["exact"]
    assert record(off) == record(exact) and off.top_logprobs == exact.top_logprobs
    assert off.listed_logprobs == exact.listed_logprobs and off.prompt_logprobs == exact.prompt_logprobs
    assert len(exact.top_logprobs) == len(exact.token_ids) == len(exact.listed_logprobs)


def test_text_mode_gives_the_texts_of_exact_where_one_tokenisation_is_allowed(make_engine):
    engine = make_engine()
    texts = {}
    for mode in ("text", "exact", "off"):
        params = SamplingParams(regex="name: value, items: città", jump_forward=mode, max_new_tokens=40, temperature=0)
        [answer] = engine.generate(["q"], params)
        texts[mode] = answer.text
    assert set(texts.values()) == {"name: value, items: città"}
    engine.close()


def test_metrics_and_the_trace_tell_of_jumps(make_engine, tmp_path):
    trace = tmp_path / "trace.json"
    engine = make_engine(trace=str(trace))
    params = [SamplingParams(json_schema=PERSON, max_new_tokens=80, sampling_seed=seed) for seed in range(6)]
    answers = engine.generate(["a person"] * 6, params)
    metrics = engine.state()["metrics"]
    engine.close()
    jumps = [event["args"] for event in json.loads(trace.read_text()) if event.get("name") == "jump_forward"]
    assert len(jumps) == metrics["num_jumps"] > 0
    assert sum(jump["rolled_back"] for jump in jumps) == metrics["num_rolled_back_tokens"] > 0
    assert sum(jump["rolled_back"] > 0 for jump in jumps) == metrics["num_jump_rollbacks"]
    assert metrics["num_jump_forward_tokens"] == sum(answer.num_jump_forward_tokens for answer in answers)
    assert metrics["num_jump_forward_tokens"] - metrics["num_jumps"] <= metrics["num_forwards_saved"]
    assert metrics["num_retokenisations"] > 0
    assert 0 < metrics["jump_forward_seconds"] < metrics["grammar_seconds"] < metrics["step_seconds"]


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_jump_takes_no_more_blocks_than_it_may_and_goes_on_in_the_next_step(make_engine, blocks):
    schema = {"type": "object", "properties": {f"property number {n}": {"const": n} for n in range(12)}}
    schema["required"] = list(schema["properties"])
    answers = {}
    for most in (blocks, 10):
        engine = make_engine(jump_forward_max_blocks=most)
        params = SamplingParams(json_schema=schema, jump_forward="exact", max_new_tokens=400)
        [answers[most]] = engine.generate(["q"], params)
        num_jumps = engine.state()["metrics"]["num_jumps"]
        assert num_jumps >= len(answers[most].token_ids) // (16 * (most + 1))
        engine.close()
    assert record(answers[blocks]) == record(answers[10])
    assert json.loads(answers[10].text) == {f"property number {n}": n for n in range(12)}


def test_very_long_forced_text_is_taken_in_pieces_with_the_same_tokens_in_every_mode(make_engine):
    engine = make_engine()
    params = [SamplingParams(regex="ab{10000000}", jump_forward=mode, max_new_tokens=100, sampling_seed=5)
              for mode in ("off", "exact", "text")]  # fmt: skip
    off, exact, text = engine.generate(["x"] * 3, params)
    assert record(off) == record(exact) and exact.num_jump_forward_tokens > 50
    for answer in (off, exact, text):
        assert answer.text == "a" + "b" * (len(answer.text) - 1) and answer.finish_reason.type == "length"
    engine.close()


def test_the_time_of_garbage_collections_is_no_grammars(make_engine, monkeypatch):
    follow = GrammarState.follow

    def collect_slowly(phase: str, info: dict[str, int]) -> None:
        end = time.thread_time() + (MAX_TOKEN_S + 0.01 if phase == "start" else 0)
        while time.thread_time() < end:
            pass

    def collect_and_follow(state: GrammarState, output_ids: list[int], start: int = 0) -> None:
        gc.collect(0)
        follow(state, output_ids, start)

    engine = make_engine()
    monkeypatch.setattr(GrammarState, "follow", collect_and_follow)
    gc.callbacks.append(collect_slowly)
    try:
        [answer] = engine.generate(["x"], [SamplingParams(regex="[a-z]{50}", max_new_tokens=3)])
    finally:
        gc.callbacks.remove(collect_slowly)
    assert answer.finish_reason.type == "length"
    engine.close()


def test_a_sequence_whose_grammar_takes_too_long_ends_alone(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr("lockstep.rollout.loop.grammar_time.MAX_TOKEN_S", 1e-9)
    params = [SamplingParams(regex="[a-z]{50}"), SamplingParams(max_new_tokens=5, ignore_eos=True)]
    slow, free = engine.generate(["x"] * 2, params)
    assert slow.finish_reason.type == "abort" and "ambiguous" in slow.finish_reason.message
    assert len(slow.token_ids) == 2  # one that took long may be the machine's
    assert free.finish_reason.type == "length" and len(free.token_ids) == 5
    engine.check_integrity()
    assert engine.state()["num_held_blocks"] == 0
    engine.close()
