"""Answers that are renewed under other weights are those of an engine that had these from the start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.rollout.replica.calls import completions_bytes, completions_from
from lockstep.rollout.request_options import Renewal, RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.drafting import Case, record
from lockstep.tests.rollout.speculation.test_equality import FAMILIES, GROUPS, WAYS
from lockstep.tests.rollout.verify.test_commit import changed
from lockstep.tests.support.covering import covering


def answers_to(engine, group: list[Case]) -> list:
    return engine.generate([c.prompt for c in group], [c.params for c in group], options=[c.options for c in group])


@covering(
    1, rest="exhaustive", family=FAMILIES, dtype=[torch.float32, torch.bfloat16], way=[*WAYS],
    change=["one ulp", "small", "fresh"], group=[0, 1],
)  # fmt: skip
def test_a_renewed_answer_is_the_one_from_the_start(small, make_engine, family, dtype, way, change, group):
    model, cases = small(family, dtype), GROUPS[group]
    engine = make_engine(model, speculation="off", **WAYS[way])
    old = answers_to(engine, cases)
    with changed(model, change):
        fresh = make_engine(model, speculation="off")
        expected = [record(one) for one in answers_to(fresh, cases)]
        fresh.close()
        engine.weights.commit_weights("default", None)
        steps = engine.metrics.num_steps
        renewed = engine.renew(old)
        assert [record(one) for one in renewed] == expected
        steps = engine.metrics.num_steps - steps
        again = engine.renew(renewed)  # under the same weights all stay, in a few steps
        assert [record(one) for one in again] == expected
        assert [one.num_kept_tokens for one in again] == [len(one.token_ids) for one in again]
    kept, all_old = sum(one.num_kept_tokens for one in renewed), sum(len(one.token_ids) for one in old)
    assert kept <= all_old
    if change == "one ulp" and group == 0:
        assert kept > all_old / 2
        assert steps < 16
    engine.close()


def test_an_aborted_answer_and_one_that_ended_too_early_go_on(make_engine):
    engine = make_engine("qwen3")
    params = SamplingParams(max_new_tokens=20, sampling_seed=3, ignore_eos=True, n=2)
    whole = engine.generate([[3, 4, 5]], params)
    cut = [replace(one, token_ids=one.token_ids[:7], finish_reason=None) for one in whole]
    assert [record(one) for one in engine.renew(cut)] == [record(one) for one in whole]
    assert engine.metrics.num_kept_tokens == 14
    assert engine.renew([]) == []
    engine.close()


def test_samples_without_a_seed_of_their_own_are_renewed_with_the_engines(make_engine):
    engine = make_engine("qwen3")
    whole = engine.generate([[3, 4, 5]] * 2, SamplingParams(max_new_tokens=9))
    assert whole[0].token_ids != whole[1].token_ids
    assert [record(one) for one in engine.renew(whole)] == [record(one) for one in whole]
    engine.close()


def test_each_answer_that_cannot_be_renewed_is_named(make_engine):
    engine = make_engine("qwen3")
    [one] = engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=4))
    wrong = [
        replace(one, id="a", drawn_with=None),
        replace(one, id="b", token_ids=(3, 99999)),
        replace(one, id="c", token_ids=(3,) * 5),
        one,
    ]
    with pytest.raises(ValueError) as raised:
        engine.renew(wrong)
    text = str(raised.value)
    assert "a: it does not say what it was drawn with" in text
    assert "b: a renewal names tokens [99999]" in text
    assert "c: a renewal has 5 tokens, more than max_new_tokens, which is 4" in text
    assert one.id not in text
    for bad, what in ((Renewal((), 2**63), "int64"), (Renewal((), 0, -1), "index")):
        with pytest.raises(ValueError, match=what):
            engine.generate([[3]], SamplingParams(), options=RequestOptions(renewal=bad))
    with pytest.raises(ValueError, match="one sample"):
        engine.generate([[3]], SamplingParams(n=2), options=RequestOptions(renewal=Renewal((), 0)))
    engine.close()


def test_what_an_answer_was_drawn_with_reaches_every_rank(make_engine):
    engine = make_engine("qwen3")
    params = SamplingParams(max_new_tokens=4, logit_bias={5: float("-inf")}, stop=("x",), regex="[a-z]+")
    options = RequestOptions(top_logprobs_num=2, extra_key="k", renewal=Renewal((1,), 7))
    answers = engine.generate([[3, 4]], params, options=options)
    assert answers[0].drawn_with.params == params and answers[0].drawn_with.seed == 7
    assert completions_from(completions_bytes(answers)) == answers
    engine.close()


def test_one_answer_is_renewed_as_a_list_of_one_and_anything_else_is_refused(make_engine):
    engine = make_engine("qwen3")
    [answer] = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=6))
    assert [one.token_ids for one in engine.renew(answer)] == [answer.token_ids]
    for wrong in ("x", [answer, 5]):
        with pytest.raises(ValueError, match=r"cannot renew .*, which is no Completion"):
            engine.renew(wrong)
