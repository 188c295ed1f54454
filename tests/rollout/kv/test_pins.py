"""Pins on cached blocks: their protection, expiry, owners, budget and end."""

from __future__ import annotations

import itertools
import random

import pytest

from lockstep.rollout.kv.events import AllBlocksCleared, BlockRemoved, PinEvent
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.kv.pins import PinReport, UnpinReport
from lockstep.rollout.kv.prefix import Prefix
from lockstep.rollout.kv.radix_cache import Node
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

SIZE = 4
OVER_4 = "over the budget of 4 protected blocks"


class Cache:
    """A ledger with a clock to set, and the hashes of the blocks that were put into it."""

    def __init__(self, num_blocks: int = 16, *, budget: float = 1.0, blocks: type[Prefix] = Prefix) -> None:
        self.now = 0.0
        self.ledger = KVLedger(num_blocks, SIZE, True, pin_budget=budget, clock=lambda: self.now)
        self.pins, self.tree = self.ledger.pins, self.ledger.cache
        self.events: list[object] = []  # of both topics, in order of their batches
        self.ledger.events.attach(lambda batch: self.events.extend(batch.events))
        self._blocks = blocks

    def request(self, token_ids: list[int]) -> Request:
        request = Request(Sequence("r", token_ids), SamplingParams(), RequestOptions(), 0, 0, 0.0, 0, None)
        self.ledger.paths._prefixes[request] = self._blocks(request.sequence.token_ids, SIZE)
        return request

    def run(self, token_ids: list[int]) -> Request:
        """Start a request, compute and publish its KV. The request still holds it."""
        request = self.request(token_ids)
        self.ledger.open(request, self.ledger.match(request))
        assert self.ledger.grow(request, len(token_ids)) is not None
        self.ledger.publish(request, len(token_ids))
        self.ledger.check()
        return request

    def end(self, request: Request) -> None:
        self.ledger.close(request)
        self.ledger.forget(request)
        self.ledger.check()

    def put(self, token_ids: list[int]) -> list[int]:
        """Run a prompt to its end; returns the hashes of its full blocks."""
        request = self.run(token_ids)
        hashes = [node.hash for node in self.path(token_ids)]
        self.end(request)
        assert len(hashes) == len(token_ids) // SIZE
        return hashes

    def path(self, token_ids: list[int]) -> list[Node]:
        return self.ledger.paths.of(self._blocks(token_ids, SIZE), len(token_ids) // SIZE)

    def evict(self, num_blocks: int = 999) -> int:
        """Evict up to `num_blocks` blocks, as a growing request would."""
        blocks = self.tree.evict(num_blocks)
        for block in blocks:
            self.ledger._pool.give(block)
        self.ledger.check()
        return len(blocks)

    def assert_no_trace_of_pins(self) -> None:
        """Assert that nothing is protected and every cached block is evictable."""
        assert len(self.pins) == self.tree.num_guarded == self.ledger.usage.num_pinned == 0
        assert all(node.num_guards == 0 and not node.is_pinned for node in self.tree)
        usage = self.ledger.usage
        assert usage.num_cached == len(self.tree) == usage.num_blocks - usage.num_free
        self.ledger.check()
        self.ledger.check_idle()


def words(*numbers: int) -> list[int]:
    """Build a prompt of one block for each number."""
    return [number for number in numbers for _ in range(SIZE)]


@pytest.fixture
def cache() -> Cache:
    return Cache()


# -- the index from hash to block, and the end of pins ---------------------------------------------------


def test_a_published_block_is_found_by_its_hash(cache):
    [hash] = cache.put(words(1))
    assert cache.tree.get(hash).token_ids == words(1)


def test_every_block_of_a_long_prompt_has_a_hash_of_its_own(cache):
    hashes = cache.put(words(1, 2, 3))
    assert len(set(hashes)) == 3
    assert [cache.tree.get(hash).token_ids for hash in hashes] == [words(1), words(2), words(3)]


@pytest.mark.parametrize("empty", ["flush", "start_epoch"])
def test_emptying_the_cache_forgets_hashes_and_pins_and_says_so(cache, empty):
    hashes = cache.put(words(1, 2))
    cache.pins.pin(hashes, "me")
    assert getattr(cache.ledger, empty)() == (2, 2)
    assert [cache.tree.get(hash) for hash in hashes] == [None, None]
    assert cache.pins.pin(hashes).num_unknown == 2
    assert cache.pins.unpin(hashes, "me") == UnpinReport(0, 2)
    cache.assert_no_trace_of_pins()
    cache.ledger.events.flush()
    why = "flush_cache" if empty == "flush" else "new weights were committed"
    assert [e for e in cache.events if isinstance(e, PinEvent)][-1] == PinEvent("dropped", tuple(hashes), "me", why)
    assert AllBlocksCleared() in cache.events


def test_an_evicted_block_is_not_found_by_its_hash_any_more(cache):
    first, second = cache.put(words(1, 2))
    assert cache.evict(1) == 1
    assert cache.tree.get(second) is None and cache.tree.get(first) is not None
    cache.ledger.events.flush()
    assert cache.events[-1] == BlockRemoved((second,))


def test_pinning_an_unknown_hash_counts_nothing(cache):
    assert cache.pins.pin([123456]) == PinReport(0, 1, 0, "", ())
    cache.assert_no_trace_of_pins()


def test_unpinning_an_unknown_hash_counts_nothing(cache):
    [hash] = cache.put(words(1))
    assert cache.pins.unpin([123456, hash]) == UnpinReport(0, 2)
    cache.assert_no_trace_of_pins()


def test_a_pin_guards_the_block_and_takes_it_from_eviction(cache):
    [hash] = cache.put(words(1))
    assert cache.pins.pin([hash]) == PinReport(1, 0, 0, "", (hash,))
    node = cache.tree.get(hash)
    assert (node.num_guards, node.is_pinned, node.is_evictable_leaf, node.num_holders) == (1, True, False, 0)
    assert (cache.ledger.usage.num_cached, cache.ledger.usage.num_pinned, cache.ledger.num_available) == (0, 1, 15)
    assert cache.evict() == 0


def test_unpinning_gives_the_block_back_to_eviction(cache):
    [hash] = cache.put(words(1))
    cache.pins.pin([hash])
    assert cache.pins.unpin([hash]) == UnpinReport(1, 0)
    assert cache.tree.get(hash).is_evictable_leaf
    cache.assert_no_trace_of_pins()
    assert cache.evict() == 1


def test_pinned_prompt_survives_what_evicts_another_until_it_is_unpinned(cache):
    pinned, other = cache.put(words(1, 2)), cache.put(words(3, 4))
    cache.pins.pin(pinned)
    assert cache.evict() == 2
    assert all(map(cache.tree.get, pinned)) and not any(map(cache.tree.get, other))
    cache.pins.unpin(pinned)
    assert cache.evict() == 2 and len(cache.tree) == 0


def test_two_pins_need_two_unpins(cache):
    [hash] = cache.put(words(1))
    for _ in range(2):
        assert cache.pins.pin([hash]).num_pinned == 1
    assert cache.pins.unpin([hash]).num_unpinned == 1
    assert cache.evict() == 0
    assert cache.pins.unpin([hash]).num_unpinned == 1
    assert cache.pins.unpin([hash]) == UnpinReport(0, 1)
    assert cache.evict() == 1


def test_pinning_a_leaf_protects_all_its_ancestors(cache):
    *ancestors, leaf = cache.put(words(1, 2, 3))
    cache.pins.pin([leaf])
    assert [cache.tree.get(hash).num_guards for hash in ancestors] == [1, 1]
    assert not any(cache.tree.get(hash).is_pinned for hash in ancestors)
    assert (len(cache.pins), cache.tree.num_guarded, cache.evict()) == (1, 3, 0)
    cache.pins.unpin([leaf])
    cache.assert_no_trace_of_pins()


def test_pinning_in_the_middle_leaves_what_is_below_to_eviction(cache):
    first, middle, last = cache.put(words(1, 2, 3))
    cache.pins.pin([middle])
    assert cache.evict() == 1
    assert cache.tree.get(last) is None and all(map(cache.tree.get, (first, middle)))


# -- every order, every shape ----------------------------------------------------------------------------


def test_unpinning_in_every_order_leaves_nothing_protected():
    for order in itertools.permutations(range(5)):
        cache = Cache()
        stem = cache.put(words(1, 2, 3))
        hashes = [*stem, cache.put(words(1, 9))[1], cache.put(words(8))[0]]
        cache.pins.pin(hashes)
        assert cache.tree.num_guarded == 5
        for number, index in enumerate(order):
            assert cache.pins.unpin([hashes[index]]).num_unpinned == 1
            cache.ledger.check()
            assert len(cache.pins) == 4 - number
        cache.assert_no_trace_of_pins()


@pytest.mark.parametrize("where", range(10))
def test_a_prompt_that_parts_from_a_pinned_one_at_any_token_splits_nothing(where):
    cache = Cache()
    hashes = cache.put([*range(10), 50, 51])
    cache.pins.pin(hashes)
    other = cache.put([*range(where), *[99] * (12 - where)])
    assert [hash in hashes for hash in other] == [index < where // SIZE for index in range(3)]
    cache.pins.pin(other)
    assert cache.tree.num_guarded == len({*hashes, *other}) == len(cache.pins)
    cache.pins.unpin(hashes)
    assert [bool(cache.tree.get(hash).num_guards) for hash in other] == [True] * 3
    cache.pins.unpin(other)
    cache.assert_no_trace_of_pins()


@pytest.mark.parametrize("seed", range(20))
def test_every_block_of_a_random_tree_pinned_and_unpinned_in_random_order(seed):
    cache, dice = Cache(200), random.Random(seed)
    for _ in range(12):  # prompts over two words part ways everywhere
        cache.put(words(*(dice.randint(1, 2) for _ in range(dice.randint(1, 6)))))
    hashes = [node.hash for node in cache.tree] * 2
    dice.shuffle(hashes)
    assert cache.pins.pin(hashes).num_pinned == len(hashes) > 20
    assert cache.ledger.usage.num_cached == cache.evict() == 0
    dice.shuffle(hashes)
    for hash in hashes:
        cache.put(words(*(dice.randint(1, 3) for _ in range(2))))  # meanwhile more branches are added
        assert cache.pins.unpin([hash]).num_unpinned == 1
        cache.ledger.check()
    cache.assert_no_trace_of_pins()
    cache.evict()
    assert cache.ledger.usage.num_free == 200


# -- pins and requests are separate ledgers --------------------------------------------------------------


def test_a_finishing_request_never_unpins(cache):
    request = cache.run(words(1, 2))
    hashes = [node.hash for node in cache.path(words(1, 2))]
    cache.pins.pin(hashes)
    cache.end(request)
    assert (cache.ledger.usage.num_pinned, cache.evict(), len(cache.pins)) == (2, 0, 2)
    for _ in range(3):  # nor do later requests that hit the blocks
        cache.end(cache.run(words(1, 2, 7)))
    assert all(cache.tree.get(hash).is_pinned for hash in hashes)
    cache.pins.unpin(hashes)
    cache.assert_no_trace_of_pins()


def test_unpinning_never_releases_what_a_request_holds(cache):
    hashes = cache.put(words(1, 2))
    cache.pins.pin(hashes)
    request = cache.run(words(1, 2, 3))
    assert (cache.ledger.usage.num_held, cache.ledger.usage.num_pinned) == (3, 0)
    cache.pins.unpin(hashes)
    assert cache.evict() == 0 and [node.num_holders for node in cache.path(words(1, 2))] == [1, 1]
    cache.end(request)
    cache.assert_no_trace_of_pins()


def test_pins_of_blocks_that_several_requests_hold_outlive_them_all(cache):
    requests = [cache.run(words(1, 2, number)) for number in (3, 4, 5)]
    stem = [node.hash for node in cache.path(words(1, 2))]
    cache.pins.pin(stem)
    for request in requests:
        cache.end(request)
    assert cache.evict() == 3
    assert [node.hash for node in cache.path(words(1, 2))] == stem


def test_a_retracted_request_finds_its_pinned_blocks_again(cache):
    request = cache.run(words(1, 2, 3))
    hashes = [node.hash for node in cache.path(words(1, 2, 3))]
    cache.pins.pin(hashes[1:2])
    cache.ledger.close(request)  # as a pause that retracts does
    assert cache.evict() == 1  # the third block
    assert [node.hash for node in cache.ledger.match(request)] == hashes[:2]
    cache.pins.unpin(hashes)
    cache.ledger.forget(request)
    cache.assert_no_trace_of_pins()


def test_a_flush_beside_a_running_request_drops_its_pins_and_keeps_its_blocks(cache):
    gone = cache.put(words(8, 9))
    running = cache.run(words(1, 2))
    held = [node.hash for node in cache.path(words(1, 2))]
    cache.pins.pin([*gone, *held])
    assert cache.ledger.flush() == (2, 4)
    assert (len(cache.pins), cache.tree.num_guarded, cache.ledger.usage.num_held) == (0, 0, 2)
    assert [node.hash for node in cache.path(words(1, 2))] == held
    cache.end(running)
    cache.assert_no_trace_of_pins()


def test_new_weights_never_serve_a_pinned_block_of_the_old(cache):
    running = cache.run(words(1, 2))
    hashes = [node.hash for node in cache.path(words(1, 2))]
    old = [node.block for node in cache.path(words(1, 2))]
    cache.pins.pin(hashes)
    cache.ledger.start_epoch()
    assert cache.path(words(1, 2)) == [] and cache.pins.pin(hashes).num_unknown == 2
    fresh = cache.run(words(1, 2, 3))
    assert set(cache.ledger.block_table(fresh)).isdisjoint(old)
    assert cache.pins.pin(hashes).num_pinned == 2  # the same prompt has the same names
    assert {node.block for node in cache.path(words(1, 2))}.isdisjoint(old)
    cache.end(running)
    cache.end(fresh)
    assert cache.evict() == 1
    cache.pins.unpin(hashes)
    cache.assert_no_trace_of_pins()


def test_a_pinned_block_whose_second_copy_gives_way_stays_pinned():
    cache = Cache(4)
    hashes = cache.put(words(1, 2))
    cache.pins.pin(hashes)
    copy = cache.request(words(1, 2))
    cache.ledger.open(copy, [])  # computes cached tokens: as a request that needs prompt log-probabilities
    cache.ledger.grow(copy, 8)
    cache.ledger.publish(copy, 8)
    copy.sequence.token_ids += words(3, 4)
    assert len(cache.ledger.grow(copy, 16)) == 2
    cache.ledger.check()
    assert [node.hash for node in cache.path(words(1, 2))] == hashes
    cache.end(copy)
    assert (cache.ledger.usage.num_pinned, cache.ledger.usage.num_free) == (2, 2)


# -- valid arguments -------------------------------------------------------------------------------------


def test_a_hash_named_twice_in_one_list_is_two_pins(cache):
    [hash] = cache.put(words(1))
    assert cache.pins.pin([hash, hash, 5]) == PinReport(2, 1, 0, "", (hash, hash))
    assert cache.pins.owners(hash) == {None: 2}
    assert cache.pins.unpin([hash, hash, hash]) == UnpinReport(2, 1)
    cache.assert_no_trace_of_pins()


class Extremes(Prefix):
    """Blocks whose hashes are the extremes of 64 bits."""

    def hash(self, index: int) -> int:
        return (-(2**63), 2**63 - 1, -1, 0)[index]

    def blocks(self, start: int, stop: int) -> list[tuple[int, bytes, str]]:
        return [(self.hash(index), self.tokens(index), "") for index in range(start, stop)]


def test_negative_zero_and_extreme_hashes_are_hashes_like_others():
    cache = Cache(blocks=Extremes)
    hashes = cache.put(words(1, 2, 3, 4))
    assert hashes == [-(2**63), 2**63 - 1, -1, 0]
    assert cache.pins.pin(hashes).hashes == tuple(hashes)
    assert cache.evict() == 0
    assert cache.pins.unpin(reversed(hashes)).num_unpinned == 4
    cache.assert_no_trace_of_pins()


@pytest.mark.parametrize("bad", [2**63, -(2**63) - 1, 1.0, "7", None, True, b"x"])
def test_what_is_no_64_bit_hash_is_named_and_nothing_is_changed(cache, bad):
    [hash] = cache.put(words(1))
    for ask in (cache.pins.pin, cache.pins.unpin):
        with pytest.raises(ValueError, match="signed 64-bit integers, not ") as error:
            ask([hash, bad])
        assert repr(bad) in str(error.value)
    cache.assert_no_trace_of_pins()


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), "5m", True])
def test_a_bad_ttl_is_named_and_nothing_is_pinned(cache, ttl):
    hashes = cache.put(words(1))
    with pytest.raises(ValueError, match="ttl_s must be a positive number of seconds, not ") as error:
        cache.pins.pin(hashes, ttl_s=ttl)
    assert repr(ttl) in str(error.value)
    cache.assert_no_trace_of_pins()


