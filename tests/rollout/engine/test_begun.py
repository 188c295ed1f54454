"""Answers that go on with tokens of an earlier one, or draw it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.rollout.request_options import Begun, Renewal, RequestOptions
from lockstep.tests.rollout.engine.callers import assert_idle, sampled


def test_an_aborted_answer_goes_on_as_the_one_without_the_abort(talker):
    params = sampled(max_new_tokens=30, ignore_eos=True)
    [whole] = talker.generate("the sum", params)
    [rid] = talker.add("the sum", params)
    for _ in range(9):
        talker.step()
    talker.abort_request(rid)
    assert not talker.has_work
    [part] = talker.step()
    assert part.finish_reason.type == "abort" and 0 < len(part.token_ids) < 30
    [answer] = talker.generate("the sum", params, options=RequestOptions(begun=part))
    assert (answer.token_ids, answer.logprobs, answer.text) == (whole.token_ids, whole.logprobs, whole.text)
    assert answer.weight_versions == whole.weight_versions
    [again] = talker.generate("the sum", params, options=RequestOptions(renewal=whole))
    assert (again.token_ids, again.num_kept_tokens) == (whole.token_ids, 30)
    assert_idle(talker)


def test_the_earlier_answers_are_completions_or_what_is_needed_of_them(talker):
    [answer] = talker.generate("the sum", sampled())
    assert RequestOptions(begun=answer) == RequestOptions(begun=Begun.of(answer))
    assert RequestOptions(renewal=answer) == RequestOptions(renewal=Renewal.of(answer))
    with pytest.raises(ValueError, match=r"renewal must be a Completion or a Renewal, not \[1\]; begun must be a"):
        RequestOptions(begun="the", renewal=[1])
    with pytest.raises(ValueError, match="does not say what it was drawn with"):
        RequestOptions(begun=replace(answer, drawn_with=None))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stop": ["{text}"]}, "a begun answer has not ended, and its tokens complete the stop"),
        ({"stop_regex": [r"\w\s"]}, "a begun answer has not ended, and its tokens complete the stop"),
        ({"stop_token_ids": ["{token}"]}, "a begun answer has not ended, as its tokens"),
    ],
)
def test_a_begun_answer_that_has_ended_is_refused_and_stops_nobody_else(talker, settings, says):
    """The loop of every request ended where the detokenizer was given a token behind the stop."""
    params = sampled(max_new_tokens=12, ignore_eos=True)
    [part] = talker.generate("the sum", params)
    filled = {"{text}": part.text[3:6], "{token}": part.token_ids[4]}
    stops = {name: [filled.get(one, one) for one in given] for name, given in settings.items()}
    other = talker.add("the sum", params)
    with pytest.raises(ValueError, match=says):
        talker.add("the sum", replace(params, max_new_tokens=30, **stops), options=RequestOptions(begun=part))
    answers = []
    while talker.has_work:
        answers += talker.step()
    assert [a.id for a in answers] == other and answers[0].token_ids == part.token_ids
    assert_idle(talker)


def test_stops_behind_the_least_length_are_no_end_of_a_begun_answer(talker):
    params = sampled(max_new_tokens=12, ignore_eos=True)
    [part] = talker.generate("the sum", params)
    stop = {"stop": [part.text[3:6]], "min_new_tokens": 14, "max_new_tokens": 20}
    [answer] = talker.generate("the sum", replace(params, **stop), options=RequestOptions(begun=part))
    assert answer.token_ids[:12] == part.token_ids and len(answer.token_ids) >= 14
