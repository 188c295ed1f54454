"""A mirror of an engine's prefix cache in another process, built from its KV events alone.

`CacheMirror` is the state and its rules; `KVEventSubscriber` feeds it from a publisher's sockets and repairs losses: by
a replay, by a new snapshot, or by an error if it cannot.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from ...rollout.errors import LockstepError
from ...rollout.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from .publisher import DEFAULT_HWM
from .wire import END_SEQ, HELLO, KV_TOPIC, decode_batch, decode_seq, encode_seq

Snapshot = Mapping[str, Any]  # the JSON form of `Engine.cache_tree()`

_HELLO_RETRY_S = 0.5  # an answer may be dropped where too many messages wait; after this time the request is repeated
_MAX_AT_ONCE = 1000  # messages that are received before they are applied


class EventGap(LockstepError):
    """Missing batches before the one to apply; the mirror is unchanged."""


class MirrorBroken(LockstepError):
    """A batch that contradicts the mirror: it no longer equals the cache, and must be built anew."""


class CannotFollow(LockstepError):
    """A loss that neither the replay socket nor a snapshot can repair, or a silent publisher."""


@dataclass(frozen=True)
class MirroredBlock:
    """One cached block."""

    parent: int | None  # hash of the block before it; None: the first of its prefix
    token_ids: tuple[int, ...]
    salt: str
    image_key: str = ""  # names its images; "": none


class CacheMirror:
    """The cached blocks, by hash, after the batches up to `seq`."""

    def __init__(self, blocks: Mapping[int, MirroredBlock] | None = None, seq: int = -1) -> None:
        self.blocks: dict[int, MirroredBlock] = dict(blocks or {})
        self.seq = seq  # the last applied KV batch; -1: none

    @classmethod
    def from_snapshot(cls, tree: Snapshot) -> CacheMirror:
        """Build the mirror of a whole `cache_tree`. Raises ValueError for a part of one (`depth`, `under`)."""
        nodes = {node["hash"]: node for node in tree["nodes"]}
        num_children = dict.fromkeys(nodes, 0)
        for node in nodes.values():
            if node["parent"] in num_children:
                num_children[node["parent"]] += 1
        incomplete = [
            hash
            for hash, node in nodes.items()
            if node["num_children"] != num_children[hash] or not (node["parent"] is None or node["parent"] in nodes)
        ]
        if incomplete:
            raise ValueError(f"not a whole cache tree: parents or children of {incomplete[:5]} are missing")
        blocks = {
            hash: MirroredBlock(node["parent"], tuple(node["token_ids"]), node["salt"], node["image_key"])
            for hash, node in nodes.items()
        }
        return cls(blocks, tree["event_seq"])

    def apply(self, batch: EventBatch) -> None:
        """Apply the next batch to the mirror.

        A batch that clears the cache may come after a gap, because it makes earlier batches irrelevant. Raises EventGap
        for any other batch after a gap, and MirrorBroken for an event that contradicts the mirror, which is unusable
        afterwards.
        """
        events = batch.events
        cleared = max((i for i, event in enumerate(events) if isinstance(event, AllBlocksCleared)), default=None)
        if cleared is not None:
            self.blocks.clear()
            events = events[cleared + 1 :]
        elif batch.seq != self.seq + 1:
            raise EventGap(f"batch {batch.seq} came after {self.seq}")
        for event in events:
            self._apply(batch.seq, event)
        self.seq = batch.seq

    def _apply(self, seq: int, event: object) -> None:
        if isinstance(event, BlockStored):
            self._store(seq, event)
        elif isinstance(event, BlockRemoved):
            if unknown := [hash for hash in event.block_hashes if self.blocks.pop(hash, None) is None]:
                raise MirrorBroken(f"batch {seq} removes blocks that are not there: {unknown[:5]}")
        else:
            raise ValueError(f"batch {seq} has an event that is none of the cache: {event!r}")

    def _store(self, seq: int, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        keys = event.image_keys or ("",) * len(event.block_hashes)
        if len(event.token_ids) != size * len(event.block_hashes):
            raise MirrorBroken(f"batch {seq} stores {len(event.token_ids)} tokens in blocks of {size}")
        for index, hash in enumerate(event.block_hashes):
            if hash in self.blocks or (parent is not None and parent not in self.blocks):
                raise MirrorBroken(f"batch {seq} stores block {hash}, which is there already or whose parent is not")
            tokens = event.token_ids[index * size : (index + 1) * size]
            self.blocks[hash] = MirroredBlock(parent, tokens, event.cache_salt, keys[index])
            parent = hash


@dataclass(frozen=True)
class _Replay:
    """The answer of the replay socket."""

    batches: list[EventBatch]
    stream: str  # the publisher's name of itself
    oldest: int | None  # number of the first batch that the publisher keeps; None: it keeps none


class KVEventSubscriber:
    """Follow one `KVEventPublisher`, whenever it joins and whatever is dropped on the way. Not thread-safe.

    Example::

        with KVEventSubscriber("tcp://127.0.0.1:5557", snapshot=lambda: requests.get(...).json()) as subscriber:
            while True:
                subscriber.poll(1.0)
                route(subscriber.mirror.blocks)

    It starts from a snapshot if it has one, else from a replay of everything; after a gap it first requests a replay,
    which is smaller.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        snapshot: Callable[[], Snapshot] | None = None,
        topic: str = KV_TOPIC,
        hwm: int = DEFAULT_HWM,
        timeout_s: float = 5.0,
    ) -> None:
        """Connect, and build the mirror up to now.

        snapshot: reads the engine's whole `cache_tree`, in its JSON form. hwm: messages that wait here before more are
        dropped. timeout_s: limit for each answer of the publisher. Raises ValueError without both a replay endpoint and
        a snapshot, CannotFollow if they do not suffice or no answer comes.
        """
        if replay_endpoint is None and snapshot is None:
            raise ValueError("a subscriber needs a replay_endpoint or a snapshot: it cannot start without either")
        self.mirror = CacheMirror()
        self.num_gaps = 0  # times that batches were missing
        self.num_replays = 0
        self.num_snapshots = 0
        self._topic, self._replay_endpoint = topic.encode(), replay_endpoint
        self._snapshot, self._timeout_s = snapshot, timeout_s
        self._stream = ""  # the publisher's name of itself; empty: not known yet
        self._last_received = -1  # number of the last batch that was sent here; the next has a greater one
        self._arrived: deque[EventBatch] = deque()  # received, not yet applied
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        try:
            self._sub.setsockopt(zmq.RCVHWM, hwm)  # receiving only: subscriptions are never dropped
            self._sub.subscribe(self._topic)
            self._sub.connect(endpoint)
            self.sync()
        except BaseException:
            self.close()
            raise

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply the received batches, waiting up to `timeout_s` for one; returns how many were applied.

        Raises CannotFollow as the constructor does, and ValueError for a message that cannot be read.
        """
        if self._sub.poll(int(timeout_s * 1000)):
            self._receive()
        return self._apply_arrived()

    def sync(self) -> None:
        """Apply everything that the publisher had published before this call, dropped at the end or not."""
        stream, newest = self._say_hello()  # from here on each newer batch is in a snapshot, or on its way, or both
        if stream != self._stream:
            self._start_over(stream)
            self._build(newest)
        self._apply_arrived()
        if self.mirror.seq < newest:
            self.num_gaps += 1
            self._fill_gap(newest)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- receiving --------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if not self._sub.poll(0):
                return
            self._keep(*self._sub.recv_multipart())

    def _keep(self, topic: bytes, seq_frame: bytes, payload: bytes) -> None:
        if topic != self._topic:
            return  # a late answer to a hello
        batch = decode_batch("kv", decode_seq(seq_frame), payload)
        if batch.seq <= self._last_received:  # only another publisher starts again at lower numbers
            self._start_over("")
        self._last_received = batch.seq
        self._arrived.append(batch)

    def _start_over(self, stream: str) -> None:
        """Forget everything, because it came from another publisher."""
        self._stream, self.mirror = stream, CacheMirror()
        self._arrived.clear()

    def _say_hello(self) -> tuple[str, int]:
        """Request the publisher's name and its newest number, over the same connection as the events."""
        deadline = time.monotonic() + self._timeout_s
        topic = b""
        ask_again_at = 0.0
        try:
            while (now := time.monotonic()) < deadline:
                if now >= ask_again_at:
                    self._forget_hello(topic)
                    topic = HELLO + secrets.token_hex(8).encode()
                    self._sub.subscribe(topic)
                    ask_again_at = now + _HELLO_RETRY_S
                if not self._sub.poll(int((min(deadline, ask_again_at) - now) * 1000) + 1):
                    continue
                name, seq, payload = self._sub.recv_multipart()
                if name == topic:
                    self._last_received = decode_seq(seq)
                    return msgpack.unpackb(payload)["stream"], self._last_received
                self._keep(name, seq, payload)
        finally:
            self._forget_hello(topic)
        raise CannotFollow(f"the publisher did not answer within {self._timeout_s} s")

    def _forget_hello(self, topic: bytes) -> None:
        if topic:
            self._sub.unsubscribe(topic)

    # -- applying ---------------------------------------------------------------------------------------------------

    def _apply_arrived(self) -> int:
        num_applied = 0
        while self._arrived:
            batch = self._arrived.popleft()
            if batch.seq > self.mirror.seq:
                self._apply(batch)
                num_applied += 1
        return num_applied

    def _apply(self, batch: EventBatch) -> None:
        try:
            self.mirror.apply(batch)
        except EventGap:
            self.num_gaps += 1
            self._fill_gap(batch.seq)
        except MirrorBroken:  # the numbers hid a loss
            self.num_gaps += 1
            self._build(batch.seq)

    def _fill_gap(self, up_to: int) -> None:
        """Bring the mirror at least to the state after batch `up_to`, whatever is missing in between."""
        if self._replay_endpoint is not None and not self._catch_up() and self.mirror.seq >= up_to:
            return
        self._build(up_to)

    def _build(self, up_to: int) -> None:
        """Build a new mirror, at least up to batch `up_to`."""
        self.mirror = CacheMirror()
        if self._snapshot is not None:
            self.num_snapshots += 1
            self.mirror = CacheMirror.from_snapshot(self._snapshot())
        elif why := self._catch_up():
            raise CannotFollow(f"{why}, and there is no snapshot to start from")
        if self.mirror.seq < up_to:
            raise CannotFollow(f"batch {up_to} is out, but what could be had ends at {self.mirror.seq}")

    def _catch_up(self) -> str:
        """Apply all newer batches that the publisher still has; returns the obstacle in words, or an empty text."""
        replay = self._ask_replay(self.mirror.seq + 1)
        if replay.stream != self._stream and self._stream and self.mirror.seq >= 0:
            return "another publisher has taken the address"  # its numbers are unrelated to this mirror's
        self._stream = replay.stream
        starts = [index for index, batch in enumerate(replay.batches) if AllBlocksCleared() in batch.events]
        try:
            for batch in replay.batches[max(starts, default=0) :]:
                self.mirror.apply(batch)
        except EventGap:
            return f"the publisher keeps nothing between batches {self.mirror.seq} and {replay.oldest}"
        except MirrorBroken as broken:
            return str(broken)
        return ""

    def _ask_replay(self, start: int) -> _Replay:
        self.num_replays += 1
        deadline = time.monotonic() + self._timeout_s
        batches: list[EventBatch] = []
        assert self._replay_endpoint is not None, "without one there is a snapshot"
        with self._context.socket(zmq.DEALER) as dealer:  # a new one: no late answers to an earlier request
            dealer.set_hwm(0)  # a replay may have any length
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", encode_seq(start), self._topic])
            while (left := deadline - time.monotonic()) > 0:
                if not dealer.poll(int(left * 1000) + 1):
                    continue
                _, seq_frame, payload = dealer.recv_multipart()
                seq = decode_seq(seq_frame)
                if seq == END_SEQ:
                    summary = msgpack.unpackb(payload)
                    return _Replay(batches, summary["stream"], summary["oldest"])
                batches.append(decode_batch("kv", seq, payload))
        raise CannotFollow(f"the replay did not end within {self._timeout_s} s")
