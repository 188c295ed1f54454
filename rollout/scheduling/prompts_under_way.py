"""Prompt blocks that a running request computes now: equal prompts wait for the first of them, then hit its blocks."""

from __future__ import annotations

from collections.abc import Iterable

from ..kv.ledger import KVLedger
from ..sequences.request import Request


class PromptsUnderWay:
    """The request that computes each block, and the requests parked until that block is in the cache or never will
    be."""

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._computing: dict[int, Request] = {}  # hash of a prompt block under way -> the request that computes it
        self._blocks: dict[Request, list[tuple[int, int]]] = {}  # its (last token + 1, hash), last block first
        self._parked: dict[int, list[Request]] = {}  # requests that wait for the block of that hash

    def hash_to_wait_for(self, request: Request, num_matched: int) -> int | None:
        """Return the hash of the last block of the request that is not in the cache and that another computes now.

        With recurrent layers: of the last block with a snapshot that a request computes now.

        num_matched: blocks of the request that are in the cache. Returns None if no request computes the first block
        after them, or this request could not reuse it.
        """
        end = request.max_reusable_tokens // self._ledger.block_size
        if not self._computing or num_matched >= end:
            return None
        if self._ledger.states is None:
            return self._last_under_way(request, num_matched, end)
        hashes = (self._ledger.hash_of_block(request, index) for index in reversed(range(num_matched, end)))
        return next((hash for hash in hashes if hash in self._computing), None)

    def _last_under_way(self, request: Request, first: int, end: int) -> int | None:
        """Return the hash of the last block from `first` to `end` - 1 that is computed now; None: not even the first.

        A hash chains those before it, so that blocks under way are the first ones of these. Steps that double find the
        end of a short common part of two long prompts without hashing the rest.
        """

        def is_under_way(index: int) -> bool:
            return self._ledger.hash_of_block(request, index) in self._computing

        if not is_under_way(first):
            return None
        low, step = first, 1
        while low + step < end and is_under_way(low + step):
            low, step = low + step, 2 * step
        high = min(low + step, end)  # low is under way, high is not, or is beyond
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_under_way(middle) else (low, middle)
        return self._ledger.hash_of_block(request, low)

    def park(self, request: Request, hash: int) -> None:
        """Keep the request until `end` returns it."""
        self._parked.setdefault(hash, []).append(request)

    def begin(self, request: Request, num_matched: int) -> None:
        """Record that the request runs and computes its full blocks from number `num_matched` on."""
        if not self._ledger.prefix_cache:
            return
        size, blocks = self._ledger.block_size, []
        if self._ledger.states is None:
            indices: Iterable[int] = range(num_matched, request.sequence.num_tokens // size)
        else:
            indices = self._ledger.snapshot_blocks(request)
        for index in indices:
            hash = self._ledger.hash_of_block(request, index)
            if self._computing.setdefault(hash, request) is request:
                blocks.append(((index + 1) * size, hash))
        if blocks:
            self._blocks[request] = blocks[::-1]

    def end(self, request: Request, num_tokens: int) -> list[Request]:
        """End the wait for the first `num_tokens` tokens of the request, which are in the cache or never will be.

        Returns the requests that waited for them, also those that have ended since.
        """
        blocks = self._blocks.get(request)
        waited: list[Request] = []
        while blocks and blocks[-1][0] <= num_tokens:
            _, hash = blocks.pop()
            del self._computing[hash]
            waited += self._parked.pop(hash, ())
        if blocks is not None and not blocks:
            del self._blocks[request]
        return waited

    def leave(self, request: Request) -> list[Request]:
        """End the wait for all tokens of the request, however many it has left. Returns as `end`."""
        blocks = self._blocks.get(request)
        return self.end(request, blocks[0][0]) if blocks else []

    def end_all(self) -> list[Request]:
        """End all waits: no block under way will be in the cache. Returns as `end`."""
        return [waited for request in list(self._blocks) for waited in self.leave(request)]
