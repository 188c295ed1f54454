"""Pins that keep blocks from requests: when a step lifts them, and which."""

from __future__ import annotations

import random

from lockstep.rollout.kv.events import PinEvent
from lockstep.tests.rollout.scheduling.scripted_loop import Loop, rows
from lockstep.tests.support.covering import covering


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
