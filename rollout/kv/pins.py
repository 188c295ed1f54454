"""Pins on cached blocks, by block hash and owner, separate from the holds of running sequences.

Every pin is one lease, so two pins need two unpins. An owner's pins are lifted by that owner, by their expiry, by a
flush or a weight commit, or, where nothing else helps, by the scheduler; never by a sequence that ends.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .events import KVEventLog, PinEvent, PinKind
from .radix_cache import Node, RadixCache

_MIN_HASH, _MAX_HASH = -(2**63), 2**63 - 1
_MIN_EXPIRIES = 64

Owner = str | None


@dataclass(frozen=True)
class PinReport:
    """The result of a request to pin."""

    num_pinned: int  # pins that were set; a hash that was given twice counts twice
    num_unknown: int  # hashes that no cached block has
    num_refused: int  # blocks that exist and were not pinned
    reason: str  # why blocks were refused; empty when none was
    hashes: tuple[int, ...]  # of the blocks that were pinned, in the order asked


@dataclass(frozen=True)
class UnpinReport:
    """The result of a request to unpin."""

    num_unpinned: int
    num_unknown: int  # hashes that this owner has no pin on


class Pins:
    """All pins on one cache."""

    def __init__(
        self, cache: RadixCache, max_blocks: int, events: KVEventLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create an empty set of pins.

        max_blocks: number of blocks that pins may protect, ancestors included. clock: seconds.
        """
        self.max_blocks = max_blocks
        self._cache = cache
        self._events = events
        self._clock = clock
        self._leases: dict[int, dict[Owner, list[float]]] = {}  # hash -> owner -> expiry times of pins, soonest first
        self._expiries: list[tuple[float, int]] = []  # heap of (expiry time, hash); some are stale
        self._max_expiries = _MIN_EXPIRIES  # number of entries that triggers the removal of stale ones
        self.num_expired = 0
        self.num_auto_unpinned = 0

    def __len__(self) -> int:
        """Count the blocks with at least one pin on themselves."""
        return len(self._leases)

    def owners(self, hash: int) -> dict[Owner, int]:
        """Count each owner's pins on a block."""
        return {owner: len(leases) for owner, leases in self._leases.get(hash, {}).items()}

    def pin(self, hashes: Iterable[int], owner: Owner = None, ttl_s: float | None = None) -> PinReport:
        """Protect the blocks of these hashes and their ancestors, in the order given, as far as the budget allows.

        owner: only this owner can unpin them; "" is the same as None. ttl_s: seconds until these pins expire. Raises
        ValueError for an owner that is not a text, a ttl_s that is not positive and finite, and a hash that is not a
        signed 64-bit integer; then nothing is pinned.
        """
        hashes, owner = _checked(hashes), _checked_owner(owner)
        if ttl_s is not None and not (_is_number(ttl_s) and 0 < ttl_s < math.inf):
            raise ValueError(f"ttl_s must be a positive number of seconds, not {ttl_s!r}")
        self.expire()
        expiry = math.inf if ttl_s is None else self._clock() + ttl_s
        pinned, num_unknown, num_refused = [], 0, 0
        for hash in hashes:
            node = self._cache.get(hash)
            if node is None:
                num_unknown += 1
                continue
            if not node.is_pinned:
                if self._cache.num_guarded + self._cache.num_newly_guarded(node) > self.max_blocks:
                    num_refused += 1
                    continue
                self._cache.pin(node)
            self._cache.touch(node)
            insort(self._leases.setdefault(hash, {}).setdefault(owner, []), expiry)
            if ttl_s is not None:
                self._note_expiry(expiry, hash)
            pinned.append(hash)
        if pinned:
            self._events.append(PinEvent("pinned", tuple(pinned), owner))
        reason = f"over the budget of {self.max_blocks} protected blocks" if num_refused else ""
        return PinReport(len(pinned), num_unknown, num_refused, reason, tuple(pinned))

    def unpin(self, hashes: Iterable[int], owner: Owner = None) -> UnpinReport:
        """Lift one of this owner's pins on each of these blocks, the one that expires first.

        Raises ValueError as `pin`; then nothing is unpinned.
        """
        hashes, owner = _checked(hashes), _checked_owner(owner)
        self.expire()
        lifted, num_unknown = [], 0
        for hash in hashes:
            leases = self._leases.get(hash, {}).get(owner)
            if not leases:
                num_unknown += 1
                continue
            del leases[0]
            self._tidy(hash, owner)
            lifted.append(hash)
        if lifted:
            self._events.append(PinEvent("unpinned", tuple(lifted), owner))
        return UnpinReport(len(lifted), num_unknown)

    def expire(self) -> int:
        """Lift the expired pins; returns how many. Costs nothing when none has expired."""
        now = self._clock()
        by_owner: dict[Owner, list[int]] = {}
        while self._expiries and self._expiries[0][0] <= now:
            _, hash = heapq.heappop(self._expiries)
            for owner, leases in list(self._leases.get(hash, {}).items()):
                while leases and leases[0] <= now:
                    del leases[0]
                    by_owner.setdefault(owner, []).append(hash)
                self._tidy(hash, owner)
        for owner, hashes in by_owner.items():
            self._events.append(PinEvent("expired", tuple(hashes), owner))
        num_lifted = sum(map(len, by_owner.values()))
        self.num_expired += num_lifted
        return num_lifted

    def drop_all(self, reason: str) -> int:
        """Lift every pin; returns the number of blocks that had pins."""
        num_blocks = len(self._leases)
        self._emit_lifted("dropped", list(self._leases), reason)
        for hash in list(self._leases):
            self._lift(hash)
        self._expiries.clear()
        return num_blocks

    def release_until(self, num_missing: Callable[[], int], reason: str) -> list[int]:
        """Lift pins until `num_missing()`, the number of missing blocks, is not positive; returns the blocks' hashes.

        Blocks go least recently used first, and only if that makes a block evictable: a pin above another pinned block
        frees nothing, and a pin on a block that a sequence holds frees nothing now. A pin that turns out to be
        unnecessary, given the later ones, is set again.
        """
        pinned = (self._cache.get(hash) for hash in self._leases)
        frontier = [self._age(node) for node in pinned if node is not None and _frees_something(node)]
        heapq.heapify(frontier)
        lifted: list[Node] = []
        while frontier and num_missing() > 0:
            node = self._cache.get(heapq.heappop(frontier)[2])
            assert node is not None
            self._cache.unpin(node)
            lifted.append(node)
            above = node.parent
            while above is not None and above.num_guards == 0:  # these became evictable together with the node
                above = above.parent
            if above is not None and _frees_something(above):
                heapq.heappush(frontier, self._age(above))
        released = [node.hash for node in self._without_needless(lifted, num_missing)]
        self._emit_lifted("auto_unpinned", released, reason)
        for hash in released:
            del self._leases[hash]
        self.num_auto_unpinned += len(released)
        return released

    def _without_needless(self, lifted: list[Node], num_missing: Callable[[], int]) -> list[Node]:
        """Pin unnecessarily lifted nodes again, most recently used first; returns the others in their order."""
        needed: dict[int, Node] = {}  # by hash
        for node in reversed(lifted):
            above = node.parent
            while above is not None and above.num_guards == 0 and above.hash not in needed:
                above = above.parent
            if above is None or above.num_guards:  # else a pin here would keep back more than one node that must go
                self._cache.pin(node)
                if num_missing() <= 0:
                    continue
                self._cache.unpin(node)
            needed[node.hash] = node
        return list(needed.values())[::-1]

    def check(self) -> list[str]:
        """Return a description of each inconsistency with the cache; empty when there is none."""
        pinned = {node.hash for node in self._cache if node.is_pinned}
        wrong = [f"pinned without a lease: {sorted(pinned - set(self._leases))}"] if pinned - set(self._leases) else []
        if stale := set(self._leases) - pinned:
            wrong.append(f"leases on blocks that are not pinned: {sorted(stale)}")
        if any(not leases for by_owner in self._leases.values() for leases in by_owner.values()):
            wrong.append("an owner without leases is remembered")
        return wrong

    def _note_expiry(self, when: float, hash: int) -> None:
        heapq.heappush(self._expiries, (when, hash))
        if len(self._expiries) > self._max_expiries:  # else entries of pins that were lifted early would pile up
            self._expiries = [
                (when, hash)
                for hash, by_owner in self._leases.items()
                for leases in by_owner.values()
                for when in leases
                if when < math.inf
            ]
            heapq.heapify(self._expiries)
            self._max_expiries = max(2 * len(self._expiries), _MIN_EXPIRIES)

    def _tidy(self, hash: int, owner: Owner) -> None:
        """Remove an owner without leases, and lift the pin of a block without owners."""
        by_owner = self._leases.get(hash)
        if by_owner is not None and not by_owner.get(owner):
            by_owner.pop(owner, None)
            if not by_owner:
                self._lift(hash)

    def _lift(self, hash: int) -> None:
        del self._leases[hash]
        node = self._cache.get(hash)
        assert node is not None, "a pinned block is never evicted"
        self._cache.unpin(node)

    def _emit_lifted(self, kind: PinKind, hashes: Sequence[int], reason: str) -> None:
        by_owner: dict[Owner, list[int]] = {}
        for hash in hashes:
            for owner, leases in self._leases[hash].items():
                by_owner.setdefault(owner, []).extend([hash] * len(leases))
        for owner, theirs in by_owner.items():
            self._events.append(PinEvent(kind, tuple(theirs), owner, reason))

    @staticmethod
    def _age(node: Node) -> tuple[int, int, int]:
        """Return the order of release: least recently used first, and the deepest block of a path first."""
        return (node.last_used, -node.depth, node.hash)


def _frees_something(node: Node) -> bool:
    """Return whether the node's own pin is all that keeps its block from eviction."""
    return node.is_pinned and node.num_guards == 1 and node.num_holders == 0


def _checked_owner(owner: Owner) -> Owner:
    if not (owner is None or isinstance(owner, str)):
        raise ValueError(f"owner must be a text, not {owner!r}")
    return owner or None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(hashes: Iterable[int]) -> list[int]:
    hashes = list(hashes)
    wrong = [h for h in hashes if isinstance(h, bool) or not isinstance(h, int) or not _MIN_HASH <= h <= _MAX_HASH]
    if wrong:
        raise ValueError(f"block hashes must be signed 64-bit integers, not {', '.join(map(repr, wrong[:5]))}")
    return hashes
