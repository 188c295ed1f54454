"""A mirror in another process equals the prefix cache, whatever the wire loses."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lockstep.rollout.kv.cache_tree import CacheTree, cache_tree
from lockstep.rollout.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventLog,
    PinEvent,
)
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request, RequestOptions
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.tests.support import prepared_python

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

from lockstep.integration.kv_events.publisher import KVEventPublisher  # noqa: E402
from lockstep.integration.kv_events.subscriber import (  # noqa: E402
    CacheMirror,
    CannotFollow,
    EventGap,
    KVEventSubscriber,
    MirrorBroken,
)
from lockstep.integration.kv_events.wire import decode_batch, encode_batch  # noqa: E402

SIZE = 4
DEADLINE_S = 30.0
ANY_PORT = "tcp://127.0.0.1:*"


class LedgerEngine:
    """A KV ledger with random operations, under a lock, as an engine's steps and commands use it."""

    def __init__(self, seed: int = 0, num_blocks: int = 150) -> None:
        self.ledger = KVLedger(num_blocks, SIZE, prefix_cache=True)
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._running: list[Request] = []

    @property
    def kv_events(self) -> KVEventLog:
        return self.ledger.events

    def cache_tree(self) -> CacheTree:
        with self._lock:
            return cache_tree(self.ledger)

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            with self._lock:
                self._operate()
                self.ledger.events.flush()

    def _operate(self) -> None:
        kinds = {self._admit: 40, self._extend: 30, self._finish: 35, self._pin: 8, self._unpin: 8, self._evict: 6}
        rare = {lambda: self.ledger.flush(): 1, lambda: self.ledger.start_epoch(): 1}
        [operation] = self._random.choices([*kinds, *rare], [w * 4 for w in kinds.values()] + list(rare.values()))
        operation()

    def _admit(self) -> None:
        tokens = [self._random.choice((1, 2)) for _ in range(self._random.randrange(1, 12))]  # often shared
        tokens = [t for t in tokens for _ in range(SIZE)] + [7] * self._random.randrange(1, SIZE)
        options = RequestOptions(extra_key=self._random.choice(("", "", "salt")))
        request = Request(Sequence("r", tokens), SamplingParams(), options, 0, 0, 0.0, 0, None)
        self.ledger.open(request, self.ledger.match(request))
        self._running.append(request)
        self._grow(request)

    def _extend(self) -> None:
        if self._running:
            request = self._random.choice(self._running)
            request.sequence.token_ids += [self._random.randrange(3) for _ in range(self._random.randrange(1, 10))]
            self._grow(request)

    def _grow(self, request: Request) -> None:
        num_tokens = request.sequence.num_tokens
        if self.ledger.grow(request, num_tokens) is None:
            self._finish(request)
        else:
            self.ledger.publish(request, num_tokens)

    def _finish(self, request: Request | None = None) -> None:
        if self._running:
            request = request or self._random.choice(self._running)
            self._running.remove(request)
            self.ledger.close(request)
            self.ledger.forget(request)

    def _some_hashes(self) -> list[int]:
        cached = [node.hash for node in self.ledger.cache]
        return self._random.sample(cached, min(3, len(cached)))

    def _pin(self) -> None:
        self.ledger.pins.pin(self._some_hashes(), self._random.choice(("a", "b")))

    def _unpin(self) -> None:
        self.ledger.pins.unpin(self._some_hashes(), self._random.choice(("a", "b")))

    def _evict(self) -> None:
        for hash in self._some_hashes():
            if (node := self.ledger.cache.get(hash)) is not None:
                self.ledger.evict_below(node)


def as_mirror(tree: CacheTree) -> CacheMirror:
    return CacheMirror.from_snapshot(json.loads(json.dumps(tree.as_dict())))


@pytest.fixture
def engine() -> LedgerEngine:
    return LedgerEngine()


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT) as publisher:
        yield publisher


# -- both ends in processes of their own ----------------------------------------------------------------------------


