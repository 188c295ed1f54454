"""Slots of recurrent states and their snapshots: exact counts, and hits only where a snapshot is."""

from __future__ import annotations

import random

import pytest

from lockstep.rollout.errors import LedgerError
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.rollout.states.slots import SlotLedger

SIZE = 4


def a_request(token_ids: list[int]) -> Request:
    return Request(Sequence("r", token_ids), SamplingParams(), RequestOptions(), 0, 0, 0.0, 0, None)


def a_ledger(num_sequences: int = 3, num_snapshots: int = 3) -> KVLedger:
    return KVLedger(32, SIZE, True, states=SlotLedger(num_sequences, num_snapshots))


def compute(ledger: KVLedger, request: Request) -> int:
    """Admit a request and run its tokens in chunks; returns its cached tokens."""
    nodes = ledger.match(request)
    ledger.open(request, nodes)
    start, end = len(nodes) * SIZE, request.sequence.num_tokens
    while start < end:
        num_rows = ledger.num_rows_to_snapshot(request, start, end - start)
        assert ledger.grow(request, start + num_rows) is not None
        ledger.plan_states(request, start, start + num_rows)
        start += num_rows
        ledger.publish(request, start)
        ledger.check()
    return len(nodes) * SIZE


def decode(ledger: KVLedger, request: Request, num_tokens: int) -> None:
    for _ in range(num_tokens):
        start = request.sequence.num_tokens
        request.sequence.token_ids.append(start)
        assert ledger.grow(request, start + 1) is not None
        ledger.plan_states(request, start, start + 1)
        ledger.publish(request, start + 1)
        ledger.check()


def test_a_step_reads_one_slot_and_writes_another_and_a_cancelled_one_gives_them_to_the_next():
    slots, request = SlotLedger(1, 0), a_request([0])
    slots.open(request, None, 0)
    first = slots.plan(request, 0, 5)
    assert first.read == 0 and first.write > 0
    assert slots.plan(request, 0, 3) == first
    second = slots.plan(request, 3, 4)
    assert second.read == first.write and second.write not in (0, first.write)
    assert slots.plan(request, 3, 4) == second
    third = slots.plan(request, 4, 5)
    assert (third.read, third.write) == (second.write, first.write)
    assert slots.check() == [] and slots.num_free == 0
    slots.close(request)
    assert slots.check() == slots.check_idle() == [] and slots.num_free == 2


def test_a_hit_goes_to_the_deepest_snapshot_and_the_prompt_leaves_one_before_its_last_token():
    ledger, tokens = a_ledger(), list(range(18))
    assert compute(ledger, a_request(tokens)) == 0
    assert [len(ledger.match(a_request(tokens[:n]))) for n in (4, 16, 17, 18)] == [0, 0, 4, 4]
    assert len(ledger.match(a_request([*tokens, 5, 6]))) == 4


def test_a_second_request_leaves_a_snapshot_where_it_leaves_the_cached_blocks():
    ledger, stem = a_ledger(), list(range(9))
    compute(ledger, a_request([*stem, *range(50, 60)]))
    assert compute(ledger, a_request([*stem, *range(60, 70)])) == 0
    assert compute(ledger, a_request([*stem, *range(70, 80)])) == 8


def test_the_snapshot_of_an_output_moves_with_it_and_stays_after_the_end():
    ledger, request = a_ledger(), a_request(list(range(6)))
    compute(ledger, request)
    for num_tokens, snapshots in ((1, 1), (1, 2), (4, 2), (4, 2)):
        decode(ledger, request, num_tokens)
        assert ledger.states.num_snapshots == snapshots
    ledger.close(request)
    assert len(ledger.match(a_request([*request.sequence.token_ids, 7, 7]))) == 4
    ledger.check_idle()
    ledger.check()


def test_the_least_recently_used_snapshot_makes_room_and_pins_keep_theirs():
    ledger, prompts = a_ledger(num_snapshots=2), [[n] * 6 for n in range(4)]
    for tokens in prompts[:2]:
        compute(ledger, request := a_request(tokens))
        ledger.close(request)
    pinned = ledger.match(a_request(prompts[0]))
    ledger.pins.pin([pinned[0].hash])
    compute(ledger, a_request(prompts[2]))
    assert [len(ledger.match(a_request(tokens))) for tokens in prompts[:3]] == [1, 0, 1]
    ledger.pins.pin([ledger.match(a_request(prompts[2]))[0].hash])
    compute(ledger, a_request(prompts[3]))  # every snapshot is pinned: it leaves none
    assert [len(ledger.match(a_request(tokens))) for tokens in prompts] == [1, 0, 1, 0]
    assert ledger.states.num_evicted == 1
    ledger.check()


def test_a_commit_voids_snapshots_and_a_sequence_keeps_its_state_but_leaves_none():
    ledger, request = a_ledger(), a_request(list(range(6)))
    compute(ledger, request)
    ledger.start_epoch()
    assert ledger.states.num_snapshots == 0
    decode(ledger, request, 8)
    assert ledger.states.num_snapshots == 0
    ledger.close(request)
    ledger.check_idle()


def test_an_evicted_block_takes_its_snapshot_along_while_its_reader_keeps_the_slot():
    ledger, tokens = a_ledger(), list(range(6))
    compute(ledger, first := a_request(tokens))
    ledger.close(first)
    ledger.open(second := a_request(tokens), ledger.match(second))
    ledger.start_epoch()
    assert (ledger.states.num_snapshots, ledger.states.num_free) == (0, ledger.states.num_slots - 2)
    assert ledger.plan_states(second, 4, 6).read > 0
    ledger.check()


