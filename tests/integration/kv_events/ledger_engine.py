"""A ledger with events in an engine's place, and the other ends of its wire."""

from __future__ import annotations

import json
import random
import threading

import pytest

from lockstep.rollout.kv.cache_tree import CacheTree, cache_tree
from lockstep.rollout.kv.events import (
    BlockStored,
    KVEventLog,
)
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

from lockstep.integration.kv_events.publisher import KVEventPublisher  # noqa: E402
from lockstep.integration.kv_events.subscriber import (  # noqa: E402
    CacheMirror,
)

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


def emit(engine: LedgerEngine, *events: object) -> None:
    for event in events:
        engine.kv_events.append(event)
    engine.kv_events.flush()


STORED = BlockStored((-(2**63), 2**63 - 1), None, (1, 2, 3, 4, 5, 6, 7, 8), 4)
