"""Ownership of blocks: exact after every operation, shared where prefixes are equal, never stale."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lockstep.rollout.errors import LedgerError
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.kv.paths import CachedPaths
from lockstep.rollout.kv.prefix import Prefix
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

SIZE = 4


def a_request(token_ids: list[int], key: str = "", logprobs_from: int = -1) -> Request:
    options = RequestOptions(logprob_start_len=logprobs_from, extra_key=key)
    return Request(Sequence("r", token_ids), SamplingParams(), options, 0, 0, 0.0, 0, None)


def compute(ledger: KVLedger, request: Request) -> list[int]:
    """Admit, grow to all known tokens and publish; returns the block table."""
    ledger.open(request, ledger.match(request))
    assert ledger.grow(request, request.sequence.num_tokens) is not None
    ledger.publish(request, request.sequence.num_tokens)
    ledger.check()
    return list(ledger.block_table(request))


def a_ledger(num_blocks: int = 8, prefix_cache: bool = True) -> KVLedger:
    return KVLedger(num_blocks, SIZE, prefix_cache)


TEN = list(range(10))


def test_equal_prefixes_share_blocks_and_divergent_ones_do_not():
    ledger = a_ledger()
    table = compute(ledger, a_request(TEN))
    same = compute(ledger, a_request(TEN))
    assert same[:2] == table[:2] and same[2] != table[2]
    half = compute(ledger, a_request(TEN[:4] + [77] * 6))
    assert half[0] == table[0] and half[1] not in table + same
    assert ledger.usage.num_held == 6


def test_last_token_is_always_computed_anew():
    ledger = a_ledger()
    compute(ledger, a_request(TEN[:8]))
    assert len(ledger.match(a_request(TEN[:8]))) == 1
    assert len(ledger.match(a_request(TEN[:9]))) == 2


def test_extra_key_separates_equal_prompts():
    ledger = a_ledger()
    table = compute(ledger, a_request(TEN, "left"))
    assert ledger.match(a_request(TEN, "right")) == [] == ledger.match(a_request(TEN))
    assert [node.block for node in ledger.match(a_request(TEN, "left"))] == table[:2]


def test_wanted_prompt_logprobs_stop_a_hit_where_they_start():
    ledger = a_ledger()
    compute(ledger, a_request(TEN))
    hits = [len(ledger.match(a_request(TEN, logprobs_from=start))) for start in range(11)]
    # The log-probability of token t comes from row t - 1, which must run: reusable are t - 1 tokens.
    assert hits == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_without_prefix_cache_nothing_is_kept():
    ledger = a_ledger(prefix_cache=False)
    request = a_request(TEN)
    compute(ledger, request)
    ledger.close(request)
    assert ledger.match(a_request(TEN)) == []
    assert (ledger.usage.num_free, ledger.usage.num_cached) == (8, 0)


def test_closing_caches_full_published_blocks_and_frees_the_rest():
    ledger = a_ledger()
    request = a_request(TEN)
    compute(ledger, request)
    ledger.close(request)
    assert (ledger.usage.num_free, ledger.usage.num_cached, ledger.usage.num_held) == (6, 2, 0)
    ledger.check_idle()


def test_growing_evicts_cached_blocks_but_never_held_ones():
    ledger = a_ledger(4)
    first, second = a_request(TEN[:8]), a_request([50] * 8)
    compute(ledger, first)
    ledger.close(first)
    compute(ledger, second)
    assert ledger.num_available == 2
    third = a_request([60] * 12)
    ledger.open(third, [])
    assert ledger.grow(third, 12) is None  # changes nothing
    assert (ledger.usage.num_cached, ledger.usage.num_free) == (2, 0)
    assert len(ledger.grow(third, 8)) == 2
    ledger.check()
    assert ledger.match(a_request(TEN)) == []


def test_growing_to_what_is_there_adds_nothing():
    ledger = a_ledger()
    request = a_request(TEN)
    ledger.open(request, [])
    assert len(ledger.grow(request, 5)) == 2
    assert ledger.grow(request, 8) == []


def test_same_block_computed_twice_is_published_once_and_both_copies_come_back():
    ledger = a_ledger()
    left, right = a_request(TEN), a_request(TEN)
    for request in (left, right):
        ledger.open(request, [])
        ledger.grow(request, 10)
    for request in (left, right):
        ledger.publish(request, 10)
        ledger.check()
    assert set(ledger.block_table(left)).isdisjoint(ledger.block_table(right))
    ledger.close(left)
    ledger.check()
    ledger.close(right)
    ledger.check()
    assert (ledger.usage.num_free, ledger.usage.num_cached) == (6, 2)


def test_second_copy_of_a_block_gives_way_when_the_pool_runs_short():
    ledger = a_ledger(4)
    first = a_request(TEN[:8])
    compute(ledger, first)
    ledger.close(first)
    second = a_request(TEN[:8], logprobs_from=0)  # must compute everything anew, though two blocks are cached
    table = compute(ledger, second)
    assert (ledger.num_available, ledger.usage.num_held) == (0, 4)
    second.sequence.token_ids += [7] * 8
    assert len(ledger.grow(second, 16)) == 2
    ledger.check()
    ledger.close(second)
    ledger.check()
    assert [node.block for node in ledger.match(a_request(TEN))] == table


def test_copy_stays_while_another_request_reads_the_published_one():
    ledger = a_ledger(4)
    first, second = a_request(TEN[:4]), a_request(TEN[:4], logprobs_from=0)
    compute(ledger, first)
    table = compute(ledger, second)
    assert ledger.grow(second, 16) is None
    assert set(table).isdisjoint(ledger.block_table(first))
    ledger.close(first)
    assert len(ledger.grow(second, 16)) == 3
    ledger.check()


class OneHashPrefix(Prefix):
    def hash(self, index: int) -> int:
        return 77

    def blocks(self, start: int, stop: int) -> list[tuple[int, bytes, str]]:
        return [(77, self.tokens(index), "") for index in range(start, stop)]


class OneHashPaths(CachedPaths):
    def prefix(self, request: Request) -> Prefix:
        return OneHashPrefix(request.sequence.token_ids, SIZE, request.options.extra_key)


class OneHash(KVLedger):
    """Give every block the same hash: the worst possible collision."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.paths = OneHashPaths(self.cache, SIZE, self.prefix_cache, self.states)


