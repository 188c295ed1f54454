"""The search for what followed an ending: whole tokens only, and never long."""

from __future__ import annotations

import time

from lockstep.rollout.speculation.token_history import LENGTHS, TokenHistory

SHIFTED = 256  # its bytes, 00 01 00 00, stand at each border of two tokens 1: 01 00 00 [00 01 00 00] 00


def ending(token_ids: list[int]) -> bytes:
    return TokenHistory(token_ids).last(LENGTHS[0])


def test_bytes_between_tokens_are_no_match():
    history = TokenHistory([SHIFTED, SHIFTED, 7, *[1] * 20])
    assert history.after(ending([SHIFTED] * 2), 1) == ([7], 2)
    assert TokenHistory([1] * 20).after(ending([SHIFTED] * 2), 1) == ([], 0)


def test_a_text_that_is_made_for_it_keeps_no_step_waiting():
    history, part = TokenHistory([1] * 100_000), ending([SHIFTED] * LENGTHS[0])
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert history.after(part, 8) == ([], 0)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.02  # it took 0.15 s, for each sequence of a step