def test_taking_tokens_back_returns_to_the_deepest_snapshot_before_them():
    ledger, request = a_ledger(), a_request(list(range(10)))
    compute(ledger, request)
    decode(ledger, request, 5)
    ledger.plan_states(request, 15, 16)
    assert [ledger.first_row_after_roll_back(request, n) for n in (15, 14, 12, 11, 8, 7)] == [15, 12, 12, 8, 8, 0]
    assert ledger.roll_back(request, 15) == 15
    assert ledger.roll_back(request, 14) == 12
    assert ledger.plan_states(request, 12, 15).read > 0
    assert ledger.roll_back(request, 5) == 0
    assert ledger.plan_states(request, 0, 15).read == 0
    ledger.check()


def test_a_lost_slot_is_found_when_idle():
    ledger = a_ledger()
    ledger.states._free.pop()
    with pytest.raises(LedgerError, match="1 state slots are used, but there are 0 snapshots"):
        ledger.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_never_lack_a_slot_and_lose_none(seed):
    ledger, dice, running = a_ledger(3, 2), random.Random(seed), []
    for _ in range(300):
        event = dice.choice(("open", "decode", "decode", "close", "pin", "commit", "roll back"))
        if event == "open" and len(running) < 3:
            running.append(request := a_request([dice.randrange(2)] * 5 + [dice.randrange(2)] * dice.randrange(1, 8)))
            compute(ledger, request)
        elif event == "decode" and running and (request := dice.choice(running)).sequence.num_tokens < 30:
            decode(ledger, request, dice.randrange(1, 6))
        elif event == "close" and running:
            ledger.close(request := running.pop(dice.randrange(len(running))))
            ledger.forget(request)
        elif event == "pin" and len(ledger.cache):
            ledger.pins.pin([dice.choice(list(ledger.cache)).hash])
        elif event == "commit" and dice.random() < 0.2:
            ledger.start_epoch()
        elif event == "roll back" and running:
            request = dice.choice(running)
            first = dice.randrange(request.sequence.num_tokens)
            start, end = ledger.roll_back(request, first), request.sequence.num_tokens
            assert start <= first
            assert ledger.grow(request, end) is not None
            ledger.plan_states(request, start, end)
            ledger.publish(request, end)
        ledger.check()
    for request in running:
        ledger.close(request)
    ledger.check_idle()


# -- drafts ----------------------------------------------------------------------------------------


def drafting_request(ledger: KVLedger) -> Request:
    """Admit a request and plan the step of its last known token's row."""
    request = a_request(list(range(6)))
    compute(ledger, request)
    decode(ledger, request, 1)
    request.sequence.token_ids.append(77)
    ledger.grow(request, 8)
    ledger.plan_states(request, 7, 8)
    return request


@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_the_state_after_the_last_accepted_token_is_kept_and_the_others_are_free(num_accepted):
    ledger = a_ledger(num_snapshots=0)
    request, states = drafting_request(ledger), ledger.states
    num_free, account = states.num_free, states._accounts[request]
    write = account.write
    slots = states.plan_draft(request, 3)
    assert len({*slots, write, account.read}) == 5 and states.num_free == num_free - 3
    states.check()
    with pytest.raises(AssertionError, match="not settled"):
        states.plan(request, 8, 9)
    states.settle_draft(request, num_accepted)
    assert states.check() == [] and states.num_free == num_free
    assert states.plan(request, 8 + num_accepted, 9 + num_accepted).read == (write, *slots)[num_accepted]
    ledger.close(request)
    assert states.check_idle() == [] and states.num_free == states.num_slots - 1


def test_a_draft_has_the_free_slots_that_are_not_reserved():
    ledger = a_ledger(num_sequences=3, num_snapshots=0)  # six slots
    request, states = drafting_request(ledger), ledger.states
    assert states.num_free == 4
    assert ledger.plan_draft(request, 8, 9, num_slots_reserved=9) == 0
    assert ledger.plan_draft(request, 8, 9, num_slots_reserved=3) == 1
    assert ledger.plan_draft(request, 8, 9) == 4
    ledger.close(request)


def test_a_snapshot_inside_an_accepted_draft_is_that_of_its_own_token():
    ledger = a_ledger()
    request, states = drafting_request(ledger), ledger.states
    assert ledger.plan_draft(request, 8, 6) == 6
    slots = states.plan_draft(request, 6)
    request.sequence.token_ids += [70, 71, 72, 73, 74, 75]  # five accepted, and one drawn
    ledger.publish(request, 13)  # the newest full block ends at token 12, the fourth of the draft
    node = ledger._accounts[request].nodes[-1]
    assert states.has_snapshot(node) and states._snapshots[node] == slots[3]
    ledger.settle_draft(request, 13, 5)
    ledger.check()
    assert states.plan(request, 13, 14).read == slots[4]
    ledger.close(request)
    ledger.check()
    assert len(ledger.match(a_request([*request.sequence.token_ids[:13]]))) == 3


def test_the_slots_of_a_draft_come_back_with_its_request():
    ledger = a_ledger()
    request, states = drafting_request(ledger), ledger.states
    states.plan_draft(request, 4)
    ledger.close(request)
    assert states.check() == [] == states.check_idle()