def test_colliding_hashes_cost_hits_but_never_serve_another_prefix():
    ledger = OneHash(8, SIZE, True)
    first = a_request(TEN)
    table = compute(ledger, first)
    assert ledger.match(a_request([70] * 10)) == []
    assert [node.block for node in ledger.match(a_request(TEN))] == table[:1]
    other = a_request([70] * 10)
    assert set(compute(ledger, other)).isdisjoint(table)
    assert ledger.match(a_request([70] * 10)) == []
    for request in (first, other):
        ledger.close(request)
        ledger.check()
    assert (ledger.usage.num_free, ledger.usage.num_cached) == (7, 1)


def test_blocks_of_an_older_epoch_never_match_again():
    ledger = a_ledger()
    gone, running = a_request(TEN), a_request([50] * 10)
    compute(ledger, gone)
    ledger.close(gone)
    compute(ledger, running)
    assert ledger.start_epoch() == (2, 0)
    ledger.check()
    assert ledger.match(a_request(TEN)) == [] == ledger.match(a_request([50] * 10))
    running.sequence.token_ids += [50] * 6
    ledger.grow(running, 16)
    ledger.publish(running, 16)  # computed on old weights in part: stays private
    assert ledger.match(a_request([50] * 16)) == []
    fresh = a_request([50] * 10)
    assert set(compute(ledger, fresh)).isdisjoint(ledger.block_table(running))
    ledger.close(running)
    ledger.check()
    assert len(ledger.match(a_request([50] * 10))) == 2
    ledger.close(fresh)
    assert (ledger.usage.num_free, ledger.usage.num_cached, ledger.epoch) == (6, 2, 1)


