"""The search for what followed an ending: whole tokens only, and never long."""

from __future__ import annotations

import random
import time

import pytest

from lockstep.kernels.drafts import votes
from lockstep.rollout.sequences.step import Vote
from lockstep.rollout.speculation.proposer import NO_PROPOSAL
from lockstep.rollout.speculation.token_history import LENGTHS, Places, TokenHistory, gathered, token_bytes, vote

SHIFTED = 256  # its bytes, 00 01 00 00, stand at each border of two tokens 1: 01 00 00 [00 01 00 00] 00


def ending(token_ids: list[int]) -> bytes:
    return TokenHistory(token_ids).last(LENGTHS[0])


def test_bytes_between_tokens_are_no_match():
    history = TokenHistory([SHIFTED, SHIFTED, 7, *[1] * 20])
    assert history.places(ending([SHIFTED] * 2), 1) == (2, [token_bytes([7])])
    assert TokenHistory([1] * 20).places(ending([SHIFTED] * 2), 1) == (0, [])


def test_a_text_that_is_made_for_it_keeps_no_step_waiting():
    history, part = TokenHistory([1] * 100_000), ending([SHIFTED] * LENGTHS[0])
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert history.places(part, 8) == (0, [])
        times.append(time.perf_counter() - began)
    assert min(times) < 0.02  # it took 0.15 s, for each sequence of a step


def test_most_places_decide_token_by_token_and_the_newest_of_equally_many():
    assert Places(3, []).vote() == NO_PROPOSAL
    ids, votes = Places(3, list(map(token_bytes, ([1, 2, 9], [1, 2], [1, 7, 7], [5, 5, 5])))).vote()
    assert ids == [1, 2, 9] and votes == (Vote(3, 3, 4), Vote(3, 2, 3), Vote(3, 1, 1))
    assert Places(1, [token_bytes([4]), token_bytes([6])]).vote() == ([4], (Vote(1, 1, 2),))
    assert Places(6, [token_bytes([4, 5])] * 3).vote() == ([4, 5], (Vote(6, 3, 3),) * 2)


def test_places_beyond_the_borders_of_samples_are_none():
    joined = TokenHistory.joined([token_bytes(ids) for ids in ([1, 2, 3], [1, 2], [7, 1, 2, 4])], 1000)
    assert joined.places(ending([1, 2]), 5) == (2, [token_bytes([4]), token_bytes([3])])
    assert joined.places(ending([1, 2]), 5, least=3) == (0, [])


@pytest.mark.parametrize("seed", range(8))
def test_votes_in_cpp_are_those_in_python(seed):
    assert votes.is_native()
    draw = random.Random(seed)
    vocab_size = (2, 3, 10, 300)[seed % 4]  # few bytes lie between tokens of the last
    for _ in range(300):

        def tokens(most: int) -> list[int]:
            return [draw.randrange(1, vocab_size + 1) for _ in range(draw.randrange(most))]

        texts = [TokenHistory(tokens(60)) for _ in range(draw.randrange(4))]
        texts.append(TokenHistory.joined([token_bytes(tokens(9)) for _ in range(draw.randrange(6))], 100))
        part, most = TokenHistory(tokens(20)).last(LENGTHS[0]), draw.randrange(1, 20)
        assert vote(texts, part, most) == gathered(texts, part, most).vote()


def test_without_a_compiler_python_votes(monkeypatch):
    monkeypatch.setattr(votes, "is_native", lambda: False)
    monkeypatch.setattr(votes, "vote", None)
    assert vote([TokenHistory([1, 2, 3, 1, 2])], ending([1, 2]), 2) == ([3, 1], (Vote(2, 1, 1),) * 2)


def test_a_search_for_no_or_too_many_places_is_an_error():
    for num_places in (0, votes.MAX_PLACES + 1):
        with pytest.raises(ValueError, match=f"from 1 to {votes.MAX_PLACES}, not {num_places}"):
            votes.vote([], b"", 1, num_places, (1,))
