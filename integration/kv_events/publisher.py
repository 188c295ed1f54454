"""KV events over ZeroMQ, for routers and other subscribers: the content of the prefix cache, batch by batch.

The first batch is AllBlocksCleared and the blocks that were cached when the publisher was attached, so that the stream
is complete by itself. This is the encoding of SGLang since its events are maps (its `disaggregation/kv_events.py`, pull
request 37482); the frames are vLLM's too. Additions:

- A subscription to "", as of routers, gets the KV topic and not the pins.
- A subscription to "hello/<anything>" is answered there once: [topic, newest seq of the KV topic, msgpack of
  {"stream"}]. Everything published before has then been sent to that subscriber, or was dropped at its high-water
  mark, and its earlier subscriptions are active. The stream is a name that each publisher draws at random.
- The replay socket (ROUTER) takes ["", first seq wanted] as in SGLang, and answers with one ["", seq, payload] for
  each batch that it still has, then ["", -1, ""]. For ["", first seq, topic] it puts msgpack of {"stream", "oldest",
  "newest"} in that last payload: the numbers that it had, null when it had none. A first batch above the requested
  number means that the batches between are lost.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgpack
import zmq

from ...rollout.kv.events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    KVEventLog,
    Topic,
)
from .wire import END_SEQ, HELLO, KV_TOPIC, PINS_TOPIC, decode_seq, encode_batch, encode_seq

logger = logging.getLogger(__name__)

DEFAULT_HWM = 100_000

_CLOSE_S = 5.0  # longest wait of `close` for the thread
_LINGER_MS = 1000  # longest time to send the rest of the messages


class CacheState(Protocol):
    """The cache at one moment, as `Engine.cache_tree()` reports it."""

    @property
    def event_seq(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def nodes(self) -> Sequence[Any]: ...  # hash, parent, token_ids, salt; parents before their children


class EventSource(Protocol):
    """The part of an engine that a publisher uses."""

    @property
    def kv_events(self) -> KVEventLog: ...
    def cache_tree(self) -> CacheState: ...


# -- the wire ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Start:
    """The blocks that were cached when the publisher was attached: they replace every KV batch up to its own number."""

    batch: EventBatch


class KVEventPublisher:
    """Publish one engine's KV and pin events; a thread of its own has the sockets, so the engine never waits.

    Example::

        with KVEventPublisher("tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558") as publisher:
            publisher.attach(engine)
            ...

    A subscriber that reads more slowly than events arrive loses those beyond the high-water mark, sees it by the
    numbers, and can request a replay or `cache_tree`.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = KV_TOPIC,
        hwm: int = DEFAULT_HWM,
        num_replayable: int = 10_000,
        dp_rank: int = 0,
        allow_remote: bool = False,
    ) -> None:
        """Bind the sockets; nothing is published before `attach`. A port of `*` is any free one.

        hwm: messages that wait for one subscriber before more are dropped. num_replayable: batches of each topic that
        are kept for replay. dp_rank: part of every batch. allow_remote: accept subscribers on other machines; any
        client that reaches the port can read every token id. Raises ValueError naming every bad setting, zmq.ZMQError
        if an address cannot be bound.
        """
        endpoints = [endpoint] if replay_endpoint is None else [endpoint, replay_endpoint]
        _check_settings(endpoints, topic, hwm, num_replayable, allow_remote)
        self.stream = secrets.token_hex(8)
        self._kv_topic = topic.encode()
        self._topics: dict[Topic, bytes] = {"kv": self._kv_topic, "pins": PINS_TOPIC.encode()}
        self._dp_rank = dp_rank
        self._newest: dict[bytes, int | None] = dict.fromkeys(self._topics.values())
        self._replayable: dict[bytes, deque[tuple[int, bytes]]] = {
            name: deque(maxlen=num_replayable if replay_endpoint is not None else 0) for name in self._topics.values()
        }
        self._queue: SimpleQueue[EventBatch | _Start | None] = SimpleQueue()  # None: stop
        self._is_stopping = False
        self._held: list[EventBatch] | None = []  # batches before the _Start; None: after it
        self._log: KVEventLog | None = None
        self._lock = threading.Lock()  # of _log

        self._context = zmq.Context()
        self._waker, self._wakened = socket.socketpair()  # the thread polls it beside the sockets
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        try:
            self._pub, self._replay = self._open_sockets(endpoint, replay_endpoint, hwm, num_replayable)
        except zmq.ZMQError:
            self._free()
            raise
        self._thread = threading.Thread(target=self._run, name="lockstep-kv-events", daemon=True)
        self._thread.start()

    def _open_sockets(
        self, endpoint: str, replay_endpoint: str | None, hwm: int, num_replayable: int
    ) -> tuple[zmq.Socket, zmq.Socket | None]:
        pub = self._context.socket(zmq.XPUB)  # a PUB that receives the subscriptions
        pub.setsockopt(zmq.XPUB_MANUAL, 1)
        pub.setsockopt(zmq.SNDHWM, hwm)
        pub.bind(endpoint)
        self.endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = None
        if replay_endpoint is None:
            return pub, None
        replay = self._context.socket(zmq.ROUTER)
        replay.setsockopt(zmq.SNDHWM, num_replayable + 1)  # a whole replay to one client, and no more: it never blocks
        replay.bind(replay_endpoint)
        self.replay_endpoint = replay.getsockopt_string(zmq.LAST_ENDPOINT)
        return pub, replay

    def attach(self, engine: EventSource) -> None:
        """Publish this engine's events from now on, after the present content of its cache. One engine for each
        publisher.

        Raises ValueError for a second one, or when the publisher is closed.
        """
        with self._lock:
            if self._log is not None or not self._thread.is_alive():
                raise ValueError("this publisher is closed, or attached already")
            self._log = engine.kv_events
            self._log.attach(self._take)
        try:
            state = engine.cache_tree()  # after the sink is attached: every batch is in the tree or taken
        except BaseException:
            self._detach()
            raise
        self._put(_Start(_state_batch(state)))

    def close(self) -> None:
        """Send the batches taken so far, end the thread and free the ports. The engine continues. May be called
        again."""
        self._detach()
        self._put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the KV event publisher did not end within {_CLOSE_S:.0f} s")

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- in the threads of the engine -------------------------------------------------------------------------------

    def _take(self, batch: EventBatch) -> None:
        self._put(batch)

    def _put(self, item: EventBatch | _Start | None) -> None:
        self._queue.put(item)
        with suppress(OSError):  # full: the thread is about to read anyway; closed: it has ended
            self._waker.send(b"\0")

    def _detach(self) -> None:
        with self._lock:
            log, self._log = self._log, None
        if log is not None:
            log.detach(self._take)

    # -- in the thread that has the sockets -------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wakened, self._pub, self._replay):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        try:
            while True:
                self._publish_taken()
                self._answer_subscriptions()
                self._answer_replays()
                if self._is_stopping:
                    return
                poller.poll()
                with suppress(BlockingIOError):
                    self._wakened.recv(4096)  # before the queue is read: a later item wakes the thread again
        except Exception:
            logger.exception("the KV event publisher has ended")
            self._detach()  # or its queue would grow forever
        finally:
            self._free()

    def _free(self) -> None:
        self._context.destroy(linger=_LINGER_MS)
        self._waker.close()
        self._wakened.close()

    def _publish_taken(self) -> None:
        """Publish the batches that the engine has passed on."""
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if item is None:
                    self._is_stopping = True
                elif isinstance(item, _Start):
                    self._start(item.batch)
                elif self._held is not None:
                    self._held.append(item)
                else:
                    self._publish(item)

    def _start(self, state: EventBatch) -> None:
        """Publish the state in place of all KV batches that it covers, then the later batches."""
        held, self._held = self._held or [], None
        self._publish(state)
        for batch in held:
            if batch.topic == "pins" or batch.seq > state.seq:
                self._publish(batch)

    def _publish(self, batch: EventBatch) -> None:
        topic, payload = self._topics[batch.topic], encode_batch(batch, self._dp_rank)
        self._newest[topic] = batch.seq
        self._replayable[topic].append((batch.seq, payload))
        self._pub.send_multipart([topic, encode_seq(batch.seq), payload])

    def _answer_subscriptions(self) -> None:
        while self._pub.poll(0):
            request = self._pub.recv()
            # after the request was read: the answer covers everything passed on before it was sent
            self._publish_taken()
            if request[:1] not in (b"\0", b"\1"):
                continue  # not a subscription
            topic = request[1:] or self._kv_topic
            self._pub.setsockopt(zmq.SUBSCRIBE if request[0] else zmq.UNSUBSCRIBE, topic)
            if request[0] and topic.startswith(HELLO):
                newest = self._newest[self._kv_topic]
                seq = encode_seq(END_SEQ if newest is None else newest)
                self._pub.send_multipart([topic, seq, msgpack.packb({"stream": self.stream})])

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            client, *request = self._replay.recv_multipart()
            self._publish_taken()  # as above
            if len(request) not in (2, 3) or request[0] or len(request[1]) != 8:
                logger.warning("a replay request of %d frames cannot be read", len(request))
                continue
            self._send_replay(self._replay, client, decode_seq(request[1]), *request[2:])

    def _send_replay(self, replay: zmq.Socket, client: bytes, start: int, topic: bytes | None = None) -> None:
        name = self._kv_topic if topic is None else topic
        kept = self._replayable.get(name, ())
        for seq, payload in kept:
            if seq >= start:
                replay.send_multipart([client, b"", encode_seq(seq), payload])
        summary = b""
        if topic is not None:
            oldest = kept[0][0] if kept else None
            summary = msgpack.packb({"stream": self.stream, "oldest": oldest, "newest": self._newest.get(name)})
        replay.send_multipart([client, b"", encode_seq(END_SEQ), summary])


