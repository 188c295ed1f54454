"""Scripted traces on a pool of four blocks, then random traces: every request is answered, and there is no deadlock."""

from __future__ import annotations

import random

import pytest

from lockstep.rollout.config import ADMISSION_RATIO as INITIAL_RATIO
from lockstep.rollout.kv.events import PinEvent
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling import admission
from lockstep.rollout.scheduling.admission import MINIMUM_SHARE, NUM_DECAY_STEPS, RISE
from lockstep.rollout.scheduling.policies import fcfs, find_policy, pick_victim
from lockstep.rollout.scheduling.scheduler import Scheduler, StepLimits
from lockstep.rollout.sequences.engine_manager import EngineSequenceManager
from lockstep.rollout.sequences.request import Request, RequestOptions
from lockstep.rollout.sequences.sequence import Sequence, State
from lockstep.rollout.sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager
from lockstep.tests.support.covering import covering

SIZE = 4


class Loop:
    """The engine's loop without a model: the token after n known ones is n."""

    def __init__(
        self,
        num_blocks: int = 4,
        *,
        seqs: int = 8,
        rows: int = 64,
        chunk: int | None = None,
        context: int = 1000,
        prefix_cache: bool = True,
        policy: str = "fcfs",
    ) -> None:
        self.now = 0.0  # a step is a second
        self.ledger = KVLedger(num_blocks, SIZE, prefix_cache)
        self.limits = StepLimits(seqs, rows, chunk or rows, context)
        self.scheduler = Scheduler(self.ledger, self.limits, policy, clock=lambda: self.now)
        self.controller = EngineSequenceManager(frozenset(), context)
        self.worker = WorkerSequenceManager()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0

    def add(self, id: str, prompt: list[int] | int, new: int = 4, **options: object) -> Request:
        """Add a request. A prompt given as a number is that many tokens that no other prompt has."""
        number = len(self.requests)
        prompt = [1000 * (number + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(max_new_tokens=new)
        arrival = self.now + number * 1e-6
        request = Request(Sequence(id, prompt), params, RequestOptions(**options), 0, 0, arrival, number, None)
        self.requests[id] = request
        self.controller.add(request)
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduleOutput:
        self.now += 1.0
        output = self.scheduler.schedule()
        self.check_limits(output)
        self.controller.on_schedule(output)
        self.worker.on_schedule(output)
        results = [self.result(item) for item in output.scheduled]
        ended = [id for id, _ in (*output.ignored, *output.exhausted)]
        ended += self.controller.on_step_completed(results)
        self.worker.on_step_completed(results)
        self.scheduler.on_step_completed(output, {item.id: self.requests[item.id] for item in output.scheduled})
        self.scheduler.on_step_timed(output, 0.1 + 0.1 * output.num_tokens)
        self.num_preemptions += len(output.preempted)
        for id in ended:
            self.end(id)
        self.ledger.check()
        assert self.controller.state_hash() == self.worker.state_hash()
        return output

    def end(self, id: str) -> None:
        self.scheduler.remove(self.requests[id])
        self.controller.free(id)
        if id in self.worker:
            self.worker.free(id)

    def result(self, item: ScheduledSequence) -> SequenceResult:
        known = self.worker.sequence(item.id).num_tokens
        assert len(self.worker.block_table(item.id)) * SIZE >= item.start + item.num_tokens
        assert self.worker.block_table(item.id) == self.ledger.block_table(self.requests[item.id])
        assert item.start + item.num_tokens <= known
        is_last = item.start + item.num_tokens == known
        token = (known, -1.0) if is_last else (None, None)
        return SequenceResult(item.id, item.incarnation, item.num_tokens, *token)

    def check_limits(self, output: ScheduleOutput) -> None:
        assert output.num_tokens <= self.limits.max_num_batched_tokens
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        ids = [item.id for item in output.scheduled]
        assert len(set(ids)) == len(ids) and not set(ids) & set(output.preempted)
        assert all(0 < item.num_tokens <= self.limits.chunked_prefill_size for item in output.scheduled)

    def drain(self, limit: int = 5000) -> int:
        """Run steps until no request is left."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                self.ledger.check_idle()
                assert len(self.controller) == len(self.worker) == 0
                return steps
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.scheduler.running()}")


def rows(output: ScheduleOutput) -> list[tuple[str, int, int]]:
    return [(item.id, item.start, item.num_tokens) for item in output.scheduled]


# -- one step --------------------------------------------------------------------------------------


def test_prompt_is_prefilled_in_chunks_and_then_decoded():
    loop = Loop(chunk=4)
    loop.add("a", 10, new=2)
    assert [rows(loop.step()) for _ in range(4)] == [
        [("a", 0, 4)],
        [("a", 4, 4)],
        [("a", 8, 2)],
        [("a", 10, 1)],
    ]
    assert not loop.scheduler.has_work


def test_blocks_are_taken_as_rows_need_them():
    loop = Loop(chunk=4)
    loop.add("a", 10, new=4)
    assert [len(loop.step().scheduled[0].new_blocks) for _ in range(6)] == [1, 1, 1, 0, 0, 1]


def test_decodes_come_before_chunks_of_prompts_and_those_before_newcomers():
    loop = Loop(16, rows=6)
    loop.add("decodes", 3, new=9)
    loop.step()
    loop.add("prefills", 12)
    assert rows(loop.step()) == [("decodes", 3, 1), ("prefills", 0, 5)]
    loop.add("waits", 4)
    assert rows(loop.step()) == [("decodes", 4, 1), ("prefills", 5, 5)]
    assert rows(loop.step()) == [("decodes", 5, 1), ("prefills", 10, 2), ("waits", 0, 3)]


def test_decode_goes_first_even_when_the_prompt_under_way_was_admitted_earlier():
    loop = Loop(16, rows=8, chunk=4)
    loop.add("long", 30)
    loop.add("short", 2, new=9)
    assert rows(loop.step()) == [("long", 0, 4), ("short", 0, 2)]
    assert rows(loop.step())[0] == ("short", 2, 1)


def test_budget_of_one_row_still_finishes():
    loop = Loop(seqs=1, rows=1)
    loop.add("a", 5, new=2)
    assert loop.drain() == 6


def test_no_more_sequences_hold_blocks_than_allowed():
    loop = Loop(16, seqs=2)
    for id in "abc":
        loop.add(id, 2, new=3)
    assert [id for id, *_ in rows(loop.step())] == ["a", "b"]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    loop.drain()


def test_first_come_is_first_served_and_a_large_one_is_not_overtaken():
    loop = Loop(4)
    loop.add("a", 8, new=2)
    loop.step()
    loop.add("large", 12)
    loop.add("small", 1)
    assert rows(loop.step()) == [("a", 8, 1)]
    assert [r.id for r in loop.scheduler.waiting()] == ["large", "small"]
    loop.drain()


def test_thousands_may_wait():
    loop = Loop(64, seqs=32, rows=256)
    for number in range(3000):
        loop.add(f"r{number}", 3, new=2)
    assert loop.drain() < 300


# -- prefix cache ----------------------------------------------------------------------------------


def test_equal_prompts_wait_for_the_blocks_of_the_first():
    loop = Loop(16)
    prompt = list(range(10))
    for id in "abc":
        loop.add(id, prompt)
    assert rows(loop.step()) == [("a", 0, 10)]
    assert rows(loop.step()) == [("a", 10, 1), ("b", 8, 2), ("c", 8, 2)]
    assert [loop.requests[id].num_cached_tokens for id in "abc"] == [0, 8, 8]


def test_waiting_for_a_block_does_not_hold_up_other_prompts():
    loop = Loop(16)
    loop.add("a", list(range(10)))
    loop.add("same", list(range(10)))
    loop.add("other", 3)
    assert [id for id, *_ in rows(loop.step())] == ["a", "other"]


def test_those_who_wait_take_over_when_the_first_is_aborted():
    loop = Loop(16, chunk=4)
    prompt = list(range(12))
    for id in "abc":
        loop.add(id, prompt)
    assert rows(loop.step()) == [("a", 0, 4)]
    loop.controller.free("a")
    loop.worker.free("a")
    loop.scheduler.remove(loop.requests["a"])
    assert rows(loop.step()) == [("b", 4, 4)]  # computed blocks stay cached
    loop.drain()
    assert [loop.requests[id].sequence.num_output_tokens for id in "bc"] == [4, 4]


def test_aborted_while_parked_is_never_scheduled():
    loop = Loop(16)
    loop.add("a", list(range(10)))
    parked = loop.add("b", list(range(10)))
    loop.step()
    loop.scheduler.remove(parked)
    loop.controller.free("b")
    assert [id for id, *_ in rows(loop.step())] == ["a"]
    loop.drain()


def test_equal_prompts_with_wanted_prompt_logprobs_compute_them_all():
    loop = Loop(16)
    for id in "ab":
        loop.add(id, list(range(10)), logprob_start_len=0)
    assert rows(loop.step()) == [("a", 0, 10), ("b", 0, 10)]
    loop.drain()


def test_prompts_that_share_a_stem_share_its_blocks():
    loop = Loop(16)
    loop.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    loop.add("b", [1, 2, 3, 4, 50, 60, 70, 80, 90])
    loop.step()
    assert ("b", 4, 5) in rows(loop.step())
    loop.drain()


def test_without_prefix_cache_nobody_waits_for_anybody():
    loop = Loop(16, prefix_cache=False)
    for id in "ab":
        loop.add(id, list(range(10)))
    assert rows(loop.step()) == [("a", 0, 10), ("b", 0, 10)]


# -- a full pool -----------------------------------------------------------------------------------


def test_latest_arrival_gives_way_keeps_its_tokens_and_comes_back():
    loop = Loop(8)  # of 4 blocks each is expected to need, and 5 it does
    first, second = loop.add("a", 4, new=16), loop.add("b", 4, new=16)
    loop.step()
    while loop.num_preemptions == 0:
        output = loop.step()
    assert output.preempted == ("b",) and [id for id, *_ in rows(output)] == ["a"]
    assert second.sequence.state is State.WAITING_PREEMPT
    assert second.sequence.num_output_tokens == 13 and second.num_retractions == 1
    loop.drain()
    assert first.sequence.output_ids == second.sequence.output_ids == list(range(4, 20))
    assert first.num_retractions == 0


def test_preempted_one_resumes_from_its_cached_blocks_and_counts_only_its_first_hit():
    loop = Loop(9)
    loop.add("a", 4, new=18)
    second = loop.add("b", 4, new=18)
    while not loop.num_preemptions:
        loop.step()
    while second.sequence.state is State.WAITING_PREEMPT:
        output = loop.step()
    resumed = next(item for item in output.scheduled if item.id == "b")
    assert resumed.incarnation == 1
    assert resumed.token_ids is None
    assert second.num_cached_tokens == 0
    loop.drain()


def test_nobody_is_admitted_in_the_step_that_preempts():
    loop = Loop(8)
    loop.add("a", 4, new=16)
    loop.add("b", 4, new=16)
    loop.step()
    loop.add("c", 1)
    while not loop.num_preemptions:
        output = loop.step()
    assert [id for id, *_ in rows(output)] == ["a"]
    loop.drain()


def test_a_block_is_kept_back_for_each_running_sequence_so_that_newcomers_do_not_push_it_out():
    loop = Loop(4)
    loop.add("a", 3, new=5)
    loop.step()
    loop.add("b", 11, new=1)  # would take all three blocks that are left
    assert [id for id, *_ in rows(loop.step())] == ["a"]
    loop.drain()
    assert loop.num_preemptions == 0


def test_late_step_of_an_earlier_incarnation_publishes_nothing():
    loop = Loop(8, chunk=4)
    request = loop.add("a", list(range(9)))
    late = loop.scheduler.schedule()
    for manager in (loop.controller, loop.worker):
        manager.on_schedule(late)
        manager.preempt("a")
    loop.scheduler.retract(request)
    output = loop.scheduler.schedule()
    for manager in (loop.controller, loop.worker):
        manager.on_schedule(output)
    loop.scheduler.on_step_completed(late, {"a": request})
    twin = Request(Sequence("twin", list(range(9))), SamplingParams(), RequestOptions(), 0, 0, 9.0, 9, None)
    assert loop.ledger.match(twin) == []
    loop.scheduler.on_step_completed(output, {"a": request})
    assert len(loop.ledger.match(twin)) == 1
    loop.ledger.check()


def test_lone_sequence_that_fills_the_pool_ends_with_length_and_says_so():
    loop = Loop(4)
    request = loop.add("a", 6, new=100)
    loop.drain()
    assert request.finish_reason.type == "length"
    assert request.finish_reason.length == request.sequence.num_output_tokens == 11
    why = "the KV pool of 4 blocks of 4 tokens is full with this sequence alone at 17 tokens"
    assert request.finish_reason.message == why


def test_prompt_that_can_never_fit_is_ignored_with_the_numbers():
    loop = Loop(4)
    request = loop.add("a", 17)
    small = loop.add("b", 3)
    loop.step()
    assert request.sequence.state is State.IGNORED
    assert request.finish_reason.type == "ignored"
    assert "17 tokens" in request.finish_reason.message and "4 blocks of 4 tokens" in request.finish_reason.message
    loop.drain()
    assert small.sequence.num_output_tokens == 4


def test_prompt_that_fills_the_pool_exactly_gets_its_one_token():
    loop = Loop(4)
    request = loop.add("a", 16, new=5)
    loop.drain()
    assert (request.finish_reason.type, request.sequence.num_output_tokens) == ("length", 1)


def test_prompt_that_fills_the_context_is_ignored_unless_it_is_only_scored():
    loop = Loop(16, context=10)
    generates, scores, too_long = loop.add("a", 10, new=1), loop.add("b", 10, new=0), loop.add("c", 11, new=0)
    loop.drain()
    assert (generates.finish_reason.type, scores.finish_reason.type) == ("ignored", "length")
    assert too_long.finish_reason.type == "ignored"
    assert "context of 10" in generates.finish_reason.message


@pytest.mark.parametrize("num_known", [16, 17])
def test_retracted_sequence_that_filled_the_pool_ends_with_length_and_not_in_an_illegal_state(num_known):
    loop = Loop(4)
    request = loop.add("a", 6, new=100)
    while request.sequence.num_tokens < num_known:
        loop.step()
    loop.controller.preempt("a")
    loop.worker.preempt("a")
    loop.scheduler.retract(request)
    loop.drain()
    assert request.finish_reason.type == "length"
    assert request.sequence.num_output_tokens == 11  # as without the retraction


def test_victim_is_the_lowest_priority_then_fewest_generated_then_longest_input():
    def request(arrival: float, generated: int, prompt: int) -> Request:
        request = Request(Sequence("r", [1] * prompt), SamplingParams(), RequestOptions(), 0, 0, arrival, 0, None)
        request.sequence.token_ids += [2] * generated
        return request

    early, late = request(0.0, 0, 9), request(1.0, 5, 1)
    assert pick_victim([early, late], fcfs) is late
    more, fewer = request(0.0, 5, 9), request(0.0, 2, 1)
    assert pick_victim([more, fewer], fcfs) is fewer
    short, long = request(0.0, 2, 3), request(0.0, 2, 8)
    assert pick_victim([long, short], fcfs) is long


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="policy must be one of edf, fcfs, lrs, not 'lifo'"):
        find_policy("lifo")


# -- pins ------------------------------------------------------------------------------------------


def pinned_loop(num_blocks: int, **settings: object) -> Loop:
    """Build a loop whose pins may protect its whole pool."""
    loop = Loop(num_blocks, **settings)
    loop.ledger.pins.max_blocks = num_blocks
    loop.pin_events = []
    loop.ledger.events.attach(lambda batch: loop.pin_events.extend(batch.events if batch.topic == "pins" else ()))
    return loop


def pin_prompt(loop: Loop, id: str, prompt: list[int] | int) -> list[int]:
    """Run a prompt, pin all of its blocks that stay cached, and return their hashes."""
    known = {node.hash for node in loop.ledger.cache}
    loop.add(id, prompt, new=1)
    loop.drain()
    hashes = [node.hash for node in loop.ledger.cache if node.hash not in known]
    assert loop.ledger.pins.pin(hashes, id).num_pinned == len(hashes) > 0
    return hashes


def auto_unpinned(loop: Loop) -> list[PinEvent]:
    loop.ledger.events.flush()
    return [event for event in loop.pin_events if event.kind == "auto_unpinned"]


def test_prompt_that_pins_keep_out_runs_in_its_first_step_and_only_the_oldest_pins_that_suffice_go(caplog):
    loop = pinned_loop(8)
    old, recent = pin_prompt(loop, "old", 12), pin_prompt(loop, "recent", 12)
    assert loop.ledger.num_available == 2
    loop.add("needs four", 16, new=1)
    [item] = loop.step().scheduled
    assert (item.id, item.num_tokens) == ("needs four", 16)
    assert [e.block_hashes for e in auto_unpinned(loop)] == [(old[2], old[1])]
    assert [bool(loop.ledger.pins.owners(hash)) for hash in (*old, *recent)] == [True, False, False, True, True, True]
    assert loop.ledger.pins.num_auto_unpinned == 2
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    why = "request needs four needs 4 blocks, 2 were left"
    assert record.getMessage() == f"pins on 2 blocks were lifted, 4 stand: {why}"
    assert auto_unpinned(loop)[0].reason == why and auto_unpinned(loop)[0].owner == "old"
    loop.drain()


def test_one_pin_goes_where_one_is_enough_though_older_ones_stand():
    loop = pinned_loop(8)
    small = pin_prompt(loop, "small", 4)
    loop.add("large", 20, new=1)
    loop.drain()
    [leaf] = [node.hash for node in loop.ledger.cache if node.depth == 4]
    loop.ledger.pins.pin([leaf], "large")  # guards five blocks
    loop.add("next", 24, new=1)
    assert len(loop.step().scheduled) == 1
    assert [e.owner for e in auto_unpinned(loop)] == ["large"]
    assert loop.ledger.pins.owners(small[0]) == {"small": 1}
    loop.drain()


def test_room_to_decode_counts_when_a_request_is_taken_up():
    loop = pinned_loop(8)
    pin_prompt(loop, "pinned", 20)
    loop.add("long answer", 4, new=16)  # expects 4 + 0.7 * 15 tokens: 4 blocks, and 3 are left
    loop.step()
    assert [len(e.block_hashes) for e in auto_unpinned(loop)] == [1]
    loop.drain()


def test_blocks_that_the_request_itself_hits_are_not_unpinned_for_it():
    loop = pinned_loop(8)
    prompt = list(range(5000, 5012))
    own = pin_prompt(loop, "own", prompt)
    other = pin_prompt(loop, "other", 16)
    loop.ledger.check()
    loop.add("again", [*prompt, *range(8)], new=1)  # 5 blocks, 3 of which are there
    [item] = loop.step().scheduled
    assert item.start == 12
    assert [e.owner for e in auto_unpinned(loop)] == ["other"] and len(auto_unpinned(loop)[0].block_hashes) == 1
    assert all(loop.ledger.pins.owners(hash) for hash in own)
    loop.drain()
    assert [bool(loop.ledger.pins.owners(hash)) for hash in other] == [True] * 3 + [False]


def test_lone_sequence_whose_decode_meets_the_pins_goes_on_to_its_end():
    loop = pinned_loop(8)
    loop.add("filler", 20, new=1)
    loop.drain()
    loop.add("lone", 4, new=28)
    loop.step()
    hashes = {True: [], False: []}
    for node in loop.ledger.cache:
        hashes[node.num_holders > 0].append(node.hash)
    loop.ledger.pins.pin(hashes[True])  # its own block
    assert loop.ledger.pins.pin(hashes[False], "filler").num_pinned == 5
    steps = loop.drain()
    assert steps <= 28 and loop.requests["lone"].sequence.num_output_tokens == 28
    assert loop.requests["lone"].num_retractions == 0
    assert sum(len(e.block_hashes) for e in auto_unpinned(loop)) == 5  # one by one, as its table grew
    assert [e.owner for e in auto_unpinned(loop)] == ["filler"] * 5


def test_lone_sequence_that_fills_the_pool_takes_the_last_pin_before_it_ends_with_length():
    loop = pinned_loop(4)
    pin_prompt(loop, "pinned", 8)
    loop.add("greedy", 3, new=500)
    loop.drain()
    assert loop.requests["greedy"].finish_reason.type == "length"
    assert loop.requests["greedy"].sequence.num_tokens == 17
    assert len(loop.ledger.pins) == 0


def test_pins_of_the_whole_pool_never_make_anybody_wait_for_good():
    loop = pinned_loop(4)
    pin_prompt(loop, "all", 16)
    assert loop.ledger.num_available == 0
    for number in range(6):
        loop.add(f"r{number}", 3 + number, new=5)
    assert loop.drain() < 60
    assert all(request.finish_reason.type == "length" for request in loop.requests.values())


def test_while_others_run_pins_stay_and_the_request_waits_for_their_end():
    loop = pinned_loop(8)
    pin_prompt(loop, "pinned", 16)
    loop.add("runs", 8, new=6)
    loop.step()
    loop.add("waits", 12, new=1)
    outputs = [rows(loop.step()) for _ in range(5)]
    assert all(len(output) == 1 for output in outputs) and len(loop.ledger.pins) == 4
    loop.drain()
    assert auto_unpinned(loop) == []


def test_expired_pins_make_room_without_a_warning(caplog):
    loop = pinned_loop(4)
    loop.ledger.pins._clock = lambda: loop.now
    loop.add("a", 16, new=1)
    loop.drain()
    loop.ledger.pins.pin([node.hash for node in loop.ledger.cache], ttl_s=3)
    loop.now += 3
    loop.add("b", 16, new=1)
    assert len(loop.step().scheduled) == 1
    assert (loop.ledger.pins.num_expired, loop.ledger.pins.num_auto_unpinned) == (4, 0)
    assert not caplog.records
    loop.drain()


@covering(1, rest="slow", seed=range(4), policy=["fcfs", "edf", "lrs"])
def test_random_traces_with_pins_drain_with_every_request_answered(seed, policy):
    dice = random.Random(seed)
    loop = pinned_loop(12, seqs=4, rows=16, chunk=dice.choice((3, 5, 16)), policy=policy)
    num_pinned = 0
    for number in range(150):
        if dice.random() < 0.3:
            prompt = [1] * dice.randint(1, 12) + [dice.randint(2, 3)] * dice.randint(0, 24)
            loop.add(f"r{number}", prompt, new=dice.randint(1, 14))
        if dice.random() < 0.3 and len(loop.ledger.cache):
            hashes = dice.choices([node.hash for node in loop.ledger.cache], k=3)
            num_pinned += loop.ledger.pins.pin(hashes, ttl_s=dice.choice((None, 5.0))).num_pinned
        if dice.random() < 0.03:
            running = loop.scheduler.running()
            for request in running:
                loop.controller.preempt(request.id)
                loop.worker.preempt(request.id)
                loop.scheduler.retract(request)
        loop.step()
    loop.drain(limit=2000)
    assert num_pinned > 20 and loop.ledger.pins.num_auto_unpinned > 5
    kinds = {request.finish_reason.type for request in loop.requests.values()}
    assert kinds == {"length"}
    standing = [
        (node.hash, count) for node in loop.ledger.cache for count in loop.ledger.pins.owners(node.hash).values()
    ]
    for hash, count in standing:
        loop.ledger.pins.unpin([hash] * count)
    assert len(loop.ledger.pins) == loop.ledger.cache.num_guarded == 0


# -- the reserve of admission ----------------------------------------------------------------------


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


# -- the cost of a step ----------------------------------------------------------------------------


class CountingLedger(KVLedger):
    """A ledger that counts lookups of waiting requests."""

    num_matches = 0

    def match(self, request):
        self.num_matches += 1
        return super().match(request)


def most_looks_in_a_step(policy: str, num_waiting: int, prompt) -> int:
    """Return the most lookups and rankings of any step while `num_waiting` requests wait, until all have ended."""
    looks = []
    loop = Loop(64, seqs=4, rows=16, chunk=4, context=40, policy=policy)
    loop.ledger = CountingLedger(64, SIZE, True)
    loop.scheduler = Scheduler(loop.ledger, loop.limits, policy, clock=lambda: loop.now)
    chance = random.Random(0)
    for number in range(num_waiting):
        loop.add(f"r{number}", prompt(chance), new=chance.randint(1, 3))
    policy_of = loop.scheduler._policy
    rank, num_ranks = policy_of.rank, 0

    def counted(request, now):
        nonlocal num_ranks
        num_ranks += 1
        return rank(request, now)

    policy_of.rank = counted
    while loop.scheduler.has_work:
        loop.ledger.num_matches = num_ranks = 0
        num_given_up = len(loop.step().ignored)
        looks.append(loop.ledger.num_matches + num_ranks + num_given_up)
    return max(looks)


def any_length(chance: random.Random) -> int:
    return chance.randint(1, 30)


def equal(chance: random.Random) -> list[int]:
    return list(range(20))  # all share a prefix that is being computed


def hopeless(chance: random.Random) -> int:
    return 100  # none can ever run


@covering(1, rest="slow", policy=["fcfs", "edf", "lrs"], prompt=[any_length, equal, hopeless])
def test_a_step_looks_at_no_more_requests_when_more_wait(policy, prompt):
    """Count for each policy. LRS ranks a head per class of allowances, of which there are at most 64."""
    few, many = (most_looks_in_a_step(policy, num_waiting, prompt) for num_waiting in (30, 600))
    assert many <= 2 * few


# -- random traces ---------------------------------------------------------------------------------


@covering(1, rest="slow", seed=range(25), policy=["fcfs", "edf", "lrs"])
def test_random_traces_drain_with_every_request_answered(seed, policy):
    """Drain small pools with shared prefixes, aborts, retractions, flushes and epochs; tokens never depend on any."""
    chance = random.Random(seed)
    loop = Loop(
        chance.choice((4, 5, 9, 20)),
        seqs=chance.choice((1, 3, 8)),
        rows=chance.choice((8, 11, 64)),
        chunk=chance.choice((1, 3, 8, None)),
        context=chance.choice((15, 40)),
        prefix_cache=chance.random() < 0.8,
        policy=policy,
    )
    aborted = set()
    stems = [[chance.randrange(3) for _ in range(12)] for _ in range(3)]
    for number in range(60):
        stem = chance.choice(stems)[: chance.randrange(13)]
        prompt = stem + [chance.randrange(2) for _ in range(chance.randint(1, 9))]
        loop.add(f"r{number}", prompt, chance.randint(0, 12), logprob_start_len=chance.choice((-1, -1, 0)))
        for _ in range(chance.randrange(4)):
            loop.step()
        roll = chance.random()
        live = [r for r in loop.requests.values() if r.id in loop.controller]
        if roll < 0.1 and live:
            victim = chance.choice(live)
            aborted.add(victim.id)
            loop.end(victim.id)
        elif roll < 0.2 and loop.scheduler.num_running:
            victim = chance.choice(loop.scheduler.running())
            loop.controller.preempt(victim.id)
            loop.worker.preempt(victim.id)
            loop.scheduler.retract(victim)
        elif roll < 0.25:
            loop.ledger.flush()
        elif roll < 0.3:
            loop.ledger.start_epoch()
        loop.ledger.check()
    loop.drain()
    for request in loop.requests.values():
        if request.id in aborted:
            continue
        sequence, reason = request.sequence, request.finish_reason
        assert reason is not None, request.id
        assert sequence.output_ids == list(range(sequence.num_prompt_tokens, sequence.num_tokens))
        if reason.type == "ignored":
            limit = min(loop.limits.max_model_len, loop.ledger.usage.num_blocks * SIZE + 1)
            assert sequence.num_prompt_tokens >= limit and sequence.num_output_tokens == 0
        elif reason.message is None:
            full = loop.limits.max_model_len - sequence.num_prompt_tokens
            assert sequence.num_output_tokens == min(request.params.max_new_tokens, full)
        else:  # ended by the pool, which it filled
            assert sequence.num_tokens == loop.ledger.usage.num_blocks * SIZE + 1