def follow(settings: dict) -> None:
    """Run the other process: mirror up to a given batch, and print the mirror.

    It requests snapshots, and receives the end, in lines of JSON.
    """
    told: queue.SimpleQueue[dict] = queue.SimpleQueue()
    threading.Thread(target=lambda: [told.put(json.loads(line)) for line in sys.stdin], daemon=True).start()
    until: list[int] = []

    def listen(timeout_s: float) -> dict | None:
        try:
            message = told.get(timeout=timeout_s)
        except queue.Empty:
            return None
        until.extend([message["until"]] if "until" in message else [])
        return message.get("tree")

    def snapshot() -> dict:
        say({"ask": "snapshot"})
        while (tree := listen(DEADLINE_S)) is None:
            pass
        return tree

    deadline = time.monotonic() + DEADLINE_S
    is_sleepy = settings.pop("is_sleepy")
    with KVEventSubscriber(**settings.pop("settings"), snapshot=snapshot if settings["snapshot"] else None) as sub:
        say({"ask": "nothing"})
        while not until or sub.mirror.seq < until[0]:
            assert time.monotonic() < deadline, f"stuck at batch {sub.mirror.seq} of {until}"
            listen(0.05 if is_sleepy else 0.0)
            if (not is_sleepy or until) and not sub.poll(0.05) and until:
                sub.sync()
        blocks = {hash: [block.parent, block.token_ids, block.salt] for hash, block in sub.mirror.blocks.items()}
        say({"blocks": blocks, "gaps": sub.num_gaps, "replays": sub.num_replays, "snapshots": sub.num_snapshots})


def say(message: dict) -> None:
    print(json.dumps(message), flush=True)


class Follower:
    """The other process, as seen from this one."""

    def __init__(
        self, engine: LedgerEngine, endpoint: str, replay: str | None, *, snapshot: bool, is_sleepy: bool = False,
        hwm: int = 100_000,
    ) -> None:  # fmt: skip
        self._engine = engine
        subscriber = {"endpoint": endpoint, "replay_endpoint": replay, "hwm": hwm, "timeout_s": DEADLINE_S}
        settings = {"settings": subscriber, "snapshot": snapshot, "is_sleepy": is_sleepy}
        command = [sys.executable, __file__, json.dumps(settings)]
        self._process = prepared_python.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._heard: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._write_lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def wait_until_ready(self) -> None:
        assert self._heard.get(timeout=DEADLINE_S) == {"ask": "nothing"}

    def finish(self, until: int) -> dict:
        self._tell({"until": until})
        result = self._heard.get(timeout=DEADLINE_S)
        assert self._process.wait(DEADLINE_S) == 0
        return result

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()

    def _serve(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            if message == {"ask": "snapshot"}:
                self._tell({"tree": self._engine.cache_tree().as_dict()})
            else:
                self._heard.put(message)

    def _tell(self, message: dict) -> None:
        with self._write_lock:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


class LossyLine:
    """A line between a publisher and its subscribers that loses every k-th batch."""

    def __init__(self, endpoint: str, k: int) -> None:
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.XSUB)
        self._up.connect(endpoint)
        self._down = self._context.socket(zmq.XPUB)
        self._down.bind(ANY_PORT)
        self.endpoint = self._down.getsockopt_string(zmq.LAST_ENDPOINT)
        self._k, self.num_lost = k, 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._up, zmq.POLLIN)
        poller.register(self._down, zmq.POLLIN)
        num_batches = 0
        try:
            while True:
                ready = dict(poller.poll())
                if self._down in ready:
                    self._up.send(self._down.recv())
                if self._up in ready:
                    frames = self._up.recv_multipart()
                    num_batches += frames[0] == b"kv-events"
                    if frames[0] == b"kv-events" and num_batches % self._k == 0:
                        self.num_lost += 1
                    else:
                        self._down.send_multipart(frames)
        except zmq.ContextTerminated:
            self._up.close(0)
            self._down.close(0)

    def __enter__(self) -> LossyLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.term()
        self._thread.join(DEADLINE_S)


def assert_equals_the_tree(result: dict, engine: LedgerEngine) -> None:
    blocks = {int(hash): (parent, tuple(tokens), salt) for hash, (parent, tokens, salt) in result["blocks"].items()}
    tree = engine.cache_tree()
    assert len(tree.nodes) > 20, "an empty cache shows nothing"
    assert blocks == {node.hash: (node.parent, node.token_ids, node.salt) for node in tree.nodes}


@pytest.mark.parametrize("way", ["replay", pytest.param("snapshot", marks=pytest.mark.slow)])
def test_another_process_mirrors_the_cache_from_events_alone(engine, publisher, way):
    publisher.attach(engine)
    replay = publisher.replay_endpoint if way == "replay" else None
    with Follower(engine, publisher.endpoint, replay, snapshot=way == "snapshot") as follower:
        follower.wait_until_ready()
        engine.run(5000)
        result = follower.finish(engine.kv_events.last_seq("kv"))
    assert_equals_the_tree(result, engine)
    assert (result["gaps"], result["snapshots"]) == (0, int(way == "snapshot"))