# -- owners ----------------------------------------------------------------------------------------------


def test_an_owner_cannot_unpin_what_another_pinned(cache):
    [hash] = cache.put(words(1))
    cache.pins.pin([hash], "router")
    for other in (None, "trainer"):
        assert cache.pins.unpin([hash], other) == UnpinReport(0, 1)
    assert cache.pins.unpin([hash], "router") == UnpinReport(1, 0)
    cache.assert_no_trace_of_pins()


def test_a_block_stays_until_its_last_owner_lets_go(cache):
    [hash] = cache.put(words(1))
    for owner in ("a", "b", None, "a"):
        cache.pins.pin([hash], owner)
    assert cache.pins.owners(hash) == {"a": 2, "b": 1, None: 1}
    for owner in ("a", None, "b"):
        cache.pins.unpin([hash], owner)
        assert cache.evict() == 0
    cache.pins.unpin([hash], "a")
    cache.assert_no_trace_of_pins()


def test_an_empty_owner_is_nobody_and_other_things_are_refused(cache):
    [hash] = cache.put(words(1))
    cache.pins.pin([hash], "")
    assert cache.pins.owners(hash) == {None: 1}
    assert cache.pins.unpin([hash]).num_unpinned == 1
    for ask in (cache.pins.pin, cache.pins.unpin):
        with pytest.raises(ValueError, match=r"owner must be a text, not \['a'\]"):
            ask([hash], ["a"])


