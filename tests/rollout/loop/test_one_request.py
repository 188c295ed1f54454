"""What one request, one failed step or one commit does to the other requests of an engine: nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import ByT5Tokenizer

from lockstep.rollout.ahead.rollouts import RolloutsAhead
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import GrammarError
from lockstep.rollout.loop import between_steps
from lockstep.rollout.request_options import Begun, RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.detokenizer import IncrementalDetokenizer, StopRegexTimeout

CONFIG = EngineConfig(kv_cache="64 blocks", max_num_seqs=8)
PARAMS = SamplingParams(max_new_tokens=12, sampling_seed=5, ignore_eos=True)
PROMPTS = [[1, 2, 3 + index] for index in range(4)]


class Failure(Exception):
    """One that no part of the engine expects."""


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, at: int) -> list[int]:
    """Let the call number `at` of a method raise Failure; returns the list of the calls so far."""
    method, calls = getattr(owner, name), []

    def call(*arguments: object, **named: object) -> object:
        calls.append(len(calls))
        if len(calls) == at + 1:
            raise Failure(f"{name} fails")
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def run(engine: Engine, num_steps: int = 200) -> dict[str, object]:
    """Run so many steps, or until nothing is left, also behind a Failure; returns tokens and log-probabilities by
    id."""
    answers = {}
    for _ in range(num_steps):
        try:
            found = engine.step()
        except Failure:
            continue
        answers |= {answer.id: (answer.token_ids, answer.logprobs) for answer in found}
        if not engine.has_work and not found:
            return answers
    assert num_steps < 200, "the engine does not come to an end"
    return answers


@pytest.mark.parametrize("kept", [(), (5,)], ids=["no special", "a special kept"])
@pytest.mark.parametrize("started", [True, False])
def test_a_token_that_the_tokenizer_cannot_decode_ends_its_own_request(make_model, started, kept):
    engine = Engine(make_model("qwen3", vocab_size=1024), CONFIG, tokenizer=ByT5Tokenizer())
    if started:
        engine.start()
    bad, good = engine.generate(
        [[40, 41, 42], [40, 41, 43]],
        [
            SamplingParams(max_new_tokens=6, ignore_eos=True, logit_bias={500: 90.0}, kept_special_tokens=kept),
            SamplingParams(max_new_tokens=6, ignore_eos=True, logit_bias={70: 90.0}),
        ],
    )
    assert bad.finish_reason.type == "abort" and bad.token_ids == (500,)
    assert "cannot decode the tokens up to 500: ValueError" in bad.finish_reason.message
    assert good.finish_reason.type == "length" and good.text == chr(70 - 3) * 6
    assert engine.failure is None
    engine.close()


def test_half_a_surrogate_pair_separates_caches_as_any_other_key(make_model):
    engine = Engine(make_model("qwen3"), CONFIG)
    engine.start()
    prompt = list(range(1, 40))
    first, second, other = (
        engine.generate([prompt], PARAMS, options=RequestOptions(extra_key=key))[0]
        for key in ("\ud800", "\ud800", "\ud801")
    )
    assert first.token_ids == second.token_ids == other.token_ids
    assert first.num_cached_tokens == other.num_cached_tokens == 0 < second.num_cached_tokens
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_a_schedule_that_fails_changes_no_answer(make_model, monkeypatch, at, overlap):
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="64 blocks", max_num_seqs=8, overlap=overlap))
    expected = [(answer.token_ids, answer.logprobs) for answer in engine.generate(PROMPTS, PARAMS)]
    engine.flush_cache()
    scheduler = engine.parts.scheduler
    calls = fails_once(monkeypatch, scheduler, "_admit", at)
    ids = [id for prompt in PROMPTS[:3] for id in engine.add(prompt, PARAMS)]
    answers = run(engine, 3)
    ids += engine.add(PROMPTS[3], PARAMS)
    answers |= run(engine)
    assert [answers[id] for id in ids] == expected and len(calls) > at
    engine.check_integrity()


@pytest.mark.parametrize(("owner", "name"), [("managers", "deliver"), ("answers", "on_answer")])
def test_a_delivery_that_fails_leaves_the_others_for_the_next_step(make_model, monkeypatch, owner, name):
    engine = Engine(make_model("qwen3"), CONFIG)
    expected = [(answer.token_ids, answer.logprobs) for answer in engine.generate(PROMPTS, PARAMS)]
    ids = [id for prompt in PROMPTS for id in engine.add(prompt, PARAMS)]
    loop = engine.gate.loop
    owned = {"managers": loop._managers, "answers": loop._answers}[owner]
    # The second sequence: in the middle of a step where it is delivered, or at the end where it is answered.
    fails_once(monkeypatch, owned, name, 5 if name == "deliver" else 1)
    answers = run(engine)
    lost = {ids[1]} if name == "on_answer" else set()
    assert {id: answers.get(id) for id in ids if id not in lost} == {
        id: value for id, value in zip(ids, expected, strict=True) if id not in lost
    }
    assert engine.num_running == 0
    engine.check_integrity()


def test_time_that_grammars_took_in_a_step_that_failed_holds_up_no_later_one(make_model, monkeypatch, tokenizer):
    engine = Engine(make_model("qwen3", vocab_size=len(tokenizer)), CONFIG, tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=4, ebnf='root ::= "t" root "m" | "e"')
    engine.gate.loop._grammars._time._spent_s = 5.0
    fails_once(monkeypatch, engine.gate.loop._runner, "launch", 0)
    with pytest.raises(Failure):
        engine.generate([[1, 2, 3]], PARAMS)
    [answer] = engine.generate([[1, 2, 3]], params)
    assert answer.finish_reason is not None


@pytest.mark.parametrize("command", ["abort_request", "pause_generation"])
def test_a_commit_that_verifies_in_the_middle_of_an_abort_of_all_loses_none(make_model, monkeypatch, command):
    engine = Engine(make_model("qwen3"), CONFIG)
    ids = [id for prompt in PROMPTS for id in engine.add(prompt, PARAMS)]
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(between_steps, "SLICE", 1)
    commits = iter(["1"])

    def commit() -> None:
        for version in commits:
            engine.weights.commit_weights(version, None, in_flight="verify")

    monkeypatch.setattr(engine._between_steps, "give_way", commit)
    if command == "abort_request":
        assert set(engine.abort_request(abort_all=True).aborted) == set(ids)
    else:
        engine.pause_generation("abort")
        engine.continue_generation()
    answers = engine.step()
    assert {answer.id for answer in answers} == set(ids)
    assert {answer.finish_reason.type for answer in answers} == {"abort"}
    assert engine.num_running == 0 and not engine.has_work
    engine.check_integrity()


def test_a_stream_that_is_left_while_a_commit_verifies_runs_for_no_one(make_model, monkeypatch):
    engine = Engine(make_model("qwen3"), CONFIG)
    stream = engine.stream(PROMPTS[0], PARAMS)
    next(stream)
    command = engine.driver.command

    def after_a_commit(name: str, *arguments: object, **named: object) -> object:
        if name == "abort_request":
            engine.weights.commit_weights("1", None, in_flight="verify")
        return command(name, *arguments, **named)

    monkeypatch.setattr(engine.driver, "command", after_a_commit)
    stream.close()
    assert engine.weight_version == "1" and not engine.has_work and engine.step() == []


def test_a_batch_ahead_that_no_thread_could_submit_is_refused_at_its_begin(make_model, tokenizer):
    engine = Engine(make_model("qwen3", vocab_size=len(tokenizer)), CONFIG, tokenizer=tokenizer)
    ahead = RolloutsAhead(engine)
    ahead.begin(0, PROMPTS[:1], [PARAMS])
    with pytest.raises(GrammarError, match="empty"):
        ahead.begin(1, PROMPTS[1:2], [SamplingParams(max_new_tokens=8, ignore_eos=True, regex="()")])
    ahead.begin(1, PROMPTS[1:2], [PARAMS])
    assert [len(ahead.finish(key)) for key in (0, 1)] == [1, 1]


def test_a_batch_ahead_renews_a_later_sample_of_a_prompt(make_model):
    engine = Engine(make_model("qwen3"), CONFIG)
    params = SamplingParams(n=4, max_new_tokens=6, sampling_seed=5, ignore_eos=True)
    fourth = engine.generate(PROMPTS[:1], params)[3]
    ahead = RolloutsAhead(engine)
    one = SamplingParams(max_new_tokens=6, sampling_seed=5, ignore_eos=True)
    ahead.begin(0, PROMPTS[:1], [one], [RequestOptions(renewal=fourth)])
    [again] = ahead.finish(0)
    assert (again.index, again.token_ids, again.logprobs) == (3, fourth.token_ids, fourth.logprobs)


def test_a_begun_answer_stands_at_a_commit_that_verifies(make_model):
    engine = Engine(make_model("qwen3"), CONFIG)
    begun = Begun((7,) * 4, (-1.0,) * 4, (("old", None, 0),), seed=3)
    [id] = engine.add(PROMPTS[0], PARAMS, options=RequestOptions(begun=begun))
    for _ in range(3):
        engine.step()
    engine.weights.commit_weights("1", None, in_flight="verify")
    answers = run(engine)
    tokens, logprobs = answers[id]
    assert tokens[:4] == begun.token_ids and logprobs[:4] == begun.logprobs and len(tokens) == 12


def test_a_begun_answer_that_cannot_be_searched_at_a_commit_ends_alone(make_model, tokenizer, monkeypatch):
    """The commit failed in the middle, and the request was never answered."""
    engine = Engine(make_model("qwen3", vocab_size=len(tokenizer)), CONFIG, tokenizer=tokenizer)
    begun = Begun((7,) * 4, (-1.0,) * 4, (("old", None, 0),), seed=3)
    stops = replace(PARAMS, stop_regex="never that")
    ids = [id for prompt in PROMPTS for id in engine.add(prompt, stops, options=RequestOptions(begun=begun))]
    for _ in range(3):
        engine.step()
    append, calls = IncrementalDetokenizer.append, []

    def slow_once(self: IncrementalDetokenizer, *arguments: object) -> object:
        calls.append(self)
        if len(calls) == 2:
            raise StopRegexTimeout("the search took too long")
        return append(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(IncrementalDetokenizer, "append", slow_once)
        report = engine.weights.commit_weights("1", None, in_flight="verify")
    assert report.num_verified == 3 and engine.weight_version == "1" and len(calls) == 4
    ends = {}
    while len(ends) < 4:
        ends |= {answer.id: answer.finish_reason for answer in engine.step()}
    assert [ends[id].type for id in ids] == ["length", "abort", "length", "length"]
    assert ends[ids[1]].message == "a begun answer cannot go on: the search took too long"
    assert not engine.has_work
    engine.check_integrity()