@pytest.mark.parametrize("way", [pytest.param("replay", marks=pytest.mark.slow), "snapshot"])
def test_a_process_that_joins_in_the_middle_mirrors_it_too(engine, publisher, way):
    publisher.attach(engine)
    engine.run(2500)
    replay = publisher.replay_endpoint if way == "replay" else None
    with Follower(engine, publisher.endpoint, replay, snapshot=way == "snapshot") as follower:
        follower.wait_until_ready()
        engine.run(2500)
        result = follower.finish(engine.kv_events.last_seq("kv"))
    assert_equals_the_tree(result, engine)
    assert (result["gaps"], result["snapshots"]) == (0, int(way == "snapshot"))


@pytest.mark.parametrize("way", ["replay", pytest.param("snapshot", marks=pytest.mark.slow)])
def test_lost_messages_are_made_up_for(engine, publisher, way):
    publisher.attach(engine)
    engine.run(100)
    replay = publisher.replay_endpoint if way == "replay" else None
    with LossyLine(publisher.endpoint, k=7) as line:
        with Follower(engine, line.endpoint, replay, snapshot=way == "snapshot") as follower:
            follower.wait_until_ready()
            engine.run(2000)
            result = follower.finish(engine.kv_events.last_seq("kv"))
        assert line.num_lost > 100
    assert_equals_the_tree(result, engine)
    assert result["gaps"] > 0
    assert (result["replays"] > 1) if way == "replay" else (result["snapshots"] > 1)


def test_what_a_high_water_mark_drops_is_made_up_for(engine):
    with (
        tempfile.TemporaryDirectory() as folder,  # a pipe has a small buffer there, unlike TCP
        KVEventPublisher(f"ipc://{folder}/kv", replay_endpoint=f"ipc://{folder}/replay", hwm=1) as publisher,
    ):
        publisher.attach(engine)
        with Follower(
            engine, publisher.endpoint, publisher.replay_endpoint, snapshot=False, is_sleepy=True, hwm=1
        ) as follower:  # fmt: skip
            follower.wait_until_ready()
            engine.run(5000)
            result = follower.finish(engine.kv_events.last_seq("kv"))
    assert_equals_the_tree(result, engine)
    assert result["gaps"] > 0


# -- the wire --------------------------------------------------------------------------------------------------------


class Foreigner:
    """A subscriber that uses ZeroMQ, msgpack and the description, and none of our code."""

    def __init__(self, publisher: KVEventPublisher, *topics: bytes, hwm: int = 1000) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, hwm)
        self._sub.connect(publisher.endpoint)
        for topic in (*topics, b"hello/there"):
            self._sub.subscribe(topic)
        assert self.next()[0] == b"hello/there"  # the subscriptions are active
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(publisher.replay_endpoint)

    def next(self) -> tuple[bytes, int, object]:
        assert self._sub.poll(DEADLINE_S * 1000), "nothing came"
        topic, seq, payload = self._sub.recv_multipart()
        return topic, int.from_bytes(seq, "big", signed=True), msgpack.unpackb(payload)

    def replay(self, start: int, *topic: bytes) -> list[tuple[int, object]]:
        self._replay.send_multipart([b"", start.to_bytes(8, "big"), *topic])
        answers = []
        while not answers or answers[-1][0] != -1:
            assert self._replay.poll(DEADLINE_S * 1000), "no answer"
            _, seq, payload = self._replay.recv_multipart()
            answers.append((int.from_bytes(seq, "big", signed=True), msgpack.unpackb(payload) if payload else b""))
        return answers

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def listen(publisher) -> Iterator[Callable[..., Foreigner]]:
    made = []

    def make(*topics: bytes, **settings: int) -> Foreigner:
        made.append(Foreigner(publisher, *topics, **settings))
        return made[-1]

    yield make
    for foreigner in made:
        foreigner.close()


def emit(engine: LedgerEngine, *events: object) -> None:
    for event in events:
        engine.kv_events.append(event)
    engine.kv_events.flush()


STORED = BlockStored((-(2**63), 2**63 - 1), None, (1, 2, 3, 4, 5, 6, 7, 8), 4)


