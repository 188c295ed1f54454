"""The rules of a mirror, and the log of events that it is made from."""

from __future__ import annotations

import pytest

from lockstep.rollout.kv.cache_tree import cache_tree
from lockstep.rollout.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventLog,
    PinEvent,
)

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

from lockstep.integration.kv_events.subscriber import (  # noqa: E402
    CacheMirror,
    EventGap,
    MirrorBroken,
)
from lockstep.tests.integration.kv_events.ledger_engine import STORED, as_mirror  # noqa: E402


def batch(seq: int, *events: object) -> EventBatch:
    return EventBatch("kv", seq, 0.0, events)


def test_mirror_takes_batches_in_order_only():
    mirror = CacheMirror()
    mirror.apply(batch(0, STORED))
    for seq in (0, 2):
        with pytest.raises(EventGap, match=f"batch {seq} came after 0"):
            mirror.apply(batch(seq, BlockRemoved(STORED.block_hashes)))
    assert set(mirror.blocks) == set(STORED.block_hashes) and mirror.seq == 0


def test_mirror_starts_anew_where_the_cache_was_cleared_whatever_it_missed():
    mirror = CacheMirror()
    mirror.apply(batch(0, STORED))
    mirror.apply(batch(9, BlockRemoved((1234,)), AllBlocksCleared(), BlockStored((5,), None, (1,), 1)))
    assert set(mirror.blocks) == {5} and mirror.seq == 9


@pytest.mark.parametrize(
    "event",
    [
        BlockRemoved((5,)),
        BlockStored((5,), 6, (1,), 1),  # parent unknown
        BlockStored(STORED.block_hashes[:1], None, (1,), 1),  # stored already
        BlockStored((5,), None, (1, 2), 1),  # more tokens than blocks
    ],
)
def test_mirror_refuses_what_contradicts_it(event):
    mirror = CacheMirror()
    mirror.apply(batch(0, STORED))
    with pytest.raises(MirrorBroken, match="batch 1"):
        mirror.apply(batch(1, event))


def test_a_part_of_a_tree_is_no_snapshot(engine):
    engine.run(300)
    with engine._lock:
        top = cache_tree(engine.ledger, depth=1)
        inner = next(node.hash for node in cache_tree(engine.ledger).nodes if node.parent is not None)
        below = cache_tree(engine.ledger, under=inner)
    for part in (top, below):
        with pytest.raises(ValueError, match="not a whole cache tree"):
            as_mirror(part)


# -- the log ---------------------------------------------------------------------------------------------------------


def test_log_is_off_until_somebody_listens_and_off_again_after():
    log, got = KVEventLog(), []
    log.append(STORED)
    log.flush()
    assert not log.is_on and log.last_seq("kv") == -1
    log.attach(got.append)
    log.append(BlockRemoved((1,)))
    log.flush()
    log.flush()
    log.detach(got.append)
    log.append(BlockRemoved((2,)))
    log.flush()
    assert [(b.seq, b.events) for b in got] == [(1, (BlockRemoved((1,)),))]
    with pytest.raises(ValueError, match="not attached"):
        log.detach(got.append)


def test_log_leaves_a_number_out_where_nobody_listened():
    log, first, second = KVEventLog(), [], []
    for got in (first, second):
        log.attach(got.append)
        for hash in (1, 2):
            log.append(BlockRemoved((hash,)))
            log.flush()
        log.detach(got.append)
    assert [b.seq for b in first + second] == [1, 2, 4, 5]
    assert all(a.timestamp <= b.timestamp for a, b in zip(first, second, strict=True))


def test_log_merges_what_continues_and_nothing_else():
    log, got = KVEventLog(), []
    log.attach(got.append)
    events = [
        BlockStored((1,), None, (1, 2), 2), BlockStored((2,), 1, (3, 4), 2),  # one
        BlockStored((3,), 2, (5, 6), 2, "salt"),  # of another salt
        BlockStored((4,), 2, (5, 6), 2, "salt"),  # a sibling
        BlockRemoved((4,)), BlockRemoved((3, 2)),  # one
        AllBlocksCleared(), BlockRemoved((9,)),
    ]  # fmt: skip
    for event in events:
        log.append(event)
    log.append(PinEvent("pinned", (1,), None))
    log.flush()
    assert [b.topic for b in got] == ["kv", "pins"]
    assert got[0].events == (
        BlockStored((1, 2), None, (1, 2, 3, 4), 2),
        *events[2:4],
        BlockRemoved((4, 3, 2)),
        *events[6:],
    )
