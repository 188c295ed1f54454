"""Orders of waiting requests, their guarantees, and the predicted prefill times behind deadlines."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lockstep.rollout import config
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.policies import POLICIES, Edf, Lrs, find_policy, pick_victim
from lockstep.rollout.scheduling.prefill_time import PRIOR_ROW_SECONDS, PRIOR_STEP_SECONDS, PrefillTimePredictor
from lockstep.rollout.scheduling.scheduler import Scheduler, StepLimits
from lockstep.rollout.scheduling.waiting_queue import OrderedQueue, SlackQueue
from lockstep.rollout.sequences.engine_manager import EngineSequenceManager
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.rollout.sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult

NUMBERS = iter(range(10**9))


def make_request(arrival: float, prompt: int, new: int = 4) -> Request:
    number = next(NUMBERS)
    sequence = Sequence(f"r{number}", [number] * prompt)
    return Request(sequence, SamplingParams(max_new_tokens=new), RequestOptions(), 0, 0, arrival, number, None)


def step_of(*num_tokens: int) -> ScheduleOutput:
    return ScheduleOutput(1, tuple(ScheduledSequence(f"s{i}", 0, 0, n, (), None) for i, n in enumerate(num_tokens)))


def second_a_row(chunk: int = 1000) -> PrefillTimePredictor:
    """Build a predictor that has learned one second per prompt row and none per step."""
    predictor = PrefillTimePredictor(chunk)
    predictor.observe(step_of(10), 10.0)
    return predictor


# -- predicted prefill times ---------------------------------------------------------------------------------------


def test_before_the_first_step_the_prior_is_predicted():
    predictor = PrefillTimePredictor(100)
    assert predictor.predict(250) == pytest.approx(3 * PRIOR_STEP_SECONDS + 250 * PRIOR_ROW_SECONDS)
    assert predictor.predict(0) == 0.0


def test_time_of_a_step_and_of_a_prompt_row_are_learned_apart():
    predictor = PrefillTimePredictor(100)
    for _ in range(5):
        predictor.observe(step_of(1, 1, 1), 0.02)
        predictor.observe(step_of(1, 1, 50), 0.02 + 50 * 0.003)
    assert predictor.predict(250) == pytest.approx(3 * 0.02 + 250 * 0.003)


def test_a_prefill_before_any_decode_is_learned_without_the_prior():
    predictor = PrefillTimePredictor(100)
    predictor.observe(step_of(100), 0.001)
    assert predictor.predict(100) == pytest.approx(0.001)


def test_slow_steps_change_nothing_while_they_are_few_and_a_new_speed_is_learned():
    predictor = PrefillTimePredictor(100)
    for number in range(30):
        slow = 100 if number % 3 == 0 else 1
        predictor.observe(step_of(1, 1), 0.01 * slow)
        predictor.observe(step_of(40), (0.01 + 40 * 0.001) * slow)
    assert predictor.predict(100) == pytest.approx(0.01 + 100 * 0.001)
    for _ in range(16):
        predictor.observe(step_of(1, 1), 0.03)
        predictor.observe(step_of(40), 0.03 + 40 * 0.002)
    assert predictor.predict(100) == pytest.approx(0.03 + 100 * 0.002)


def test_a_step_of_which_nothing_ran_teaches_nothing():
    predictor = PrefillTimePredictor(100)
    predictor.observe(step_of(), 5.0)
    assert predictor.predict(10) == PrefillTimePredictor(100).predict(10)


# -- deadlines and slack -------------------------------------------------------------------------------------------


def test_deadline_is_arrival_plus_the_longer_of_scaled_prefill_and_minimum():
    policy = Edf(second_a_row(), 2.0, 7.0)
    long, short = make_request(100.0, 20), make_request(100.0, 3)
    for request in (long, short):
        policy.arrive(request)
    assert (policy.deadline(long), policy.deadline(short)) == (140.0, 107.0)
    assert policy.rank(short, 0.0) < policy.rank(long, 0.0)


def test_deadline_never_moves_whatever_is_learned_or_generated_later():
    predictor = second_a_row()
    policy = Edf(predictor, 2.0, 7.0)
    request = make_request(100.0, 20)
    policy.arrive(request)
    for _ in range(40):
        predictor.observe(step_of(10), 90.0)
    request.sequence.token_ids += [1] * 50
    policy.arrive(request)  # it was preempted and returns
    assert policy.deadline(request) == 140.0


def test_slack_is_relative_falls_with_time_and_rises_with_prefill():
    policy = Lrs(second_a_row(), 2.0, 7.0)
    request = make_request(100.0, 20)
    policy.arrive(request)
    assert policy.slack(request, 100.0) == pytest.approx((140 - 100 - 20) / 40)
    assert policy.slack(request, 110.0) == pytest.approx((140 - 110 - 20) / 40)
    request.sequence.stage_processed(15)
    assert policy.slack(request, 110.0) == pytest.approx((140 - 110 - 5) / 40)


@pytest.mark.parametrize("min_deadline_s", [5e-324, 1e-300, 1e-9, 1e300])
def test_no_allowance_is_zero_so_nothing_divides_by_it(min_deadline_s):
    predictor = PrefillTimePredictor(100)
    predictor.observe(step_of(1), 0.0)
    predictor.observe(step_of(10), 0.0)
    assert predictor.predict(50) == 0.0
    policy = Lrs(predictor, 1e-300, min_deadline_s)
    queue = policy.make_queue()
    for request in (make_request(1e6, 5), make_request(1e6, 50)):
        policy.arrive(request)
        assert policy.allowance(request) > 0
        queue.push(request)
        assert policy.slack(request, 1e6 - 1) == policy.slack(request, 1e6 - 1)  # no NaN
    assert queue.peek(1e6 - 1) is not None
    assert queue.peek(1e6 + 1) is not None


def test_policies_forget_who_has_ended():
    scheduler = Scheduler(KVLedger(8, 4, False), StepLimits(4, 64, 64, 100), "lrs")
    request = make_request(0.0, 3)
    scheduler.add(request)
    scheduler.remove(request)
    with pytest.raises(KeyError):
        scheduler._policy.deadline(request)


def test_config_takes_every_policy_and_names_each_bad_setting():
    assert set(config.POLICIES) == set(POLICIES)
    for name in POLICIES:
        assert find_policy(EngineConfig(policy=name).policy) is POLICIES[name]
    with pytest.raises(ValueError) as caught:
        EngineConfig(policy="lifo", deadline_multiplier=0.0, min_deadline_s=float("nan"))
    for words in (
        "policy must be one of edf, fcfs, lrs, not 'lifo'",
        "deadline_multiplier must be a positive number",
        "min_deadline_s must be a positive number, not nan",
    ):
        assert words in str(caught.value)
    for bad in (-1.0, True, "1", float("inf"), None):
        with pytest.raises(ValueError, match="min_deadline_s must be a positive number"):
            EngineConfig(min_deadline_s=bad)


# -- queues --------------------------------------------------------------------------------------------------------


def test_ordered_queue_gives_the_first_and_keeps_few_entries_of_those_who_left():
    queue = OrderedQueue(lambda r: (r.arrival_time, r.arrival_index))
    requests = [make_request(float(arrival), 1) for arrival in random.Random(0).sample(range(1000), 1000)]
    for request in requests:
        queue.push(request)
    by_arrival = sorted(requests, key=lambda r: r.arrival_time)
    for request in by_arrival[:500]:
        assert queue.peek() is request
        queue.discard(request)
        queue.discard(request)
    for request in by_arrival[501:]:
        queue.discard(request)
    assert len(queue) == 1 and queue.peek() is by_arrival[500]
    assert len(queue._entries) <= 66
    queue.discard(by_arrival[500])
    assert queue.peek() is None


@pytest.mark.parametrize("seed", range(5))
def test_slack_queue_gives_the_least_rank_among_equal_allowances(seed):
    chance = random.Random(seed)
    policy = Lrs(second_a_row(), 2.0, 1000.0)  # 500 rows or less get the least allowance
    queue, waiting = policy.make_queue(), set()
    now = 0.0
    for _ in range(400):
        now += chance.random() * 8
        request = make_request(now, chance.randint(1, 500))
        policy.arrive(request)
        queue.push(request)
        waiting.add(request)
        if chance.random() < 0.6:
            first = queue.peek(now)
            assert first is min(waiting, key=lambda r: policy.rank(r, now))
            queue.discard(first)
            waiting.discard(first)
        if chance.random() < 0.1 and waiting:
            gone = min(waiting, key=lambda r: r.arrival_index)
            queue.discard(gone)
            waiting.discard(gone)
    assert len(queue) == len(waiting) > 50


@pytest.mark.parametrize("seed", range(5))
def test_slack_queue_of_any_allowances_is_right_up_to_a_fifth(seed):
    chance = random.Random(seed)
    policy = Lrs(second_a_row(), 5.0, 10.0)
    queue, waiting = SlackQueue(policy), []
    for _ in range(300):
        request = make_request(chance.random(), int(2 ** chance.uniform(1, 12)))
        policy.arrive(request)
        queue.push(request)
        waiting.append(request)
    for now in (1.0, 2.0, 5.0, 7.0):  # all have slack
        chosen, best = queue.peek(now), min(policy.slack(r, now) for r in waiting)
        assert policy.slack(chosen, now) <= best * 2 ** (1 / 4) + 1e-9


def test_a_queue_may_be_left_and_entered_again():
    policy = Lrs(second_a_row(), 2.0, 7.0)
    queue = policy.make_queue()
    request = make_request(0.0, 5)
    policy.arrive(request)
    for _ in range(3):
        queue.push(request)
        assert queue.peek(1.0) is queue.peek(1e9) is request
        queue.discard(request)
        assert queue.peek(1.0) is None and len(queue) == 0


# -- the choice of a victim --------------------------------------------------------------------------------------------


def test_victim_under_edf_has_the_latest_deadline_not_the_latest_arrival():
    policy = Edf(second_a_row(), 2.0, 7.0)
    early_long, late_short = make_request(0.0, 50), make_request(10.0, 3)
    for request in (early_long, late_short):
        policy.arrive(request)
    assert pick_victim([early_long, late_short], lambda r: policy.rank(r, 11.0)) is early_long


def test_victim_under_lrs_changes_as_prefill_progresses():
    policy = Lrs(second_a_row(), 2.0, 7.0)
    first, second = make_request(0.0, 50), make_request(0.0, 50)
    for request in (first, second):
        policy.arrive(request)
    first.sequence.stage_processed(30)
    assert pick_victim([first, second], lambda r: policy.rank(r, 11.0)) is first
    second.sequence.stage_processed(40)
    assert pick_victim([first, second], lambda r: policy.rank(r, 11.0)) is second


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_ranks_give_way_by_fewest_generated_then_longest_input(name):
    policy = find_policy(name)(second_a_row(), 2.0, 1000.0)

    def request(generated: int, prompt: int) -> Request:
        request = make_request(0.0, prompt)
        policy.arrive(request)
        request.sequence.token_ids += [2] * generated
        request.sequence.stage_processed(prompt + generated - 1)
        return request

    def rank(request: Request) -> tuple[float, ...]:
        return policy.rank(request, 11.0)

    more, fewer = request(5, 9), request(2, 1)
    assert pick_victim([more, fewer], rank) is fewer
    short, long = request(2, 3), request(2, 8)
    assert pick_victim([long, short], rank) is pick_victim([short, long], rank) is long


# -- starvation bounds ---------------------------------------------------------------------------------------------


class Overload:
    """Add more requests than can run, of all lengths; steps take one second, and rows too for the predictor."""

    def __init__(self, policy: str, seed: int) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.ledger = KVLedger(40, 4, False)  # no prefix cache: no request waits for another's prefix
        limits = StepLimits(4, 32, 8, 200)
        self.scheduler = Scheduler(
            self.ledger, limits, policy, deadline_multiplier=2.0, min_deadline_s=6.0, clock=lambda: self.now
        )
        self.scheduler.on_step_timed(step_of(10), 10.0)
        self.managers = EngineSequenceManager(frozenset(), 200)
        self.deadlines: dict[Request, float] = {}
        # admitted request, and the requests that still waited
        self.admissions: list[tuple[Request, list[Request]]] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.now += 1.0
            for _ in range(self.chance.choice((0, 0, 1, 1, 2))):
                length = self.chance.choice((2, 3, 4, 6, 40, 60))
                request = make_request(self.now, length, self.chance.randint(1, 12))
                self.deadlines[request] = self.now + max(2.0 * length, 6.0)
                self.managers.add(request)
                self.scheduler.add(request)
            self.step()

    def step(self) -> None:
        before = self.scheduler.waiting()
        output = self.scheduler.schedule()
        waiting = set(self.scheduler.waiting())
        gone = [r for r in before if r not in waiting]
        for request in gone:
            # Requests admitted in one step were admitted in the order of the output.
            self.admissions.append((request, [r for r in before if r in waiting]))
        order = [item.id for item in output.scheduled if item.id in {r.id for r in gone}]
        taken = [self.managers.request(id) for id in order]
        self.admissions += [(first, [second]) for first, second in pairwise(taken)]
        self.managers.on_schedule(output)
        results = []
        for item in output.scheduled:
            is_last = item.start + item.num_tokens == self.managers.sequence(item.id).num_tokens
            token = (7, -1.0) if is_last else (None, None)
            results.append(SequenceResult(item.id, item.incarnation, item.num_tokens, *token))
        requests = {item.id: self.managers.request(item.id) for item in output.scheduled}
        ended = [id for id, _ in (*output.ignored, *output.exhausted)] + self.managers.on_step_completed(results)
        self.scheduler.on_step_completed(output, requests)
        for id in ended:
            self.scheduler.remove(self.managers.request(id))
            self.managers.free(id)
        self.ledger.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_is_overtaken_beyond_the_bound_of_the_policy(policy, seed):
    load = Overload(policy, seed)
    load.run(300)
    assert load.scheduler.num_waiting > 20, "this was to be an overload"
    passed = [(taken, other) for taken, others in load.admissions for other in others]
    assert len(passed) > 1000
    overtaken = 0
    for taken, other in passed:
        overtaken += other.arrival_index < taken.arrival_index
        if policy == "fcfs":
            assert other.arrival_index > taken.arrival_index
        if policy == "edf":
            assert load.deadlines[other] >= load.deadlines[taken]
        assert not load.deadlines[other] <= taken.arrival_time  # the bound of edf and lrs; fcfs keeps it too
    assert (overtaken > 0) == (policy != "fcfs")


def test_relative_slack_alone_would_break_the_bound_that_lrs_keeps():
    policy = Lrs(second_a_row(), 2.0, 6.0)
    long, short = make_request(0.0, 50), make_request(101.0, 3)
    queue = policy.make_queue()
    for request in (long, short):
        policy.arrive(request)
        queue.push(request)
    now = 130.0  # both are late, the short one for five times its allowance
    assert policy.slack(short, now) < policy.slack(long, now)
    assert queue.peek(now) is long


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_preempted_request_keeps_its_place(policy):
    load = Overload(policy, 0)
    requests = [make_request(float(arrival), 10, 4) for arrival in range(4)]
    for request in requests:
        load.managers.add(request)
        load.scheduler.add(request)
    load.now = 4.0
    load.step()
    first = load.scheduler.running()[0]
    assert first is requests[0]
    later = make_request(4.0, 10, 4)
    load.managers.add(later)
    load.scheduler.add(later)
    load.managers.preempt(first.id)
    load.scheduler.retract(first)
    assert load.scheduler.waiting() == [first, later]
    assert first.arrival_time == 0.0
