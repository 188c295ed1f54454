"""Random walks over all events of a ledger with pins, checked after every event against a plain model.

The model knows the prefix that each block's KV was computed for, the current pins, and, from the events alone, the
content of the cache.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.rollout.kv.events import BlockRemoved, BlockStored, EventBatch, PinEvent
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

SIZE, NUM_BLOCKS = 4, 20
OWNERS = (None, "router", "trainer")

# How often each event occurs.
WEIGHTS = {
    "admit": 18,
    "advance": 50,
    "close": 14,
    "retract": 2,
    "pin": 12,
    "unpin": 9,
    "turn clock": 8,
    "release": 3,
    "evict below": 3,
    "flush": 0.5,
    "epoch": 0.5,
}


class Mirror:
    """The state that a subscriber can rebuild: the blocks in the cache, and the pins on them."""

    def __init__(self, ledger: KVLedger) -> None:
        self.ledger = ledger
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = {}  # hash -> (parent, tokens, salt)
        self.pins: Counter[tuple[int, str | None]] = Counter()
        self.kinds: Counter[str] = Counter()
        ledger.events.attach(self.take)
        self._last_seq = {topic: ledger.events.last_seq(topic) for topic in ("kv", "pins")}

    def take(self, batch: EventBatch) -> None:
        assert batch.events and batch.seq == self._last_seq[batch.topic] + 1
        self._last_seq[batch.topic] = batch.seq
        for event in batch.events:
            self.kinds[type(event).__name__ if batch.topic == "kv" else event.kind] += 1
            if isinstance(event, PinEvent):
                sign = 1 if event.kind == "pinned" else -1
                for hash in event.block_hashes:
                    self.pins[hash, event.owner] += sign
            elif isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for hash in event.block_hashes:
                    del self.blocks[hash]
            else:
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        parent = event.parent_block_hash
        for index, hash in enumerate(event.block_hashes):
            assert hash not in self.blocks and (parent is None or parent in self.blocks)
            tokens = event.token_ids[index * SIZE : (index + 1) * SIZE]
            self.blocks[hash], parent = (parent, tokens, event.cache_salt), hash

    def compare(self) -> None:
        ledger = self.ledger
        ledger.events.flush()
        assert self._last_seq == {topic: ledger.events.last_seq(topic) for topic in self._last_seq}
        assert self.blocks == {
            node.hash: (node.parent and node.parent.hash, tuple(node.token_ids), node.salt) for node in ledger.cache
        }
        standing = {
            (node.hash, owner): count for node in ledger.cache for owner, count in ledger.pins.owners(node.hash).items()
        }
        assert +self.pins == standing and min(self.pins.values(), default=0) >= 0


class Walk:
    """A ledger under random events, and the invariants that must hold after each of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = KVLedger(NUM_BLOCKS, SIZE, True, pin_budget=0.6, clock=lambda: self.now)
        self.mirror = Mirror(self.ledger)
        self.open: dict[Request, int] = {}  # -> tokens computed
        self.waiting: list[Request] = []  # retracted
        self.kv: dict[int, tuple] = {}  # block -> the (epoch, key, prefix) that its KV was computed for
        self.leases: list[tuple[float, int, str | None]] = []  # expiry time, block and owner
        self.counts: Counter[str] = Counter()
        self._known: list[int] = [17, -(2**63)]  # hashes that were in the cache once, and two that were never in it

    def event(self, name: str, number: int) -> None:
        """Run one event; `number` selects its subject."""
        dice, ledger = random.Random(number), self.ledger
        someone = dice.choice(list(self.open)) if self.open else None
        before = len(ledger.cache)
        if name == "turn clock":
            self.now += dice.choice((1.0, 3.0))
            assert ledger.pins.expire() == self._end_leases(lambda lease: lease[0] <= self.now)
        elif name in ("flush", "epoch"):
            _, num_unpinned = ledger.flush() if name == "flush" else ledger.start_epoch()
            assert num_unpinned == len({hash for _, hash, _ in self.leases})
            self.leases.clear()
            if name == "epoch":
                assert len(ledger.cache) == 0
        elif name == "evict below":
            self._evict_below(dice)
        elif name == "admit":
            if len(self.open) < 5:
                self._admit(dice)
        elif name in ("pin", "unpin", "release"):
            getattr(self, f"_{name}")(dice)
        elif someone is not None:
            self._advance(someone, dice) if name == "advance" else self._close(someone, retract=name == "retract")
        self.counts[name] += 1
        self.counts["shrunk"] += len(ledger.cache) < before
        self.check()

    def check(self) -> None:
        """Check that the ledger adds up, every pin is on a cached block, and no block in the tree is stale."""
        ledger = self.ledger
        ledger.check()
        ledger.check_idle()
        pinned = {hash for _, hash, _ in self.leases}
        assert {node.hash for node in ledger.cache if node.is_pinned} == pinned and len(ledger.pins) == len(pinned)
        assert ledger.cache.num_guarded <= ledger.pins.max_blocks
        for hash in pinned:
            counts = Counter(owner for _, other, owner in self.leases if other == hash)
            assert ledger.pins.owners(hash) == counts
        for node in ledger.cache:
            epoch, key, prefix = self.kv[node.block]
            assert (epoch, key, prefix[-SIZE:]) == (ledger.epoch, node.salt, tuple(node.token_ids))

    def finish(self) -> None:
        """End all requests and lift all pins: no trace of any pin is left."""
        for request in list(self.open):
            self._close(request, retract=False)
            self.check()
        for _, hash, owner in list(self.leases):
            assert self.ledger.pins.unpin([hash], owner).num_unpinned == 1
        self.leases.clear()
        self.check()
        self.mirror.compare()
        usage = self.ledger.usage
        assert (usage.num_pinned, usage.num_held, usage.num_free + usage.num_cached) == (0, 0, NUM_BLOCKS)
        assert not +self.mirror.pins and self.ledger.cache.num_guarded == 0
        self.ledger.flush()
        self.mirror.compare()
        assert self.ledger.usage.num_free == NUM_BLOCKS and not self.mirror.blocks

    # -- requests ---------------------------------------------------------------------------------------

    def _admit(self, dice: random.Random) -> None:
        if self.waiting and dice.random() < 0.7:
            request = self.waiting.pop(0)
        else:
            tokens = [dice.choice((1, 2)) if dice.random() < 0.15 else 1 for _ in range(dice.randint(1, 26))]
            options = RequestOptions(dice.choice((-1, -1, -1, 3)), extra_key=dice.choice(("", "", "k")))
            request = Request(Sequence("r", tokens), SamplingParams(), options, 0, 0, 0.0, 0, None)
        nodes = self.ledger.match(request)
        for index, node in enumerate(nodes):
            assert self.kv[node.block] == self._claim(request, index), "a stale block is served"
        self.ledger.open(request, nodes)
        self.open[request] = len(nodes) * SIZE
        self.counts["hits"] += len(nodes)

    def _claim(self, request: Request, index: int) -> tuple:
        prefix = tuple(request.sequence.token_ids[: (index + 1) * SIZE])
        return (self.ledger.epoch, request.options.extra_key, prefix)

    def _advance(self, request: Request, dice: random.Random) -> None:
        done = self.open[request]
        if done == request.sequence.num_tokens:
            request.sequence.token_ids.append(dice.choice((1, 1, 2)))
        target = min(done + dice.randint(1, 9), request.sequence.num_tokens)
        if self.ledger.grow(request, target) is None:
            self.counts["full"] += 1
            return
        table = self.ledger.block_table(request)
        for index in range(done // SIZE, target // SIZE):
            self.kv[table[index]] = self._claim(request, index)
        self.open[request] = target
        if dice.random() < 0.9:
            self.ledger.publish(request, target)
        self._known += [node.hash for node in self.ledger.cache if node.hash not in self._known]

    def _close(self, request: Request, *, retract: bool) -> None:
        del self.open[request]
        self.ledger.close(request)
        if retract:
            self.waiting.append(request)
        else:
            self.ledger.forget(request)

    # -- pins -------------------------------------------------------------------------------------------

    def _some(self, dice: random.Random) -> list[int]:
        """Pick hashes of existing blocks, and of others."""
        hashes = [node.hash for node in self.ledger.cache] or self._known
        return dice.choices(hashes, k=dice.randint(1, 3)) + dice.choices(self._known[-200:], k=dice.randint(0, 1))

    def _pin(self, dice: random.Random) -> None:
        hashes, owner, ttl = self._some(dice), dice.choice(OWNERS), dice.choice((None, 2.0, 9.0))
        there = {node.hash for node in self.ledger.cache}
        report = self.ledger.pins.pin(hashes, owner, ttl)
        assert report.num_pinned + report.num_unknown + report.num_refused == len(hashes)
        assert report.num_unknown == sum(hash not in there for hash in hashes)
        when = float("inf") if ttl is None else self.now + ttl
        self.leases += [(when, hash, owner) for hash in report.hashes]
        self.counts["refused"] += report.num_refused

    def _unpin(self, dice: random.Random) -> None:
        owner = dice.choice(OWNERS)
        if self.leases and dice.random() < 0.8:
            _, hash, owner = dice.choice(self.leases)
            hashes = [hash, hash]
        else:
            hashes = self._some(dice)
        lifted = 0
        for hash in hashes:
            mine = [lease for lease in self.leases if lease[1:] == (hash, owner)]
            if mine:
                self.leases.remove(min(mine, key=lambda lease: lease[0]))
                lifted += 1
        report = self.ledger.pins.unpin(hashes, owner)
        assert (report.num_unpinned, report.num_unknown) == (lifted, len(hashes) - lifted)

    def _release(self, dice: random.Random) -> None:
        ledger = self.ledger
        wanted = ledger.num_available + dice.randint(0, 4)
        released = ledger.pins.release_until(lambda: wanted - ledger.num_available, "a test")
        if ledger.num_available < wanted:  # then no pin that could help is left
            assert ledger.usage.num_pinned == 0
        self._end_leases(lambda lease: lease[1] in released)

    def _evict_below(self, dice: random.Random) -> None:
        nodes = list(self.ledger.cache)
        if nodes:
            top = dice.choice(nodes)
            self.ledger.evict_below(top)
            assert all(node.num_holders or node.num_guards for node in self.ledger.cache.below(top))

    def _end_leases(self, is_over) -> int:
        num_before = len(self.leases)
        self.leases = [lease for lease in self.leases if not is_over(lease)]
        return num_before - len(self.leases)


@pytest.mark.slow
def test_twelve_thousand_random_events_leave_no_pin_and_serve_no_stale_block():
    walk, dice = Walk(), random.Random(5)
    names = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=12_000)
    for index, name in enumerate(names):
        walk.event(name, dice.randrange(2**30))
        if index % 5 == 0:
            walk.mirror.compare()
    walk.finish()
    assert set(walk.mirror.kinds) == {
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
        "pinned",
        "unpinned",
        "auto_unpinned",
        "expired",
        "dropped",
    }
    assert min(walk.mirror.kinds.values()) >= 10, walk.mirror.kinds
    assert min(walk.counts[what] for what in ("refused", "full", "hits", "shrunk")) > 50, walk.counts
    assert walk.ledger.num_hit_tokens == walk.counts["hits"] * SIZE


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(0, 999)), max_size=80))
def test_short_walks_that_shrink(events):
    """Run the same walks as hypothesis generates them: a failing one shrinks to the few events that matter."""
    walk = Walk()
    for name, number in events:
        walk.event(name, number)
        walk.mirror.compare()
    walk.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_more_walks(seed):
    walk, dice = Walk(), random.Random(seed)
    for name in dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=12_000):
        walk.event(name, dice.randrange(2**30))
        walk.mirror.compare()
    walk.finish()