# -- expiry ----------------------------------------------------------------------------------------------


def test_pins_lift_themselves_when_their_time_has_come(cache):
    hashes = cache.put(words(1, 2))
    cache.pins.pin(hashes, "me", ttl_s=10)
    cache.now = 9.9
    assert cache.pins.expire() == 0 and cache.evict() == 0
    cache.now = 10.0
    assert cache.pins.expire() == 2 == cache.pins.num_expired
    cache.assert_no_trace_of_pins()
    cache.ledger.events.flush()
    assert [e for e in cache.events if isinstance(e, PinEvent)][-1] == PinEvent("expired", tuple(hashes), "me")


def test_each_pin_has_an_expiry_of_its_own_and_the_soonest_is_unpinned_first(cache):
    [hash] = cache.put(words(1))
    for ttl in (None, 30, 10, 20):
        cache.pins.pin([hash], ttl_s=ttl)
    cache.pins.unpin([hash])
    cache.now = 15.0
    assert cache.pins.expire() == 0  # that one was unpinned
    cache.now = 30.0
    assert cache.pins.expire() == 2
    assert cache.pins.owners(hash) == {None: 1}  # the pin without a ttl
    assert cache.pins.unpin([hash]).num_unpinned == 1
    cache.assert_no_trace_of_pins()