def test_a_foreign_decoder_reads_the_events_as_described(engine, publisher, listen):
    foreigner = listen(b"")  # everything, as routers do
    publisher.attach(engine)
    before = time.time()
    emit(engine, STORED, BlockStored((5,), STORED.block_hashes[1], (9, 9, 9, 9), 4, "salt"))
    emit(engine, PinEvent("pinned", (5,), "me"))
    emit(engine, BlockRemoved((5,)))
    emit(engine, AllBlocksCleared())
    messages = [foreigner.next() for _ in range(4)]
    assert [(topic, seq) for topic, seq, _ in messages] == [(b"kv-events", seq) for seq in range(4)]  # and no pins
    for _, _, (timestamp, _, dp_rank) in messages:
        assert before - 60 < timestamp < time.time() + 60 and dp_rank == 0
    nothing = {"lora_id": None, "session_id": None, "lora_name": None}
    assert [events for _, _, (_, events, _) in messages] == [
        [{"type": "AllBlocksCleared"}],  # the blocks that were cached when it was attached
        [
            {
                "type": "BlockStored", "block_hashes": [-(2**63), 2**63 - 1], "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "block_size": 4, "medium": "GPU", "cache_salt": None, **nothing,
            },
            {
                "type": "BlockStored", "block_hashes": [5], "parent_block_hash": 2**63 - 1,
                "token_ids": [9, 9, 9, 9], "block_size": 4, "medium": "GPU", "cache_salt": "salt", **nothing,
            },
        ],
        [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}],
        [{"type": "AllBlocksCleared"}],
    ]  # fmt: skip


def test_pins_have_a_topic_and_numbers_of_their_own(engine, publisher, listen):
    foreigner = listen(b"pins")
    publisher.attach(engine)
    emit(engine, STORED)
    emit(engine, PinEvent("auto_unpinned", (5, 5), None, "no room"))
    emit(engine, STORED, PinEvent("expired", (6,), "me"))
    messages = [foreigner.next(), foreigner.next()]
    assert [(topic, seq) for topic, seq, _ in messages] == [(b"pins", 1), (b"pins", 2)]
    assert messages[0][2][1] == [
        {"type": "PinEvent", "kind": "auto_unpinned", "block_hashes": [5, 5], "owner": None, "reason": "no room"}
    ]
    assert foreigner.replay(2, b"pins")[0][1][1][0]["owner"] == "me"


@pytest.mark.parametrize("topic", ["kv", "pins"])
def test_batches_come_back_from_the_wire_as_they_were(topic):
    events = {
        "kv": (STORED, BlockStored((1,), 7, (2, 3), 2, "salt"), BlockRemoved((1, 2)), AllBlocksCleared()),
        "pins": (PinEvent("dropped", (1, 1), "owner", "why"), PinEvent("unpinned", (), None)),
    }
    batch = EventBatch(topic, 3, 0.5, events[topic])
    assert decode_batch(topic, 3, encode_batch(batch)) == batch


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x00\x90", msgpack.packb([0.0, [{"type": "New"}], 0])])
def test_a_payload_that_is_none_is_refused_by_number(payload):
    with pytest.raises(ValueError, match="batch 3 of kv cannot be read"):
        decode_batch("kv", 3, payload)


def test_replay_sends_what_is_wanted_and_says_where_it_ends(engine, publisher, listen):
    foreigner = listen()
    publisher.attach(engine)
    for hash in range(5):
        emit(engine, BlockStored((hash,), None, (1,), 1))
    assert [seq for seq, _ in foreigner.replay(3)] == [3, 4, 5, -1]
    assert foreigner.replay(6) == [(-1, b"")]
    [(end, summary)] = foreigner.replay(6, b"kv-events")
    assert (end, summary) == (-1, {"stream": publisher.stream, "oldest": 0, "newest": 5})
    assert foreigner.replay(0, b"unknown")[-1][1]["newest"] is None


def test_requests_that_make_no_sense_are_passed_over(engine, publisher, listen):
    foreigner = listen()
    publisher.attach(engine)
    for frames in ([b""], [b"x", b"y"], [b"", b"short"], [b"", b"12345678", b"kv-events", b"more"]):
        foreigner._replay.send_multipart(frames)
    assert [seq for seq, _ in foreigner.replay(0)] == [0, -1]


