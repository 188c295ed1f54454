"""The real sources in an engine: their drafts change no bit, and what is no token is refused."""

from __future__ import annotations

import pytest

from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.speculation.proposer import Proposal
from lockstep.tests.rollout.speculation.conftest import VOCAB
from lockstep.tests.rollout.speculation.drafting import (
    Case,
    Oracle,
    Play,
    counts,
    draft_always,
    outputs_of,
    play,
)
from lockstep.tests.support.covering import covering

WAYS: dict[str, dict[str, object]] = {
    "plain": {}, "overlap": {"overlap": True}, "2 stages": {"stages": 2},
    "small": {"kv_cache": "14 blocks", "max_num_seqs": 5, "max_num_batched_tokens": 24, "admission_ratio": 0.0},
}  # fmt: skip
PROMPT = [3, 17, 90, 4, 55, 17, 90, 4]
PERSON = {"type": "array", "items": {"enum": ["value one", "value two"]}, "minItems": 3, "maxItems": 6}
SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0}, "narrow": {"top_k": 2, "temperature": 0.5},
    "loop": {"logit_bias": {7: 12.0, 8: 11.5}},
    "json": {"json_schema": PERSON, "jump_forward": "text"}, "json off": {"json_schema": PERSON, "jump_forward": "off"},
}  # fmt: skip


def some_cases(**options: object) -> list[Case]:
    return [
        Case([*PROMPT, number % 2], SamplingParams(max_new_tokens=30, sampling_seed=number // 2, n=2, **its),
             RequestOptions(**options))
        for number, its in enumerate([*SETTINGS.values()] * 2)
    ]  # fmt: skip


@pytest.fixture
def expected(make_engine):
    if not _found:
        off = make_engine(speculation="off")
        _found.append(play(off, some_cases()))
        off.close()
    return _found[0]


_found: list[dict[str, tuple]] = []


@covering(1, way=WAYS, source=["past", "siblings", "history", "caller"])
def test_each_source_alone_is_accepted_and_changes_no_bit(make_engine, expected, way, source):
    engine = make_engine(speculation={source: 6}, **WAYS[way])
    draft_always(engine)
    for _ in range(2):  # in the second round there is a history
        outputs = list(outputs_of(expected).values())
        cases = some_cases()
        if source == "caller":
            given = [(*ids[:9], 5, *ids[9:]) for ids in outputs[::2]]  # with a token too many
            cases = [
                Case(case.prompt, case.params, RequestOptions(draft_token_ids=its))
                for case, its in zip(cases, given, strict=True)
            ]
        assert play(engine, cases) == expected
    its = engine.parts.speculation.counts[source]
    assert its.num_accepted > 20 and its.num_drafted > its.num_accepted
    assert engine.metrics.num_accepted_tokens == its.num_accepted
    engine.close()


@covering(1, rest="slow", way=["overlap"], pool=["128 blocks", "14 blocks"])
def test_all_sources_together_with_lengths_from_measured_times(make_engine, expected, way, pool):
    """As in use, and once more where each step has all drafts that fit."""
    engine = make_engine(**{**WAYS[way], "kv_cache": pool})
    assert play(engine, some_cases()) == expected
    draft_always(engine)
    for _ in range(2):
        assert play(engine, some_cases(draft_token_ids=(7, 8) * 9)) == expected
    assert counts(engine)[1] > 50
    engine.close()


def test_a_request_that_wants_none_has_no_drafts(make_engine, expected):
    engine = make_engine()
    draft_always(engine, Oracle(outputs_of(expected), VOCAB))
    run = Play(engine)
    with engine.model.rollout_phase():
        run.add(some_cases(speculation=False))
        assert run.to_the_end() == expected
        assert counts(engine) == (0, 0, 0)
    assert play(engine, some_cases()) == expected
    assert counts(engine)[1] > 50
    engine.close()


def test_history_is_not_shared_with_another_key(make_engine):
    engine = make_engine(speculation={"history": 6})
    draft_always(engine)
    case = Case(PROMPT, SamplingParams(max_new_tokens=30, sampling_seed=1), RequestOptions(extra_key="a"))
    first = play(engine, [case])
    other = Case(case.prompt, case.params, RequestOptions(extra_key="b"))
    assert play(engine, [other]) == first
    assert counts(engine) == (0, 0, 0)
    assert play(engine, [case]) == first
    assert counts(engine)[1] > 20
    engine.close()


class Fixed:
    """A source that always proposes the same."""

    name = "fixed"

    def __init__(self, token_ids) -> None:
        self.token_ids = token_ids

    def propose(self, request, most: int) -> Proposal:
        return Proposal(self.token_ids)

    def on_tokens(self, request, num_cut: int) -> None:
        """Do nothing."""

    def on_end(self, request) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("token_ids", "num_refused", "why"),
    [
        ([5, VOCAB, 6], 2, "1024 is no token"), ([-1], 1, "-1 is no token"), ([5, 2**40], 1, "is no token"),
        ([5, 6.0], 1, "6.0 is no token"), (["5"], 1, "'5' is no token"), ([5] * 9, 5, "at most 4 were asked for"),
    ],
)  # fmt: skip
def test_what_is_no_token_or_too_much_is_refused_counted_and_told_once(
    make_engine, caplog, token_ids, num_refused, why
):
    case = Case(PROMPT, SamplingParams(max_new_tokens=12, sampling_seed=1, logit_bias={5: 3.0}))
    off, engine = make_engine(speculation="off"), make_engine()
    draft_always(engine, Fixed(token_ids), depth=4)
    assert play(engine, [case]) == play(off, [case])
    its = engine.parts.speculation.counts["fixed"]
    assert (its.num_refused >= num_refused and its.num_refused % num_refused == 0) or why.startswith("at most")
    assert engine.state()["speculation"]["sources"]["fixed"]["num_refused"] == its.num_refused > 0
    told = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(told) == 1 and "'fixed'" in told[0] and why in told[0]
    off.close()
    engine.close()


def test_where_one_source_is_refused_the_next_one_is_asked(make_engine, expected):
    engine = make_engine()
    oracle = Oracle(outputs_of(expected), VOCAB)
    draft_always(engine, Fixed([VOCAB]), oracle)
    assert play(engine, some_cases()) == expected
    found = engine.parts.speculation.counts
    assert found["fixed"].num_refused > 0 == found["fixed"].num_drafted
    assert found["oracle"].num_accepted > 50
    engine.close()


@pytest.mark.parametrize("bad", [(VOCAB,), (5, -1)])
def test_a_callers_draft_outside_the_vocabulary_is_the_callers_fault(make_engine, bad):
    engine = make_engine()
    with pytest.raises(ValueError, match=rf"draft_token_ids .*\[{bad[-1]}\]"):
        engine.add(PROMPT, SamplingParams(), options=RequestOptions(draft_token_ids=bad))
    assert not engine.has_work
    engine.close()


def test_names_and_depths_of_sources_are_checked(make_engine):
    engine = make_engine()
    speculation = engine.parts.speculation
    with pytest.raises(ValueError, match="'past' is there already"):
        speculation.add_source(Oracle({}, VOCAB, name="past"))
    for depth in (0, 65):
        with pytest.raises(ValueError, match=f"from 1 to 64, not {depth}"):
            speculation.add_source(Oracle({}, VOCAB), depth)
    engine.close()