def _state_batch(state: CacheState) -> EventBatch:
    """Build the batch that makes any mirror equal to `state`."""
    batches: list[EventBatch] = []
    assert state.event_seq >= 0, "a log that is attached to has a number to give"
    log = KVEventLog()  # merges blocks that continue each other
    log.attach(batches.append)
    log.append(AllBlocksCleared())
    for node in state.nodes:
        keys = (node.image_key,) if node.image_key else ()
        log.append(BlockStored((node.hash,), node.parent, tuple(node.token_ids), state.block_size, node.salt, keys))
    log.flush()
    [batch] = batches
    return EventBatch("kv", state.event_seq, batch.timestamp, batch.events)


def _check_settings(endpoints: list[str], topic: str, hwm: int, num_replayable: int, allow_remote: bool) -> None:
    wrong = []
    if remote := [endpoint for endpoint in endpoints if not allow_remote and not _is_local(endpoint)]:
        wrong.append(f"{', '.join(remote)} can be reached from other machines: pass allow_remote=True if that is meant")
    others = (PINS_TOPIC, HELLO.decode())
    if not topic or any(topic.startswith(other) or other.startswith(topic) for other in others):
        wrong.append(f"topic {topic!r} must not be empty, nor begin as {' or '.join(map(repr, others))} does")
    if hwm < 1:
        wrong.append(f"hwm must be at least 1, not {hwm}")
    if num_replayable < 1:
        wrong.append(f"num_replayable must be at least 1, not {num_replayable}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _is_local(endpoint: str) -> bool:
    """Return whether only this machine can reach a socket bound there."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return scheme in ("ipc", "inproc")
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # "*", or the name of an interface
        return False
