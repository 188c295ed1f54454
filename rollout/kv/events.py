"""What happened in the prefix cache, as values. It knows no socket: whoever wants to hear attaches a sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Topic = Literal["kv", "pins"]
PinKind = Literal["pinned", "unpinned", "auto_unpinned", "expired", "dropped"]


@dataclass(frozen=True)
class BlockStored:
    """Blocks of one prefix came into the cache, one after the other."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None  # of the block before the first of them; None: they begin a prefix
    token_ids: tuple[int, ...]  # of all these blocks
    block_size: int
    cache_salt: str = ""  # extra_key of the requests that may use them


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks left the cache."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True)
class AllBlocksCleared:
    """The cache was emptied: a flush, or new weights."""


@dataclass(frozen=True)
class PinEvent:
    """Pins were set or lifted; a hash stands there once for each pin."""

    kind: PinKind
    block_hashes: tuple[int, ...]
    owner: str | None
    reason: str = ""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class EventBatch:
    """What one step or command did."""

    topic: Topic
    seq: int  # counts for each topic; a number is missing where nobody listened, see `KVEventLog.attach`
    timestamp: float  # seconds of time.time()
    events: tuple[KVEvent | PinEvent, ...]


Sink = Callable[[EventBatch], None]


class KVEventLog:
    """Collects events between two flushes and hands them on. The caller holds the engine's lock, but for `attach` and
    `detach`."""

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = ()
        self._pending: dict[Topic, list[KVEvent | PinEvent]] = {"kv": [], "pins": []}
        self._last_seq: dict[Topic, int] = {"kv": -1, "pins": -1}

    @property
    def is_on(self) -> bool:
        """Whether anybody listens."""
        return bool(self._sinks)

    def attach(self, sink: Sink) -> None:
        """Call `sink` with every batch from now on; it must return at once.

        The first to listen takes a number of each topic that no batch gets: what happened while nobody listened is not
        told, and whoever followed an earlier sink sees that something is missing.
        """
        if not self._sinks:
            for topic in self._last_seq:
                self._last_seq[topic] += 1
        self._sinks += (sink,)

    def detach(self, sink: Sink) -> None:
        """Call it no more. Raises ValueError for one that is not attached."""
        if sink not in self._sinks:
            raise ValueError("this sink is not attached")
        self._sinks = tuple(s for s in self._sinks if s != sink)

    def append(self, event: KVEvent | PinEvent) -> None:
        """Note an event. Does nothing while nobody listens."""
        if self._sinks:
            self._pending["pins" if isinstance(event, PinEvent) else "kv"].append(event)

    def flush(self) -> None:
        """Hand on what was noted since the last time, as at most one batch for each topic."""
        for topic, pending in self._pending.items():
            if not pending:
                continue
            self._last_seq[topic] += 1
            batch = EventBatch(topic, self._last_seq[topic], time.time(), tuple(_merged(pending)))
            self._pending[topic] = []
            for sink in self._sinks:
                sink(batch)

    def last_seq(self, topic: Topic) -> int:
        """The number of the last batch that was handed on, or that no batch gets; -1 before anybody listens."""
        return self._last_seq[topic]


def _merged(events: list[KVEvent | PinEvent]) -> Iterator[KVEvent | PinEvent]:
    """The same events, runs of blocks that continue each other and runs of removals as one each."""
    last: KVEvent | PinEvent | None = None
    stored: list[BlockStored] = []
    removed: list[int] = []

    def close() -> Iterator[KVEvent | PinEvent]:
        if stored:
            hashes = tuple(hash for event in stored for hash in event.block_hashes)
            token_ids = tuple(id for event in stored for id in event.token_ids)
            yield replace(stored[0], block_hashes=hashes, token_ids=token_ids)
        elif removed:
            yield BlockRemoved(tuple(removed))
        stored.clear()
        removed.clear()

    for event in events:
        if isinstance(event, BlockStored):
            if not (isinstance(last, BlockStored) and _continues(last, event)):
                yield from close()
            stored.append(event)
        elif isinstance(event, BlockRemoved):
            if stored:
                yield from close()
            removed += event.block_hashes
        else:
            yield from close()
            yield event
        last = event
    yield from close()


def _continues(a: BlockStored, b: BlockStored) -> bool:
    return (b.parent_block_hash, b.block_size, b.cache_salt) == (a.block_hashes[-1], a.block_size, a.cache_salt)
