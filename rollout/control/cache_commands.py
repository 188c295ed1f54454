"""The commands of an engine about its prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

from ..kv.cache_tree import CacheTree
from ..kv.events import KVEventLog
from ..kv.pins import PinReport, UnpinReport
from ..loop.between_steps import BetweenSteps
from ..loop.commands import EvictReport, FlushReport
from ..loop.parts import Parts
from .desk.intake import Prompt
from .desk.requests import RequestDesk
from .driver import Driver


class CacheCommands:
    """The part of an engine's interface that looks at cached blocks, and pins, evicts and flushes them."""

    parts: Parts
    driver: Driver
    requests: RequestDesk
    _between_steps: BetweenSteps

    def flush_cache(
        self, *, retracts: bool = False, op_id: str | None = None, timeout_s: float | None = None
    ) -> FlushReport:
        """Empty the prefix cache and drop every pin, unless sequences hold blocks. Waiting requests do not matter.
        retracts: those that run are retracted first, with no step in between."""
        flush = self._between_steps.flush
        return self.driver.control("flush_cache", lambda: flush(retracts), op_id, timeout_s, retracts=retracts)

    def pin_blocks(
        self,
        hashes: Iterable[int],
        owner: str | None = None,
        ttl_s: float | None = None,
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PinReport:
        """Protect cached blocks and their parents from eviction until they are unpinned as often as pinned.

        ttl_s: time until these pins end. A flush or a weight commit ends pins, as does a request that could not
        run otherwise; the end of a request does not. Unknown hashes count 0. Blocks over the budget
        (`EngineConfig.pin_budget`) are refused and counted. Raises ValueError for a bad hash (not 64 bits) or ttl_s.
        """
        hashes = tuple(hashes)
        return self.driver.control(
            "pin_blocks", lambda: self.parts.ledger.pins.pin(hashes, owner, ttl_s), op_id, timeout_s,
            hashes=hashes, owner=owner, ttl_s=ttl_s,
        )  # fmt: skip

    def unpin_blocks(
        self,
        hashes: Iterable[int],
        owner: str | None = None,
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> UnpinReport:
        """Remove one pin of this owner from each block; a block without one counts 0."""
        hashes = tuple(hashes)
        return self.driver.control(
            "unpin_blocks", lambda: self.parts.ledger.pins.unpin(hashes, owner), op_id, timeout_s,
            hashes=hashes, owner=owner,
        )  # fmt: skip

    def pin_prefix(
        self,
        prompt: Prompt,
        owner: str | None = None,
        ttl_s: float | None = None,
        *,
        extra_key: str = "",
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PinReport:
        """Pin the cached blocks at the start of a prompt. The report has their hashes, for `unpin_blocks`, and counts
        full blocks of the prompt that are not cached as unknown."""
        ids, images = self.requests.tokens_of(prompt)
        return self.driver.control(
            "pin_prefix", lambda: self._between_steps.pin_prefix(ids, images, extra_key, owner, ttl_s), op_id,
            timeout_s, token_ids=ids, owner=owner, ttl_s=ttl_s, extra_key=extra_key,
        )  # fmt: skip

    def evict_descendants(self, hash: int, *, op_id: str | None = None, timeout_s: float | None = None) -> EvictReport:
        """Free every cached block below this one that no sequence holds and no pin protects."""
        evict = self._between_steps.evict_descendants
        return self.driver.control("evict_descendants", lambda: evict(hash), op_id, timeout_s, hash=hash)

    def cache_tree(
        self,
        depth: int | None = None,
        under: int | None = None,
        *,
        prompt: Prompt | None = None,
        extra_key: str = "",
        timeout_s: float | None = None,
    ) -> CacheTree:
        """Return the prefix cache between two steps: all of it or the blocks under one, at most `depth` levels. With a
        prompt it also names the prompt's first block that is not cached. Raises ValueError for an unknown block or a
        depth below 1."""
        its = None if prompt is None else self.requests.tokens_of(prompt)
        look = self._between_steps.cache_tree
        return self.driver.control("cache_tree", lambda: look(depth, under, its, extra_key), None, timeout_s)

    @property
    def kv_events(self) -> KVEventLog:
        """The events of the prefix cache; recorded only while a sink is attached."""
        return self.parts.ledger.events