def test_an_expiry_touches_no_other_owner_and_no_later_pin_of_the_same_block(cache):
    [hash] = cache.put(words(1))
    cache.pins.pin([hash], "brief", ttl_s=5)
    cache.pins.unpin([hash], "brief")
    cache.pins.pin([hash], "brief", ttl_s=50)
    cache.pins.pin([hash], "other")
    cache.now = 6.0
    assert cache.pins.expire() == 0
    cache.now = 50.0
    assert cache.pins.expire() == 1 and cache.pins.owners(hash) == {"other": 1}


def test_an_expired_pin_is_gone_before_anything_is_counted(cache):
    first, second = cache.put(words(1)), cache.put(words(2))
    cache.pins.max_blocks = 1
    cache.pins.pin(first, ttl_s=5)
    cache.now = 5.0
    assert cache.pins.pin(second).num_pinned == 1
    assert cache.pins.unpin(first) == UnpinReport(0, 1)


def test_pins_that_are_lifted_early_leave_no_pile_of_expiries(cache):
    hashes = cache.put(words(1, 2))
    cache.pins.pin(hashes, ttl_s=1000)
    for _ in range(5000):
        cache.pins.pin(hashes[:1], ttl_s=1000)
        cache.pins.unpin(hashes[:1])
    assert len(cache.pins._expiries) < 200
    cache.now = 1000.0
    assert cache.pins.expire() == 2
    cache.assert_no_trace_of_pins()


