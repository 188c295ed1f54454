"""A subscriber that joins late, falls behind or comes back: it follows, or says that it cannot."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.rollout.kv.cache_tree import CacheTree, cache_tree
from lockstep.rollout.kv.events import (
    AllBlocksCleared,
    BlockStored,
    PinEvent,
)
from lockstep.rollout.sampling_params import SamplingParams

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

from lockstep.integration.kv_events.publisher import KVEventPublisher  # noqa: E402
from lockstep.integration.kv_events.subscriber import (  # noqa: E402
    CannotFollow,
    KVEventSubscriber,
)
from lockstep.tests.integration.kv_events.ledger_engine import (  # noqa: E402
    ANY_PORT,
    DEADLINE_S,
    SIZE,
    STORED,
    LedgerEngine,
    LossyLine,
    as_mirror,
    emit,
)


def subscribe(publisher: KVEventPublisher, **settings: object) -> KVEventSubscriber:
    return KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, timeout_s=DEADLINE_S, **settings)


def test_a_publisher_that_is_attached_late_tells_what_is_cached_already(engine, publisher):
    engine.run(300)
    publisher.attach(engine)
    assert engine.kv_events.last_seq("kv") == 0
    with subscribe(publisher) as subscriber:
        assert subscriber.mirror.blocks == as_mirror(engine.cache_tree()).blocks != {}
        engine.run(300)
        subscriber.sync()
        assert subscriber.mirror.blocks == as_mirror(engine.cache_tree()).blocks


def test_a_publisher_may_be_attached_while_the_engine_runs(engine, publisher):
    with subscribe(publisher) as subscriber:
        assert subscriber.mirror.seq == -1
        runner = threading.Thread(target=engine.run, args=(2000,))
        runner.start()
        publisher.attach(engine)
        runner.join(DEADLINE_S)
        subscriber.sync()
        assert subscriber.mirror.blocks == as_mirror(engine.cache_tree()).blocks != {}


def test_batches_that_the_state_covers_are_not_published_after_it_and_later_ones_are(publisher, listen):
    class Busy(LedgerEngine):
        def cache_tree(self) -> CacheTree:
            emit(self, BlockStored((1,), None, (1,) * SIZE, SIZE), PinEvent("pinned", (1,), None))
            with self._lock:
                tree = cache_tree(self.ledger)
            emit(self, BlockStored((2,), None, (2,) * SIZE, SIZE), PinEvent("pinned", (2,), None))
            return tree

    publisher.attach(Busy())
    foreigner = listen()
    assert [(seq, [e["type"] for e in batch[1]]) for seq, batch in foreigner.replay(0)[:-1]] == [
        (1, ["AllBlocksCleared"]),
        (2, ["BlockStored"]),
    ]
    assert [seq for seq, _ in foreigner.replay(0, b"pins")] == [1, 2, -1]


def test_a_loss_that_nothing_follows_is_found_by_sync(engine, publisher):
    publisher.attach(engine)
    with (
        LossyLine(publisher.endpoint, k=1) as line,
        KVEventSubscriber(line.endpoint, publisher.replay_endpoint, timeout_s=DEADLINE_S) as subscriber,
    ):
        emit(engine, STORED)
        subscriber.sync()
        assert set(subscriber.mirror.blocks) == set(STORED.block_hashes)
        assert (line.num_lost, subscriber.num_gaps) == (1, 1)


def test_a_replay_of_another_publisher_never_fills_a_gap(engine, publisher):
    other = LedgerEngine(seed=1)
    publisher.attach(engine)
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as stranger:
        stranger.attach(other)
        for hash in range(200):  # more than the other will keep
            emit(other, BlockStored((hash,), None, (1,), 1))
        with (
            LossyLine(publisher.endpoint, k=1) as line,
            KVEventSubscriber(
                line.endpoint, stranger.replay_endpoint, snapshot=lambda: engine.cache_tree().as_dict(),
                timeout_s=DEADLINE_S,
            ) as subscriber,
        ):  # fmt: skip
            engine.run(100)
            subscriber.sync()
            assert subscriber.mirror.blocks == as_mirror(engine.cache_tree()).blocks != {}
            assert (subscriber.num_replays, subscriber.num_snapshots) == (1, 2)


def test_a_subscriber_is_told_when_the_replay_does_not_go_back_far_enough(engine):
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT, num_replayable=10) as publisher:
        publisher.attach(engine)
        for hash in range(30):
            emit(engine, BlockStored((hash,), None, (1,), 1))
        with pytest.raises(CannotFollow, match="keeps nothing between batches -1 and 21, and there is no snapshot"):
            subscribe(publisher)
        tree = {"event_seq": 30, "nodes": []}
        with subscribe(publisher, snapshot=lambda: tree) as subscriber:
            assert (subscriber.mirror.seq, subscriber.num_snapshots) == (30, 1)


def test_a_cleared_cache_is_a_beginning_even_where_the_replay_has_not_the_first(engine):
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT, num_replayable=10) as publisher:
        publisher.attach(engine)
        for hash in range(30):
            emit(engine, BlockStored((hash,), None, (1,), 1))
        emit(engine, AllBlocksCleared(), BlockStored((77,), None, (1,), 1))
        with subscribe(publisher) as subscriber:
            assert set(subscriber.mirror.blocks) == {77}


def test_a_subscriber_whose_snapshot_is_too_old_is_told_so(engine, publisher):
    publisher.attach(engine)
    emit(engine, STORED)
    with pytest.raises(CannotFollow, match="batch 1 is out, but what could be had ends at 0"):
        KVEventSubscriber(publisher.endpoint, snapshot=lambda: {"event_seq": 0, "nodes": []}, timeout_s=DEADLINE_S)


def test_a_subscriber_without_any_way_to_start_is_refused(publisher):
    with pytest.raises(ValueError, match="needs a replay_endpoint or a snapshot"):
        KVEventSubscriber(publisher.endpoint)


def test_a_silent_publisher_is_reported_in_time():
    with pytest.raises(CannotFollow, match=r"did not answer within 0\.2 s"):
        KVEventSubscriber("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", timeout_s=0.2)


def test_a_publisher_that_comes_back_on_the_same_port_is_followed_again(engine):
    other = LedgerEngine(seed=1)
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as first:
        first.attach(engine)
        engine.run(300)
        subscriber = subscribe(first)
    with subscriber, KVEventPublisher(first.endpoint, replay_endpoint=first.replay_endpoint) as second:
        other.run(100)
        second.attach(other)
        other.run(100)
        subscriber.sync()
        assert subscriber.mirror.blocks == as_mirror(other.cache_tree()).blocks != {}


def test_a_listener_notices_by_the_events_alone_that_another_publisher_has_the_port(engine):
    other = LedgerEngine(seed=1)
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as first:
        first.attach(engine)
        engine.run(300)
        subscriber = subscribe(first)
    last = subscriber.mirror.seq
    with subscriber, KVEventPublisher(first.endpoint, replay_endpoint=first.replay_endpoint) as second:
        second.attach(other)
        deadline = time.monotonic() + DEADLINE_S
        while subscriber.mirror.seq in (last, -1):
            assert time.monotonic() < deadline
            other.run(1)
            subscriber.poll(0.01)
        assert other.kv_events.last_seq("kv") < last, "the numbers do not give it away"
        other.run(20)
        subscriber.sync()
        assert subscriber.mirror.blocks == as_mirror(other.cache_tree()).blocks != {}
        assert subscriber.num_replays <= 3


def test_a_real_engine_is_mirrored_through_requests_flushes_and_new_weights(make_model, publisher):
    from lockstep.rollout.config import EngineConfig  # here, because the other process needs no torch
    from lockstep.rollout.engine import Engine

    real = Engine(make_model("llama"), EngineConfig(kv_cache="16 blocks", max_num_seqs=4))
    publisher.attach(real)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    with subscribe(publisher) as subscriber:
        sizes = []
        for act in (
            lambda: real.generate([[1] * 40, [1] * 30 + [2] * 30, [3] * 70], params),
            lambda: real.generate([[4] * 100, [5] * 100], params),  # evicts
            lambda: real.evict_descendants(next(node.hash for node in real.cache_tree().nodes if node.num_children)),
            real.flush_cache,
            lambda: real.generate([[6] * 60], params),
            lambda: real.weights.commit_weights("2", None),
        ):
            act()
            subscriber.sync()
            assert subscriber.mirror.blocks == as_mirror(real.cache_tree()).blocks
            sizes.append(len(subscriber.mirror.blocks))
        assert 0 < sizes[2] < sizes[1] and sizes[3] == 0 < sizes[4] and sizes[5] == 0
        assert subscriber.num_gaps == 0


def test_nobody_follows_across_what_happened_between_two_publishers_unawares(engine):
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as first:
        first.attach(engine)
        engine.run(200)
        last = engine.kv_events.last_seq("kv")
    assert not engine.kv_events.is_on
    engine.run(200)
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as second:
        second.attach(engine)
        assert engine.cache_tree().event_seq == last + 1
        with subscribe(second) as subscriber:
            assert subscriber.mirror.seq == last + 1
            assert subscriber.mirror.blocks == as_mirror(engine.cache_tree()).blocks