def test_flush_leaves_the_blocks_of_running_requests():
    ledger = a_ledger()
    gone, running = a_request(TEN), a_request([50] * 10)
    compute(ledger, gone)
    compute(ledger, running)
    ledger.close(gone)
    assert ledger.flush() == (2, 0)
    ledger.check()
    assert ledger.usage.num_held == 3
    assert len(ledger.match(a_request([50] * 10))) == 2


def test_check_finds_a_leaked_a_doubly_free_and_a_shared_block():
    ledger = a_ledger()
    request = a_request(TEN)
    table = compute(ledger, request)
    ledger._pool.give(table[2])
    with pytest.raises(LedgerError, match=rf"blocks \[{table[2]}\] are free and held"):
        ledger.check()
    ledger = a_ledger()
    ledger._pool.take(1)
    with pytest.raises(LedgerError, match="free 7 \\+ cached 0 \\+ held 0 != pool 8"):
        ledger.check()
    with pytest.raises(LedgerError, match="idle, but free 7"):
        ledger.check_idle()
    ledger = a_ledger()
    ledger._pool.give(0)
    with pytest.raises(LedgerError, match="twice"):
        ledger.check()


class Walk:
    """Run a seeded random walk beside a model of the prefix that each published block may hold."""

    def __init__(self, seed: int, ledger: KVLedger) -> None:
        self.random = random.Random(seed)
        self.ledger = ledger
        self.open: dict[Request, int] = {}  # -> tokens computed
        self.kv: dict[int, tuple] = {}  # block -> the (epoch, key, prefix) that its KV was computed for

    def admit(self) -> None:
        length = self.random.randint(1, 22)
        tokens = [self.random.choice((1, 2)) for _ in range(length)] if self.random.random() < 0.6 else [1] * length
        request = a_request(tokens, self.random.choice(("", "", "k")), self.random.choice((-1, -1, -1, 0, 3)))
        nodes = self.ledger.match(request)
        for index, node in enumerate(nodes):
            assert self.kv[node.block] == self.claim(request, index)
        self.ledger.open(request, nodes)
        self.open[request] = len(nodes) * SIZE

    def claim(self, request: Request, index: int) -> tuple:
        prefix = tuple(request.sequence.token_ids[: (index + 1) * SIZE])
        return (self.ledger.epoch, request.options.extra_key, prefix)

    def advance(self, request: Request) -> None:
        done = self.open[request]
        if done == request.sequence.num_tokens:
            request.sequence.token_ids.append(self.random.choice((1, 2)))
        target = min(done + self.random.randint(1, 9), request.sequence.num_tokens)
        table = self.ledger.block_table(request)
        before = list(table)
        added = self.ledger.grow(request, target)
        assert table == before + (added or [])
        if added is None:
            return
        assert len(table) == -(-target // SIZE)
        for index in range(done // SIZE, target // SIZE):
            self.kv[table[index]] = self.claim(request, index)
        self.open[request] = target
        if self.random.random() < 0.8:
            self.ledger.publish(request, target)

    def close(self, request: Request) -> None:
        del self.open[request]
        self.ledger.close(request)
        self.ledger.forget(request)

    def step(self) -> None:
        roll = self.random.random()
        someone = self.random.choice(list(self.open)) if self.open else None
        if someone is None or (roll < 0.2 and len(self.open) < 6):
            self.admit()
        elif roll < 0.8:
            self.advance(someone)
        elif roll < 0.98:
            self.close(someone)
        elif roll < 0.99:
            self.ledger.flush()
        else:
            self.ledger.start_epoch()
            self.kv.clear()


@pytest.mark.parametrize("make", [KVLedger, OneHash], ids=["real hashes", "one hash"])
def test_ledger_adds_up_after_each_of_ten_thousand_random_operations(make):
    walk = Walk(7, make(12, SIZE, True))
    for _ in range(10_000):
        walk.step()
        walk.ledger.check()
    assert walk.ledger.epoch > 10
    for request in list(walk.open):
        walk.close(request)
        walk.ledger.check()
    walk.ledger.check_idle()
    walk.ledger.flush()
    assert walk.ledger.usage.num_free == 12


# -- drafts ----------------------------------------------------------------------------------------


def a_decode(ledger: KVLedger, num_tokens: int, first: int = 0) -> Request:
    """Admit a request whose last known token's row is the next one, with a block for it."""
    request = a_request(list(range(first, first + num_tokens)))
    ledger.open(request, [])
    assert ledger.grow(request, num_tokens) is not None
    ledger.publish(request, num_tokens - 1)
    return request


def test_a_draft_takes_free_blocks_and_gives_back_those_that_no_accepted_token_needs():
    ledger = a_ledger()
    request = a_decode(ledger, 6)
    before = list(ledger.block_table(request))
    assert ledger.plan_draft(request, 6, 9) == 9  # 15 tokens
    assert len(ledger.block_table(request)) == 4 and ledger.usage.num_free == 4
    request.sequence.token_ids += [50] * 3  # two accepted, and one drawn behind them
    ledger.publish(request, 8)
    ledger.settle_draft(request, 8, 2)
    ledger.check()
    assert ledger.block_table(request) == before and ledger.usage.num_free == 6
    assert ledger.num_blocks_kept(request, 0) == 2  # once: the managers know longer tables
    assert ledger.num_blocks_kept(request, 0) is None
    assert ledger.plan_draft(request, 9, 2) == 2
    request.sequence.token_ids += [50] * 3
    ledger.settle_draft(request, 11, 2)
    assert len(ledger.block_table(request)) == 3 and ledger.num_blocks_kept(request, 0) is None
    ledger.close(request)
    ledger.check_idle()


def test_a_draft_leaves_a_free_block_to_each_request_and_evicts_none():
    ledger = a_ledger()
    gone = a_request([9] * 8)
    compute(ledger, gone)
    ledger.close(gone)  # two cached blocks
    requests = [a_decode(ledger, 4, 100 * n) for n in range(3)]
    assert (ledger.usage.num_free, ledger.usage.num_cached) == (3, 2)
    assert [ledger.plan_draft(request, 4, 8) for request in requests] == [0, 0, 0]  # a block is left for each
    ledger.close(requests.pop())
    ledger.flush()
    assert ledger.usage.num_free == 6
    assert ledger.plan_draft(requests[0], 4, 40) == 16
    assert ledger.plan_draft(requests[1], 3, 40) == 1  # in the block that it has
    for request in requests:
        ledger.settle_draft(request, 4, 0)
    ledger.check()
    assert ledger.usage.num_free == 6


def test_a_draft_leaves_the_blocks_that_steps_ahead_may_want():
    ledger = a_ledger()
    request = a_decode(ledger, 4)
    assert ledger.usage.num_free == 7
    assert ledger.plan_draft(request, 4, 20, num_blocks_reserved=7) == 0
    assert ledger.plan_draft(request, 4, 20, num_blocks_reserved=5) == 8
    ledger.settle_draft(request, 4, 0)
    assert ledger.plan_draft(request, 2, 20, num_blocks_reserved=100) == 2
    ledger.settle_draft(request, 4, 0)
    ledger.check()


def test_the_blocks_of_a_draft_come_back_with_its_request():
    ledger = a_ledger()
    request = a_decode(ledger, 4)
    ledger.plan_draft(request, 4, 12)
    ledger.close(request)  # a preemption, or a step that failed
    ledger.check()
    ledger.check_idle()
    assert ledger.usage.num_free + ledger.usage.num_cached == 8