# -- the budget ------------------------------------------------------------------------------------------


def test_over_the_budget_blocks_are_refused_and_counted_and_the_others_pinned():
    cache = Cache(16, budget=0.25)
    a, b = cache.put(words(1, 2, 3)), cache.put(words(7, 8))
    assert cache.pins.pin([*a, *b, 99]) == PinReport(4, 1, 1, OVER_4, (*a, b[0]))
    assert cache.tree.num_guarded == 4
    assert cache.pins.pin([a[2], b[1]]) == PinReport(1, 0, 1, OVER_4, (a[2],))  # once more costs nothing
    cache.pins.unpin([a[2], a[2]])
    assert cache.pins.pin([b[1]]).num_refused == 0


def test_ancestors_count_against_the_budget():
    cache = Cache(16, budget=0.25)
    long, short = cache.put(words(1, 2, 3, 4, 5)), cache.put(words(9))
    assert cache.pins.pin(long[4:]) == PinReport(0, 0, 1, OVER_4, ())
    assert cache.pins.pin(long[3:4]).num_pinned == 1
    assert cache.pins.pin(short) == PinReport(0, 0, 1, OVER_4, ())
    assert cache.pins.pin(long[:3]).num_pinned == 3  # protected already
    cache.pins.unpin(long[3:4])
    assert cache.pins.pin(short).num_pinned == 1


