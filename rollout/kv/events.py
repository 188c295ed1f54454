"""Changes of the prefix cache, as values. This module knows no socket: subscribers attach a sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Topic = Literal["kv", "pins"]
PinKind = Literal["pinned", "unpinned", "auto_unpinned", "expired", "dropped"]


@dataclass(frozen=True)
class BlockStored:
    """Blocks of one prefix that entered the cache, one after the other."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None  # of the block before the first one; None: they begin a prefix
    token_ids: tuple[int, ...]  # of all these blocks
    block_size: int
    cache_salt: str = ""  # extra_key of the requests that may use them
    image_keys: tuple[str, ...] = ()  # of each block, "" for one without images; empty: none has any


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that left the cache."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True)
class AllBlocksCleared:
    """The whole cache was emptied: by a flush, or by new weights."""


@dataclass(frozen=True)
class PinEvent:
    """Pins that were set or lifted; a hash appears once for each pin."""

    kind: PinKind
    block_hashes: tuple[int, ...]
    owner: str | None
    reason: str = ""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class EventBatch:
    """The events of one step or command."""

    topic: Topic
    seq: int  # one counter per topic; a number without a batch marks a time without sinks, see `KVEventLog.attach`
    timestamp: float  # seconds of time.time()
    events: tuple[KVEvent | PinEvent, ...]


Sink = Callable[[EventBatch], None]


class KVEventLog:
    """Collect events between two flushes and pass them to the sinks.

    Not thread-safe: hold the engine's lock, except for `attach` and `detach`.
    """

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = ()
        self._pending: dict[Topic, list[KVEvent | PinEvent]] = {"kv": [], "pins": []}
        self._last_seq: dict[Topic, int] = {"kv": -1, "pins": -1}

    @property
    def is_on(self) -> bool:
        """Whether a sink is attached."""
        return bool(self._sinks)

    def attach(self, sink: Sink) -> None:
        """Call `sink` with every batch from now on; it must return at once.

        The first sink uses up one sequence number of each topic that no batch gets. Events without a sink are not
        recorded, and a subscriber that followed an earlier sink sees by the gap that events are missing.
        """
        if not self._sinks:
            for topic in self._last_seq:
                self._last_seq[topic] += 1
        self._sinks += (sink,)

    def detach(self, sink: Sink) -> None:
        """Stop calling `sink`. Raises ValueError if it is not attached."""
        if sink not in self._sinks:
            raise ValueError("this sink is not attached")
        self._sinks = tuple(s for s in self._sinks if s != sink)
        if not self._sinks:  # the next one is told of the gap, not of a part of it
            for pending in self._pending.values():
                pending.clear()

    def append(self, event: KVEvent | PinEvent) -> None:
        """Record an event. Does nothing while no sink is attached."""
        if self._sinks:
            self._pending["pins" if isinstance(event, PinEvent) else "kv"].append(event)

    def flush(self) -> None:
        """Pass the events since the last flush to the sinks, as at most one batch for each topic."""
        for topic, pending in self._pending.items():
            if not pending:
                continue
            self._last_seq[topic] += 1
            batch = EventBatch(topic, self._last_seq[topic], time.time(), tuple(_merged(pending)))
            self._pending[topic] = []
            for sink in self._sinks:
                sink(batch)

    def last_seq(self, topic: Topic) -> int:
        """Return the last used sequence number, of a batch or of a gap; -1 before the first sink."""
        return self._last_seq[topic]


def _merged(events: list[KVEvent | PinEvent]) -> Iterator[KVEvent | PinEvent]:
    """Merge runs of blocks that continue each other into one event each, and runs of removals too."""
    last: KVEvent | PinEvent | None = None
    stored: list[BlockStored] = []
    removed: list[int] = []

    def close() -> Iterator[KVEvent | PinEvent]:
        if stored:
            hashes = tuple(hash for event in stored for hash in event.block_hashes)
            token_ids = tuple(id for event in stored for id in event.token_ids)
            keys = tuple(key for event in stored for key in event.image_keys or ("",) * len(event.block_hashes))
            yield replace(stored[0], block_hashes=hashes, token_ids=token_ids, image_keys=keys if any(keys) else ())
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
