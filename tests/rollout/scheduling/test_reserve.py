"""The reserve that admission keeps for what running sequences may still generate."""

from __future__ import annotations

import pytest

from lockstep.rollout.config import ADMISSION_RATIO as INITIAL_RATIO
from lockstep.rollout.scheduling import admission
from lockstep.rollout.scheduling.admission import MINIMUM_SHARE, NUM_DECAY_STEPS, RISE
from lockstep.tests.rollout.scheduling.scripted_loop import SIZE, Loop, rows


def test_admission_ratio_decays_to_its_minimum_and_starts_over_when_idle():
    loop = Loop(200)
    assert loop.scheduler.admission_ratio == INITIAL_RATIO
    loop.add("a", 4, new=NUM_DECAY_STEPS + 50)
    ratios = [INITIAL_RATIO]
    for _ in range(NUM_DECAY_STEPS + 20):
        loop.step()
        ratios.append(loop.scheduler.admission_ratio)
    assert ratios[1] == pytest.approx(INITIAL_RATIO - INITIAL_RATIO * (1 - MINIMUM_SHARE) / NUM_DECAY_STEPS)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == ratios[-15] == pytest.approx(INITIAL_RATIO * MINIMUM_SHARE)
    loop.drain()
    assert loop.scheduler.admission_ratio == INITIAL_RATIO


def test_admission_ratio_starts_over_on_demand():
    loop = Loop(200)
    loop.add("a", 4, new=100)
    for _ in range(20):
        loop.step()
    assert loop.scheduler.admission_ratio < INITIAL_RATIO
    loop.scheduler.reset_admission()
    assert loop.scheduler.admission_ratio == INITIAL_RATIO


@pytest.mark.parametrize("num_new", [16, 60])
def test_admission_ratio_rises_when_blocks_run_out_and_not_beyond_one(num_new):
    loop = Loop(8)
    for id in "ab":
        loop.add(id, 4, new=num_new)
    loop.scheduler._admission.ratio = 0.1
    for _ in range(20):
        if loop.num_preemptions == 0:
            before = loop.scheduler.admission_ratio
            loop.step()
    assert loop.num_preemptions == 1
    assert before + RISE <= loop.scheduler.admission_ratio <= 1.0
    for _ in range(20):
        loop.scheduler._admission.on_retraction(loop.scheduler.running())
    assert loop.scheduler.admission_ratio == 1.0


def test_after_a_retraction_all_are_expected_to_generate_what_was_generated_so_far_and_more():
    loop = Loop(1000)
    for id in "ab":
        loop.add(id, 4, new=100)
    for _ in range(65):
        loop.step()
    loop.scheduler._admission.ratio = 0.2
    loop.scheduler._admission.on_retraction(loop.scheduler.running())
    assert loop.scheduler.admission_ratio == pytest.approx((2 * 65 + 2 * admission.NUM_STEPS_AHEAD) / 201)


def test_a_retraction_that_was_asked_for_says_nothing_about_the_load():
    loop = Loop(16)
    request = loop.add("a", 4, new=9)
    loop.step()
    before = loop.scheduler.admission_ratio
    loop.controller.preempt("a")
    loop.worker.preempt("a")
    loop.scheduler.retract(request)
    assert loop.scheduler.admission_ratio == before


def test_reserve_is_the_share_of_what_may_still_be_generated_in_blocks_less_those_held():
    loop = Loop(100)
    request = loop.add("a", 6, new=21)
    blocks = loop.scheduler._admission
    blocks.ratio = 0.5
    assert blocks.num_blocks_expected(request) == 4  # 6 known + half of the 20 that need KV: 16 tokens
    blocks.ratio = 0.51
    assert blocks.num_blocks_expected(request) == 5
    blocks.ratio = 1.0
    assert blocks.num_blocks_expected(request) == 7  # 26 tokens: the last needs no KV
    loop.step()
    assert blocks.num_blocks_reserved([request]) == 7 - 2


def test_reserve_is_never_more_than_pool_or_context_allow():
    for loop, most in ((Loop(4), 4), (Loop(100, context=11), 3)):
        request = loop.add("a", 6, new=1000)
        loop.scheduler._admission.ratio = 1.0
        assert loop.scheduler._admission.num_blocks_expected(request) == most
        assert loop.step().scheduled
        loop.drain()


def test_reserve_counts_the_part_of_a_prompt_that_is_still_to_come():
    loop = Loop(10, chunk=4)
    loop.add("a", 24, new=1)
    loop.step()
    loop.add("b", 20, new=1)  # 5 blocks, of which only 4 are left when a has its 6
    assert [id for id, *_ in rows(loop.step())] == ["a"]
    loop.drain()
    assert loop.num_preemptions == 0


def test_requests_for_no_end_of_tokens_do_not_keep_all_others_out():
    loop = Loop(5000, context=100_000)
    for id in "abcd":
        loop.add(id, 4, new=90_000)
    loop.step()
    assert loop.scheduler.num_running == 4
    counted = 5000 * SIZE // (4 + int(INITIAL_RATIO * admission.MAX_TOKENS_COUNTED))
    assert counted >= 4


def test_sequences_that_are_expected_to_fit_run_together_and_those_that_are_not_wait():
    loop = Loop(8)
    for id in "abc":
        loop.add(id, 4, new=16)  # 4 blocks each are expected
    assert [id for id, *_ in rows(loop.step())] == ["a", "b"]
    loop.drain()


def test_alone_the_first_is_taken_whatever_the_ratio_expects_of_it():
    loop = Loop(4)
    for id in "ab":
        loop.add(id, 12, new=100)
    loop.scheduler._admission.ratio = 1.0
    assert [id for id, *_ in rows(loop.step())] == ["a"]
    loop.drain()


def test_ratio_that_decayed_lets_more_in():
    def num_together(ratio: float) -> int:
        loop = Loop(20)
        for number in range(10):
            loop.add(f"r{number}", 4, new=40)
        loop.scheduler._admission.ratio = ratio
        loop.step()
        return loop.scheduler.num_running

    assert (num_together(1.0), num_together(0.5), num_together(0.1)) == (1, 3, 8)