def test_a_client_that_never_reads_its_replays_stops_nobody(engine, publisher, listen):
    greedy = listen()
    publisher.attach(engine)
    for _ in range(300):
        emit(engine, BlockStored((1,), None, tuple(range(1000)), 1000), BlockRemoved((1,)))
    for _ in range(200):
        greedy._replay.send_multipart([b"", bytes(8)])  # 200 x 1 MB
    assert [seq for seq, _ in listen().replay(299)] == [299, 300, -1]


# -- joining late, falling behind, coming back -------------------------------------------------------------------------


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


# -- the publisher's own behaviour ------------------------------------------------------------------------------------


def test_closing_ends_the_thread_frees_the_ports_and_turns_the_events_off(engine):
    before = set(threading.enumerate())
    publisher = KVEventPublisher(ANY_PORT, replay_endpoint=ANY_PORT)
    publisher.attach(engine)
    assert engine.kv_events.is_on and set(threading.enumerate()) != before
    publisher.close()
    publisher.close()
    assert not engine.kv_events.is_on and set(threading.enumerate()) == before
    with pytest.raises(ValueError, match="closed"):
        publisher.attach(engine)
    KVEventPublisher(publisher.endpoint, replay_endpoint=publisher.replay_endpoint).close()


def test_the_last_batches_leave_before_it_closes(engine, publisher, listen):
    foreigner = listen(b"kv-events", hwm=1)
    publisher.attach(engine)
    numbers: list[int] = []
    reader = threading.Thread(target=lambda: numbers.extend(foreigner.next()[1] for _ in range(501)), daemon=True)
    for _ in range(500):
        emit(engine, BlockStored((1,), None, (2**31 - 1,) * 5000, 5000))  # 12 MB: much waits in the publisher
    reader.start()
    publisher.close()
    reader.join(DEADLINE_S)
    assert numbers == list(range(501))


def test_an_address_that_is_taken_is_an_error_at_once_and_leaves_nothing_behind(publisher):
    before = set(threading.enumerate())
    with pytest.raises(zmq.ZMQError, match="in use"):
        KVEventPublisher(ANY_PORT, replay_endpoint=publisher.endpoint)
    assert set(threading.enumerate()) == before


def test_the_engine_never_waits_for_listeners(engine):
    with KVEventPublisher(ANY_PORT, hwm=1) as publisher, zmq.Context() as context:
        publisher.attach(engine)
        with context.socket(zmq.SUB) as deaf:
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.subscribe(b"hello/there")
            deaf.connect(publisher.endpoint)
            assert deaf.poll(DEADLINE_S * 1000)  # it is connected, and reads no more
            deaf.subscribe(b"kv-events")
            events = BlockStored((1,), None, tuple(range(1000)), 1000), BlockRemoved((1,))
            runner = threading.Thread(target=lambda: [emit(engine, *events) for _ in range(5000)], daemon=True)
            runner.start()
            runner.join(DEADLINE_S)
            assert not runner.is_alive(), "10 MB for one that does not read held the engine up"
            assert engine.kv_events.last_seq("kv") == 5000


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://eth0:1", "tcp://10.0.0.1:1", "pgm://x"]
)
def test_other_machines_are_let_in_only_when_that_is_meant(endpoint):
    with pytest.raises(ValueError, match="allow_remote"):
        KVEventPublisher(endpoint)
    with pytest.raises(ValueError, match="allow_remote"):
        KVEventPublisher(ANY_PORT, replay_endpoint=endpoint)


def test_a_remote_address_is_bound_when_it_is_meant():
    KVEventPublisher("tcp://0.0.0.0:*", allow_remote=True).close()


def test_every_bad_setting_is_named_at_once():
    with pytest.raises(ValueError, match=r"tcp://\*:1 can be.*topic 'pin' must.*hwm.*-1.*num_replayable.*0"):
        KVEventPublisher("tcp://*:1", topic="pin", hwm=-1, num_replayable=0)


def test_a_second_engine_is_refused(engine, publisher):
    publisher.attach(engine)
    with pytest.raises(ValueError, match="attached already"):
        publisher.attach(LedgerEngine())


def test_an_engine_that_cannot_tell_its_state_is_not_left_listened_to(engine, publisher, monkeypatch):
    class Broken(LedgerEngine):
        def cache_tree(self) -> CacheTree:
            raise RuntimeError("broken")

    broken = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        publisher.attach(broken)
    assert not broken.kv_events.is_on
    publisher.attach(engine)


# -- the mirror's rules ------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    follow(json.loads(sys.argv[1]))
