"""Answers that go on with tokens of an earlier one, or draw it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.rollout.kept_kv import KeptKV, KVStart
from lockstep.rollout.request_options import Begun, Renewal, RequestOptions
from lockstep.tests.rollout.engine.callers import assert_idle, sampled
from lockstep.tests.support.callers import soon, submit


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


BEGUN = Begun((1, 2), (-1.0, -2.0), (("old", None, 0), ("new", "d", 1)), seed=3)
KEPT = KVStart(0, (KeptKV("old", None, 2),))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seed": 2**63}, "the seed of a begun answer must be an int64, not 9223372036854775808"),
        ({"seed": "3"}, "the seed of a begun answer must be an int64, not '3'"),
        ({"seed": True, "index": -1}, "int64, not True; the index of a begun answer must be an integer of 0 or more"),
        ({"token_ids": 7}, "a begun answer has sequences of token_ids, logprobs, spans and kv_starts, not int 7"),
        ({"token_ids": (1, [2])}, r"names tokens below 79, not \[\[2\]\]"),
        ({"logprobs": (-1.0, "2")}, r"has numbers as logprobs, not \['2'\]"),
        ({"spans": ((1,),)}, r"has spans of a version, a digest and a first token, not \[\(1,\)\]"),
        ({"spans": (("old", None, 1),)}, "says from which weights its first token came"),
        ({"spans": (("old", None, 0), ("new", None, 0))}, "has spans in the order of its tokens"),
        ({"spans": (("old", None, 0), ("new", None, 2))}, "has spans in the order of its tokens"),
        ({"kv_starts": ((0, ()),)}, r"has kv_starts of kept KV, not \[\(0, \(\)\)\]"),
        ({"kv_starts": (KEPT, KEPT)}, "has kv_starts in the order of its tokens"),
    ],
)
def test_a_begun_answer_that_is_none_is_refused_and_stops_nobody_else(talker, wrong, says):
    """A seed beyond an int64 ended the loop of every request."""
    talker.start()
    other = submit(talker.generate, "the sum", sampled())
    with pytest.raises(ValueError, match=says):
        talker.add("the sum", sampled(), options=RequestOptions(begun=replace(BEGUN, **wrong)))
    assert len(soon(other)) == 1 and talker.failure is None
    [answer] = talker.generate("the sum", sampled(), options=RequestOptions(begun=replace(BEGUN, kv_starts=(KEPT,))))
    assert answer.token_ids[:2] == BEGUN.token_ids
    talker.stop()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seed": "3"}, "the seed of a renewal must be an int64, not '3'"),
        ({"index": None}, "the index of a renewal must be an integer of 0 or more, not None"),
        ({"token_ids": 7}, "a renewal has a sequence of token_ids, not int 7"),
    ],
)
def test_a_renewal_that_is_none_is_refused(talker, wrong, says):
    with pytest.raises(ValueError, match=says):
        talker.add("the sum", sampled(), options=RequestOptions(renewal=replace(Renewal((1,), 3), **wrong)))
    assert_idle(talker)
