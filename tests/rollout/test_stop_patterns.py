"""The size of stop patterns, which is known before they are compiled."""

from __future__ import annotations

import pytest

from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.search_time import LEAST_S, MAX_S, TOKEN_S, SearchTime, SequenceSearchTime
from lockstep.rollout.stop_patterns import MAX_PATTERN_SIZE, pattern_size


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        (r"\d{4}-\d{2}-\d{2}", 10, 10),
        ("a{2}{3}", 6, 6),
        ("(?:(?:x?){100}){100}y", 10_000, 40_000),
        ("(a|b{3}){5}", 20, 30),
        ("[({]{7}", 7, 7),
        (r"\({9}", 9, 9),
        ("(?x)(?:(?:a{100}#)\n){100}", 10_000, 10**6),  # the comment hides a parenthesis
        ("a{e<=3}", 1, 8),
        ("{999}", 0, 10),
        ("(?:a{30}", 30, 40),
    ],
)
def test_the_size_counts_each_repeat(pattern, least, most):
    assert least <= pattern_size(pattern) <= most


@pytest.mark.parametrize("pattern", ["(?:(?:(?:x?){100}){100}){100}y", "(?:(?:(?:a){300}){300}){300}", "x{99999}"])
def test_a_pattern_of_too_many_repeats_is_refused_uncompiled(pattern):
    with pytest.raises(ValueError, match=f"at most {MAX_PATTERN_SIZE}"):
        SamplingParams(stop_regex=pattern)


def test_patterns_are_compiled_once_with_the_settings():
    params = SamplingParams(stop_regex=["a+", "b{3}"])
    assert [pattern.pattern for pattern in params.stop_patterns] == ["a+", "b{3}"]
    assert params == SamplingParams(stop_regex=["a+", "b{3}"]) and SamplingParams().stop_patterns == ()


def test_a_pattern_that_takes_long_on_the_empty_text_is_refused():
    with pytest.raises(ValueError, match="stop_regex"):
        SamplingParams(stop_regex="(" * 125 + "a" + ")*" * 60)


def test_searches_share_their_time():
    now = 0.0
    shared = SearchTime(lambda: now)
    spent = 0.0
    for _ in range(10):
        allowed = shared.allowance()
        shared.spend(allowed)
        spent += allowed
    assert spent < 0.27 and shared.allowance() == LEAST_S
    now += 10
    assert shared.allowance() == MAX_S


def test_a_sequence_has_time_of_its_own_that_its_tokens_bring():
    now = 0.0
    shared = SearchTime(lambda: now)
    own = SequenceSearchTime(shared)
    spent = 0.0
    for num_tokens in range(1, 51):
        now += 60  # others leave all of the shared time
        allowed = own.allowance(num_tokens)
        own.spend(allowed)
        spent += allowed
    assert spent == pytest.approx(MAX_S + 49 * TOKEN_S)
    assert own.allowance(50) == LEAST_S and SequenceSearchTime(shared).allowance(1) == MAX_S


def test_a_sequence_has_no_more_than_what_is_left_of_the_shared_time():
    shared = SearchTime(lambda: 0.0)
    own = SequenceSearchTime(shared)
    shared.spend(1.0)
    assert own.allowance(1) == LEAST_S
