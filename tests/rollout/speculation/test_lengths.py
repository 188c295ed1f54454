"""The choice of the drafts' lengths: what steps cost, how often drafts are accepted, and when they rest."""

from __future__ import annotations

import itertools
import random

import pytest

from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.step import Vote
from lockstep.rollout.speculation.acceptance import FORGETTING, NUM_DEPTHS, Acceptance
from lockstep.rollout.speculation.lengths import MIN_GAIN, BestRate, StepSize, WholeDrafts
from lockstep.rollout.speculation.proposer import Proposal
from lockstep.rollout.speculation.rests import FIRST, LONGEST, LONGEST_WITHOUT, MOST_AT_FIRST, Rests
from lockstep.rollout.speculation.speculation import SPARE, Speculation, Wanted
from lockstep.rollout.speculation.step_costs import LEAST, MAX_SIZES, WARM_UP, WINDOW, StepCosts


def costs_of(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_rows, value in seconds.items():
        observe(costs, num_rows, value)
    return costs


def observe(costs: StepCosts, num_rows: int, seconds: float) -> None:
    """Measure a size that has not run before."""
    for _ in range(WARM_UP):
        costs.observe(num_rows, 99.0)  # these may compile or record
    for _ in range(LEAST):
        costs.observe(num_rows, seconds)


def test_steps_cost_what_was_measured_and_lie_on_a_line_between():
    costs = costs_of({1: 1.0, 5: 2.0, 9: 1.5})
    assert [costs.seconds(num) for num in (1, 3, 5, 9)] == [1.0, 1.375, 1.75, 1.75]  # never less for more rows
    assert costs.seconds(20) > costs.seconds(10) > 1.75
    values = [costs.seconds(num) for num in range(1, 40)]
    assert values == sorted(values)


def test_rows_beyond_the_measured_ones_cost_what_the_last_of_these_did():
    costs = costs_of({1: 4.0, 8: 8.0, 16: 14.0, 32: 26.0})
    assert costs.seconds(64) == pytest.approx(26.0 + 32 * 0.75)
    assert costs_of({1: 4.0, 16: 4.0}).seconds(32) > 4.0  # a little, where many rows took no longer than one


def test_before_anything_is_measured_a_row_costs_a_little():
    costs = StepCosts()
    assert costs.seconds(1) < costs.seconds(2) < 2 * costs.seconds(1)
    for _ in range(WARM_UP + LEAST - 1):
        costs.observe(4, 100.0)  # the first of its size say nothing, and so do few
    assert costs.seconds(4) < 2 and not costs.knows(4)
    costs.observe(4, 100.0)
    assert costs.seconds(4) == 100.0 and costs.knows(4)


def test_one_slow_step_changes_no_cost_and_sizes_are_bounded():
    costs = costs_of({4: 1.0})
    for value in [1.0] * 4 + [50.0]:
        costs.observe(4, value)
    assert costs.seconds(4) == 1.0
    for _ in range(WINDOW):
        costs.observe(4, 3.0)
    assert costs.seconds(4) == 3.0
    for num_rows in range(10, 10 + 2 * 8 * MAX_SIZES):
        observe(costs, num_rows, 1.0)
    assert len(costs._seconds) == MAX_SIZES


@pytest.mark.parametrize("seed", range(20))
def test_the_best_rate_is_that_of_all_choices(seed):
    """Compare with every choice of lengths of a few proposals."""
    dice = random.Random(seed)
    costs = costs_of({num: 1 + num * dice.choice([0.02, 0.1, 0.5]) + dice.random() / 20 for num in range(1, 16)})
    chances = []
    for _ in range(3):
        chance, its = 1.0, []
        for _ in range(dice.randrange(5)):
            chance *= dice.choice([0.2, 0.6, 0.95])
            its.append(chance)
        chances.append(its)
    size, budget = StepSize(3, 3), dice.randrange(1, 13)
    lengths = BestRate(costs).choose(size, chances, budget)

    def rate(chosen) -> float:
        expected = size.num_tokens + sum(sum(its[:num]) for its, num in zip(chances, chosen, strict=True))
        return expected / costs.seconds(size.num_rows + sum(chosen))

    choices = itertools.product(*(range(len(its) + 1) for its in chances))
    best = max((chosen for chosen in choices if sum(chosen) <= budget), key=rate)
    assert sum(lengths) <= budget and all(num <= len(its) for num, its in zip(lengths, chances, strict=True))
    if any(lengths):
        assert rate(lengths) == pytest.approx(rate(best)) and rate(lengths) > MIN_GAIN * rate([0, 0, 0])
    else:
        assert rate(best) <= MIN_GAIN * rate([0, 0, 0]) * (1 + 1e-12)


def test_free_rows_take_all_and_dear_rows_none():
    chances = [[0.9, 0.8], [0.5], []]
    assert BestRate(costs_of({1: 1.0, 50: 1.0})).choose(StepSize(3, 3), chances, 9) == [2, 1, 0]
    assert BestRate(costs_of({1: 1.0, 50: 1.0})).choose(StepSize(3, 3), chances, 2) == [2, 0, 0]
    assert BestRate(costs_of({3: 1.0, 4: 2.0, 9: 9.0})).choose(StepSize(3, 3), chances, 9) == [0, 0, 0]
    assert WholeDrafts().choose(StepSize(3, 3), chances, 2) == [2, 0, 0]


def test_a_size_that_never_ran_has_to_promise_a_tenth_more():
    costs = costs_of({1: 1.0, 2: 1.0, 40: 1.0})
    assert BestRate(costs).choose(StepSize(2, 2), [[0.9, 0.15]], 9) == [1]  # 2.9 tokens, then 3.05
    costs.observe(4, 1.0)
    assert BestRate(costs).choose(StepSize(2, 2), [[0.9, 0.15]], 9) == [2]


def test_sources_are_asked_for_a_few_tokens_more_than_drafts_had_lately():
    speculation, asked = Speculation({}, 0, vocab_size=10), []

    class Source:
        name = "made up"

        def propose(self, request: Request, most: int) -> Proposal:
            asked.append(most)
            return Proposal([1] * most)

    speculation.add_source(Source(), depth=32)
    speculation.lengths = Taken(taken := [20])

    def plan() -> None:
        speculation.plan([Wanted(None, 30)], StepSize(1, 1), 100)

    plan(), plan()
    assert asked == [30, 30]  # all that may be had, until it is known what is taken
    taken[0] = 2
    for _ in range(40):
        plan()
    assert asked[-1] == 2 + SPARE and sorted(asked, reverse=True) == asked
    taken[0] = 32
    for _ in range(10):
        plan()
    assert asked[-1] == 30


class Taken:
    """A rule that takes so many tokens of each proposal."""

    def __init__(self, taken: list[int]) -> None:
        self._taken = taken

    def choose(self, size: StepSize, chances: list[list[float]], budget: int) -> list[int]:
        return [min(len(its), self._taken[0]) for its in chances]


def test_chances_fall_with_depth_and_follow_what_was_accepted():
    acceptance = Acceptance()
    assert acceptance.of_source("a") == 0.5
    for _ in range(200):
        acceptance.learn("a", 12, 4, 4)
        acceptance.learn("a", 2, 4, 0)
        acceptance.learn("b", 1, 1, 1)
    [first, *rest] = acceptance.chances("a", 12, 6)
    assert first > 0.9 and rest == sorted(rest, reverse=True) and len(rest) == 5
    assert next(acceptance.chances("a", 2, 1)) < 0.1
    assert acceptance.of_source("a") > 0.9 < acceptance.of_source("b")  # the best of its classes
    assert list(acceptance.chances("c", 0, 2)) == [0.5, 0.25]


def test_the_chance_of_a_vote_is_that_of_its_majority_until_it_was_tried():
    acceptance, sure, split = Acceptance(), Vote(12, 8, 8), Vote(12, 3, 8)
    first, second = acceptance.chances("a", (sure, split), 2)
    assert first > 0.9 and 0.3 < second / first < 0.5
    for _ in range(100):
        acceptance.learn("a", (sure, split), 2, 0)
    first, second = acceptance.chances("a", (sure, split), 2)
    assert first < 0.1 and 0.3 < second / first < 0.5  # the second was never tried: the first was rejected
    for _ in range(100):
        acceptance.learn("a", (sure, split), 2, 1)
    first, second = acceptance.chances("a", (sure, split), 2)
    assert first > 0.9 and second / first < 0.1 and acceptance.of_source("a") > 0.9


def test_tokens_behind_a_rejected_one_say_nothing_and_old_drafts_are_forgotten():
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn("a", 0, 6, 1)
    one, two, three, *_ = acceptance.chances("a", 0, 6)
    assert one > 0.9 and two / one < 0.1 and three / two == 0.5  # the third was never tried
    for _ in range(200):
        acceptance.learn("a", 0, 6, 6)
    assert min(acceptance.chances("a", 0, NUM_DEPTHS)) > 0.7
    for _ in range(200):
        acceptance.learn("a", 0, 6, 0)
    assert acceptance.of_source("a") < 0.1


def test_a_depth_that_was_rejected_by_chance_is_tried_again():
    acceptance = Acceptance()
    for _ in range(8):
        acceptance.learn("a", 0, 2, 1)
    first, second = acceptance.chances("a", 0, 2)
    assert second / first < 0.2
    for _ in range(6 * FORGETTING):  # while it has no row
        acceptance.learn("a", 0, 1, 1)
    first, second = acceptance.chances("a", 0, 2)
    assert first > 0.9 and second / first > 0.45


def test_rests_grow_while_nothing_pays_and_end_where_it_does():
    rests, lengths = Rests(), []
    for _ in range(9):
        rests.begin(8, were_proposals=True)
        num = 1
        while rests.next_step(8):
            assert rests.is_resting and not rests.is_trial
            num += 1
        assert rests.is_trial and not rests.is_resting
        lengths.append(num)
    assert lengths == [min(FIRST * 2**n, LONGEST) for n in range(9)]
    rests.next_step(8)
    assert not rests.is_trial
    while not rests.pays(8):
        rests.learn(8, 2.0)
    rests.begin(8, were_proposals=True)
    assert [rests.next_step(8) for _ in range(FIRST)] == [True] * (FIRST - 1) + [False]


def test_half_as_many_sequences_rest_for_themselves():
    rests = Rests()
    rests.begin(8, were_proposals=True)
    assert rests.next_step(15) and not rests.next_step(7)
    assert rests.next_step(8) and rests.is_resting and not rests.next_step(16)
    for _ in range(30):
        rests.learn(4, 1.2)
    assert rests.pays(7) and not rests.pays(8)


def test_a_load_that_shrinks_again_and_again_is_tried_ever_less():
    rests, tried = Rests(), []
    for _ in range(400):
        tried.append(0)
        for num_sequences in (200, 200, 100, 50, 25, 12, 6, 3, 1):
            if not rests.next_step(num_sequences):
                tried[-1] += 1
                rests.begin(num_sequences, were_proposals=True)
    assert tried[0] >= 7 and sum(tried[-128:]) <= 128 * 9 / LONGEST + 9


@pytest.mark.parametrize(("num_rows", "lengths"), [
    (1, [2, 4, 8, 16, 16]), (3, [2, 4, 8, 16, 16]), (16, [4, 4, 8, 16, 16]), (200, [8, 8, 8, 16, 16]),
])  # fmt: skip
def test_without_proposals_rests_are_short_and_grow_until_drafts_pay(num_rows, lengths):
    rests = Rests()

    def length() -> int:
        rests.begin(num_rows, were_proposals=False)
        assert rests.is_resting
        return 1 + sum(rests.next_step(num_rows) for _ in range(2 * LONGEST_WITHOUT))

    assert [length() for _ in lengths] == lengths
    rests.learn(num_rows, 0.99)  # a step in vain, by the time of its search
    assert length() == LONGEST_WITHOUT
    rests.learn(num_rows, 1.2)
    assert length() == lengths[0]


def test_where_a_search_is_dear_one_sequence_rests_too():
    rests = Rests(search_is_dear=True)
    rests.begin(1, were_proposals=False)
    assert [rests.next_step(1) for _ in range(LONGEST_WITHOUT)].count(True) == MOST_AT_FIRST - 1