@pytest.mark.parametrize(("budget", "num_pinned"), [(0.0, 0), (0.99, 3), (1.0, 4), (1, 4)])
def test_a_budget_of_none_and_of_all(budget, num_pinned):
    cache = Cache(4, budget=budget)
    report = cache.pins.pin(cache.put(words(1, 2, 3, 4)))
    assert (report.num_pinned, report.num_refused) == (num_pinned, 4 - num_pinned)
    assert bool(report.reason) is (num_pinned < 4)
    assert cache.ledger.num_available == 4 - num_pinned


# -- auto-unpin ------------------------------------------------------------------------------------------


def release(cache: Cache, num_blocks: int) -> list[int]:
    """Lift pins until `num_blocks` blocks can be allocated."""
    released = cache.pins.release_until(lambda: num_blocks - cache.ledger.num_available, "a test")
    cache.ledger.check()
    return released


def test_least_recently_used_pins_go_first_and_no_more_than_needed():
    cache = Cache(7)
    a, b, c = cache.put(words(1, 1)), cache.put(words(2, 2)), cache.put(words(3, 3))
    cache.pins.pin([*b, *a, *c])
    cache.end(cache.run([*words(2, 2), 9]))  # b is used again
    assert release(cache, 1) == []
    assert release(cache, 2) == [a[1]]  # of one prompt the last block first
    assert release(cache, 4) == [a[0], c[1]]
    assert release(cache, 6) == [c[0], b[1]]
    assert cache.pins.owners(b[0]) == {None: 1}
    assert cache.pins.num_auto_unpinned == 5


