"""Outputs that end inside an accepted draft end as without drafts: stops, lengths, the end of the context, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import regex

from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.conftest import VOCAB
from lockstep.tests.rollout.speculation.drafting import Case, Oracle, counts, draft_always, outputs_of, play
from lockstep.tests.support.covering import covering

WAYS: dict[str, dict[str, object]] = {"plain": {}, "overlap": {"overlap": True}, "2 stages": {"stages": 2}}
PROMPT, NUM_NEW = [3, 17, 90, 4, 55], 40


@pytest.fixture
def off(make_engine) -> Engine:
    return make_engine(speculation="off")


@pytest.fixture
def drafting(make_engine):
    """Return a function of outputs by id, which run on behind the ends that are tested."""

    def make(outputs: Mapping[str, Sequence[int]], **config: object) -> Engine:
        engine = make_engine(**config)
        draft_always(engine, Oracle(outputs, VOCAB))
        return engine

    return make


def free_run(engine: Engine, seeds: Sequence[int] = (1, 2, 3), **params: object) -> dict[str, tuple]:
    cases = [Case(PROMPT, SamplingParams(sampling_seed=s, max_new_tokens=NUM_NEW, **params)) for s in seeds]
    return play(engine, cases)


def assert_equal_ends(off: Engine, drafting, free: Mapping[str, tuple], cases: list[Case], **config: object) -> list:
    """Compare the cases, whose ids are those of the free runs again and again. Returns the finish reasons."""
    outputs = {f"r{i}": outputs_of(free)[f"r{i % len(free)}"] for i in range(len(cases))}
    engine = drafting(outputs, **config)
    expected = play(off, cases)
    assert play(engine, cases) == expected
    assert counts(engine)[1] > len(cases)
    engine.close()
    return [one[12] for one in expected.values()]


def texts_of(engine: Engine, outputs: Mapping[str, Sequence[int]]) -> list[str]:
    return [engine.tokenizer.decode(list(ids)) for ids in outputs.values()]


@pytest.mark.parametrize("way", WAYS)
def test_stop_tokens_at_any_place(off, drafting, way):
    free = free_run(off)
    cases = [
        Case(PROMPT, SamplingParams(sampling_seed=seed, max_new_tokens=NUM_NEW, stop_token_ids=[ids[place]],
                                    min_new_tokens=(place % 3) * 4))
        for place in range(0, 24, 2)
        for seed, ids in zip((1, 2, 3), outputs_of(free).values(), strict=True)
    ]  # fmt: skip
    reasons = assert_equal_ends(off, drafting, free, cases, **WAYS[way])
    assert sum(reason.type == "stop" for reason in reasons) > 20


@pytest.mark.parametrize("way", WAYS)
def test_stop_strings_and_patterns_at_any_place(off, drafting, way):
    free, cases = free_run(off), []
    texts = texts_of(off, outputs_of(free))
    for part in range(13):
        for seed, text in zip((1, 2, 3), texts, strict=True):
            place = part * (len(text) - 3) // 13
            piece = text[place : place + 3]
            stop = {"stop": [piece]} if part % 2 else {"stop_regex": [f"[{regex.escape(piece)}]{{2}}"]}
            cases.append(Case(PROMPT, SamplingParams(
                sampling_seed=seed, max_new_tokens=NUM_NEW, no_stop_trim=part % 4 == 0, min_new_tokens=part % 5, **stop,
            )))  # fmt: skip
    reasons = assert_equal_ends(off, drafting, free, cases, **WAYS[way])
    assert sum(isinstance(reason.matched, str) for reason in reasons) > 15


def test_a_stop_string_before_a_stop_token_or_the_length_in_one_step(off, drafting):
    free, cases = free_run(off, seeds=[1] * 3), []
    ids = outputs_of(free)["r0"]
    for num in range(6, 30):
        piece = off.tokenizer.decode(list(ids[: num - 1])).rstrip("\ufffd")[-2:]  # complete a token before the end
        cases += [
            Case(PROMPT, SamplingParams(sampling_seed=1, max_new_tokens=num - num % 3, stop=[piece])),
            Case(PROMPT, SamplingParams(sampling_seed=1, max_new_tokens=39, stop=[piece], stop_token_ids=[ids[num]])),
            Case(PROMPT, SamplingParams(sampling_seed=1, max_new_tokens=num, stop_token_ids=[ids[num - 1]])),
        ]  # fmt: skip
    reasons = assert_equal_ends(off, drafting, free, cases)
    assert {"stop", "length"} == {reason.type for reason in reasons}
    assert {str, int, type(None)} == {type(reason.matched) for reason in reasons}


@pytest.mark.parametrize("way", WAYS)
def test_lengths_are_reached_exactly(off, drafting, way):
    free = free_run(off)
    cases = [Case(PROMPT, SamplingParams(sampling_seed=1 + num % 3, max_new_tokens=num)) for num in range(3, 24)]
    reasons = assert_equal_ends(off, drafting, free, cases, **WAYS[way])
    assert {(reason.type, reason.length) for reason in reasons} == {("length", num) for num in range(3, 24)}
    engine = drafting({}, **WAYS[way])
    nothing = [Case(PROMPT, SamplingParams(sampling_seed=1, max_new_tokens=num)) for num in (0, 1)]
    assert play(engine, nothing) == play(off, nothing)


@covering(1, way=WAYS)
def test_the_context_is_filled_to_its_end_and_not_beyond(make_engine, drafting, off, way):
    outputs = outputs_of(free_run(off))
    for length in (9, 16, 17, 18, 33):
        ends = make_engine(speculation="off", max_model_len=length, **WAYS[way])
        engine = drafting(outputs, max_model_len=length, **WAYS[way])
        cases = [Case(PROMPT, SamplingParams(sampling_seed=s, max_new_tokens=NUM_NEW)) for s in (1, 2, 3)]
        expected = play(ends, cases)
        assert play(engine, cases) == expected
        assert all(len(one[0]) + len(one[2]) == length for one in expected.values())
        assert counts(engine)[1] > 2
        ends.close()
        engine.close()


@covering(1, way=WAYS, settings=[{}, {"temperature": 0.0}, {"stop": "a"}])
def test_samples_of_one_prompt(off, make_engine, way, settings):
    """Equal samples (temperature 0), different ones, and ones that end at different times, by the real sources too."""
    cases = [Case(PROMPT, SamplingParams(n=4, max_new_tokens=30, sampling_seed=s, **settings)) for s in (4, 5)]
    expected = play(off, cases)
    engine = make_engine(**WAYS[way])
    draft_always(engine, Oracle(outputs_of(expected), VOCAB, "part"))
    assert play(engine, cases) == expected
    assert counts(engine)[1] > 30
    engine.close()


def test_end_of_sequence_inside_a_draft(make_engine, off):
    """The model's own end of sequence, which a source may well propose, and what it proposes behind it."""
    params = [SamplingParams(sampling_seed=s, max_new_tokens=NUM_NEW, logit_bias={0: 5.0}) for s in range(8)]
    ignoring = [SamplingParams(sampling_seed=s, max_new_tokens=NUM_NEW, logit_bias={0: 5.0}, ignore_eos=True)
                for s in range(8)]  # fmt: skip
    outputs = outputs_of(play(off, [Case(PROMPT, one) for one in ignoring]))
    cases = [Case(PROMPT, one) for one in params]
    expected = play(off, cases)
    assert sum(one[12].type == "stop" for one in expected.values()) > 4
    engine = make_engine()
    draft_always(engine, Oracle(outputs, VOCAB))
    assert play(engine, cases) == expected
    assert counts(engine)[1] > 20
    engine.close()
