"""Scripted traces on a pool of four blocks, then random traces: every request is answered, and there is no deadlock."""

from __future__ import annotations

import random

import pytest

from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.policies import fcfs, find_policy, pick_victim
from lockstep.rollout.scheduling.scheduler import Scheduler
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence, State
from lockstep.tests.rollout.scheduling.scripted_loop import SIZE, Loop, rows
from lockstep.tests.support.covering import covering

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


def test_more_samples_of_a_prompt_than_may_run_hold_up_other_prompts_for_a_step_at_most():
    loop = Loop(64, chunk=4, seqs=4)
    prompt = list(range(40))
    for number in range(9):
        loop.add(f"sample {number}", prompt)
    loop.add("other", 3)
    scheduled = [[id for id, *_ in rows(loop.step())] for _ in range(3)]
    assert scheduled[0] == ["sample 0"]
    assert "other" in scheduled[2], "they waited for the whole prompt"
    loop.drain()


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