def test_a_pin_that_frees_too_little_stays_where_a_later_one_is_enough():
    cache = Cache(8)
    small, large = cache.put(words(1)), cache.put(words(2, 3, 4, 5))
    cache.pins.pin([small[0], large[-1]])
    assert cache.ledger.num_available == 3
    assert release(cache, 7) == [large[-1]]  # 4 blocks: the older pin, of 1 block, would not have been enough
    assert cache.pins.owners(small[0]) == {None: 1} and cache.ledger.num_available == 7


@pytest.mark.parametrize("seed", range(10))
def test_auto_unpin_never_lifts_a_pin_that_could_have_stayed(seed):
    cache, dice = Cache(60), random.Random(seed)
    for _ in range(10):
        cache.put(words(*(dice.randint(1, 3) for _ in range(dice.randint(2, 5)))))
    pinned = dice.sample([node.hash for node in cache.tree], 12)
    cache.pins.pin(pinned)
    before = {hash: cache.pins.owners(hash) for hash in pinned}
    num_blocks = dice.randint(cache.ledger.num_available + 1, 60)
    released = release(cache, num_blocks)
    assert released and cache.ledger.num_available >= num_blocks
    for hash in released:  # with any one of them pinned again there would be too few
        cache.pins.pin([hash])
        assert cache.ledger.num_available < num_blocks
        cache.pins.unpin([hash])
    assert all(cache.pins.owners(hash) == before[hash] for hash in pinned if hash not in released)


def test_a_pin_on_what_a_request_holds_is_not_lifted_for_nothing():
    cache = Cache(8)
    held, idle = cache.run(words(1, 2)), cache.put(words(3, 4))
    cache.pins.pin([node.hash for node in cache.path(words(1, 2))])
    cache.pins.pin(idle)
    assert release(cache, 8) == [idle[1], idle[0]]  # more than there is: every pin that helps, and no more
    assert len(cache.pins) == 2
    cache.end(held)


def test_auto_unpin_lifts_all_pins_of_a_block_and_tells_every_owner(cache):
    [hash] = cache.put(words(1))
    for owner in ("a", "b", "a"):
        cache.pins.pin([hash], owner, ttl_s=100)
    assert release(cache, 16) == [hash]
    cache.ledger.events.flush()
    assert cache.events[-2:] == [
        PinEvent("auto_unpinned", (hash, hash), "a", "a test"),
        PinEvent("auto_unpinned", (hash,), "b", "a test"),
    ]
    assert cache.pins.unpin([hash], "a") == UnpinReport(0, 1)  # too late, and no error
    assert cache.pins.pin([hash], "a").num_pinned == 1  # and free to try again
    cache.now = 100.0
    assert cache.pins.expire() == 0  # of a pin that is gone


# -- evict below -----------------------------------------------------------------------------------------


def test_evicting_below_a_block_spares_what_is_held_or_pinned():
    cache = Cache(32)
    stem = cache.put(words(1, 2))
    pinned, loose = cache.put(words(1, 2, 3, 4)), cache.put(words(1, 2, 5, 6))
    elsewhere = cache.put(words(9, 9))
    held = cache.run(words(1, 2, 7))
    cache.pins.pin(pinned[2:3])
    assert cache.ledger.evict_below(cache.tree.get(stem[1])) == 3  # 4 below the pin, 5 and 6
    cache.ledger.check()
    assert [bool(cache.tree.get(h)) for h in (*pinned, *loose[2:], *elsewhere)] == [True] * 3 + [False] * 3 + [True] * 2
    cache.end(held)
    cache.pins.unpin(pinned)
    assert cache.ledger.evict_below(cache.tree.get(stem[0])) == 3
    assert cache.ledger.evict_below(cache.tree.get(stem[0])) == 0
    cache.ledger.events.flush()
    assert [len(event.block_hashes) for event in cache.events if isinstance(event, BlockRemoved)] == [6]
    cache.assert_no_trace_of_pins()
