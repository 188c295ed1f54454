"""The ledger of KV blocks and their owners. The only place that moves blocks between free, cached and held.

One request's block table, token ranges from left to right:

    | nodes[0] | nodes[1] | ... | own | own | own partly filled |
      published: in the tree,     private: computed by this
      held by this request        request, not in the tree

`nodes` is a path in the tree from its root, so entry i of the path is about block i of the table. The block in the
table is the node's own, except where two requests computed the same block at the same time: then the second holds the
first one's node and keeps its own copy as a private block.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..config import PIN_BUDGET
from ..errors import LedgerError
from ..sequences.request import Request
from ..sequences.step import StateSlots
from ..states.slots import SlotLedger
from .accounts import Account, KVUsage, wrong_blocks
from .block_pool import BlockPool
from .events import KVEventLog
from .paths import CachedPaths
from .pins import Pins
from .radix_cache import Node, RadixCache

_PRESSURE_MEMORY = 0.9  # share of the eviction pressure so far that each further allocation keeps


class KVLedger:
    """Allocate, publish and release blocks for requests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        *,
        pin_budget: float = PIN_BUDGET,
        states: SlotLedger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a ledger whose blocks are all free.

        pin_budget: share of the pool that pins may protect. clock: seconds, for the expiry of pins.
        states: the slots of recurrent states, if the model has such layers.
        """
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.events = KVEventLog()
        self._pool = BlockPool(num_blocks)
        self.free_blocks = self._pool.free_ids  # a function: blocks that nothing owns or remembers
        self.cache = RadixCache(block_size, self.events)
        self.pins = Pins(self.cache, int(num_blocks * pin_budget), self.events, clock)
        self.states = states
        if states is not None:
            self.cache.on_removed = states.drop
        self.paths = CachedPaths(self.cache, block_size, prefix_cache, states)
        self._accounts: dict[Request, Account] = {}
        self.epoch = 0
        self.num_looked_up_tokens = 0  # known tokens of all admitted requests, counted again after a retraction
        self.num_hit_tokens = 0  # tokens of them whose KV was in the cache
        self.eviction_pressure = 0.0  # recent share of allocated blocks that had to be evicted first, 0 to 1

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now: free ones and those that eviction would free."""
        return self._pool.num_free + self.cache.num_cached

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, free and taken."""
        return self._pool.num_blocks

    @property
    def usage(self) -> KVUsage:
        """Numbers of blocks by owner. `num_held` is the rest of the pool."""
        total, free, cached = self._pool.num_blocks, self._pool.num_free, self.cache.num_cached
        return KVUsage(total, free, cached, pinned := self.cache.num_guarded_idle, total - free - cached - pinned)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hash_of_block(self, request: Request, index: int) -> int:
        """Return the chained hash of the request's full block number `index`."""
        return self.paths.prefix(request).hash(index)

    def match(self, request: Request) -> list[Node]:
        """Return the nodes that the request may take, see `CachedPaths.match`. Changes nothing, and the caller
        does not change the list."""
        return self.paths.match(request)

    def open(self, request: Request, nodes: list[Node]) -> None:
        """Admit the request with the matched path as the first blocks of its table."""
        assert request not in self._accounts
        for node in nodes:
            self.cache.hold(node)
            node.num_hits += 1
        account = Account([node.block for node in nodes], list(nodes), self.prefix_cache, len(nodes))
        self._accounts[request] = account
        if self.states is not None:
            self.states.open(request, nodes[-1] if nodes else None, len(nodes) * self.block_size)
            account.snapshots_at = self._snapshots_of(request, len(nodes))
        self.paths.begin(request)
        self.num_looked_up_tokens += request.sequence.num_tokens
        self.num_hit_tokens += len(nodes) * self.block_size

    def _snapshots_of(self, request: Request, num_matched: int) -> tuple[int, ...]:
        """Return the numbers of tokens after which this request leaves snapshots, for later requests.

        These are the end of its cached blocks, where another request went on differently, and the end of its last full
        block before the last token, where equal requests and continuations begin.
        """
        if not self.prefix_cache or self.states is None or not self.states.max_snapshots:
            return ()
        ends = {len(self.paths.cached(request)), (request.sequence.num_tokens - 1) // self.block_size}
        return tuple(sorted(end * self.block_size for end in ends if end > num_matched))

    def num_rows_to_snapshot(self, request: Request, start: int, num_rows: int) -> int:
        """Return the number of rows that a chunk from row `start` may have, at most `num_rows`: it ends at the next
        snapshot."""
        for at in self._accounts[request].snapshots_at:
            if start < at < start + num_rows:
                return at - start
        return num_rows

    def snapshot_blocks(self, request: Request) -> list[int]:
        """Return the numbers of the prompt's blocks that end at its snapshots."""
        return [at // self.block_size - 1 for at in self._accounts[request].snapshots_at]

    def plan_states(self, request: Request, start: int, end: int) -> StateSlots | None:
        """Return the slots for a step with the request's rows `start` to `end` - 1; None without recurrent layers."""
        return None if self.states is None else self.states.plan(request, start, end)

    def block_table(self, request: Request) -> list[int]:
        return self._accounts[request].blocks

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Count the blocks that the table lacks for `num_tokens`; not positive when it has enough."""
        return self.num_blocks_for(num_tokens) - len(self._accounts[request].blocks)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the table to hold `num_tokens`, evicting cached blocks if need be.

        Returns the blocks that were added. Returns None, and leaves every table as it is, when there are not enough.
        """
        account = self._accounts[request]
        num_missing = -(-num_tokens // self.block_size) - len(account.blocks)
        if num_missing <= 0:
            return []
        if num_missing > self.num_available:
            self._merge_copies()
        if num_missing > self.num_available:
            return None
        share = max(num_missing - self._pool.num_free, 0) / num_missing
        self.eviction_pressure += (1 - _PRESSURE_MEMORY) * (share - self.eviction_pressure)
        account.blocks += (blocks := self._take(num_missing))
        return blocks

    def _take(self, num_blocks: int) -> list[int]:
        """Take so many available blocks, evicting cached ones for those that are not free."""
        for block in self.cache.evict(max(num_blocks - self._pool.num_free, 0)):
            self._pool.give(block)
        return self._pool.take(num_blocks)

    def grow_up_to(self, request: Request, num_tokens: int) -> int:
        """Extend the table to hold `num_tokens`, or as many of them as blocks are available for. Returns the number."""
        if self.grow(request, num_tokens) is None:
            num_tokens = (len(self._accounts[request].blocks) + self.num_available) * self.block_size
            self.grow(request, num_tokens)
        return num_tokens

    def plan_draft(
        self, request: Request, num_tokens: int, num_drafted: int, *, num_slots_reserved: int = 0,
        num_blocks_reserved: int = 0, may_evict: bool = False,
    ) -> int:  # fmt: skip
        """Make room for a draft behind the request's first `num_tokens` tokens, which have blocks; returns the number
        of drafted tokens that there is room for.

        Takes free blocks, and cached ones if it `may_evict`. Leaves as many of these as requests run, and
        `num_blocks_reserved` free or cached ones; of the slots of recurrent states it leaves `num_slots_reserved`.
        """
        account = self._accounts[request]
        if self.states is not None:
            num_drafted = min(num_drafted, max(self.states.num_free - num_slots_reserved, 0))
        num_to_take = self.num_available if may_evict else self._pool.num_free
        num_spare = min(num_to_take - len(self._accounts), self.num_available - num_blocks_reserved)
        most = (len(account.blocks) + max(num_spare, 0)) * self.block_size - num_tokens
        num_drafted = min(num_drafted, most)
        num_missing = self.num_blocks_for(num_tokens + num_drafted) - len(account.blocks)
        account.blocks += self._take(max(num_missing, 0))
        return num_drafted

    def settle_draft(self, request: Request, num_tokens: int, num_accepted: int) -> None:
        """Give back what a draft took in vain, once its step is committed and published.

        num_tokens: those that have KV now; num_accepted: tokens of the draft among them.
        """
        account = self._accounts[request]
        if self.states is not None:
            self.states.settle_draft(request, num_accepted)
        num_blocks = self.num_blocks_for(num_tokens)
        for block in account.blocks[num_blocks:]:
            self._pool.give(block)
            account.is_cut = True
        del account.blocks[num_blocks:]

    def num_blocks_kept(self, request: Request, num_new: int) -> int | None:
        """Return the length of the table that the managers keep before its `num_new` newest blocks, for the request's
        next step; None where nothing behind it was given back since the last step."""
        account = self._accounts[request]
        if not account.is_cut:
            return None
        account.is_cut = False
        return len(account.blocks) - num_new

    def _merge_copies(self) -> None:
        """Merge the two copies of a block where a request holds a node besides its own copy, as the only holder.

        The node takes the request's copy. Its former block becomes free: no table names it.
        """
        for account in self._accounts.values():
            for block, node in zip(account.blocks, account.nodes, strict=False):
                if node.block != block and node.num_holders == 1:
                    self._pool.give(node.block)
                    node.block = block

    def publish(self, request: Request, num_tokens: int) -> None:
        """Put the newly full blocks among the first `num_tokens` tokens in the tree. Their KV must be complete."""
        account, cache = self._accounts[request], self.cache
        first, end = len(account.nodes), num_tokens // self.block_size
        if not account.is_publishing or end <= first:
            return
        prefix = self.paths.prefix(request)
        parent = account.nodes[-1] if account.nodes else None
        for block, (hash, tokens, key) in zip(account.blocks[first:end], prefix.blocks(first, end), strict=True):
            node = cache.find(hash, tokens, parent, prefix.salt, key)
            if node is not None:
                cache.hold(node)
            else:
                node = cache.insert(hash, tokens, block, parent, prefix.salt, key)
            if node is None:
                account.is_publishing = False
                return
            account.nodes.append(node)
            parent = node
        if self.states is not None:
            num_full = end * self.block_size
            is_output = num_full > request.sequence.num_prompt_tokens
            self.states.keep(request, account.nodes[-1], num_full, is_rolling=is_output)

    def roll_back(self, request: Request, num_tokens: int) -> int:
        """Return the request to `num_tokens` tokens, because the tokens from there on are computed anew and may change.

        Blocks in the tree are never rewritten: the request gives up each published block that holds such a token, and
        all blocks after it. Returns the first token to compute: `num_tokens`, or the start of the first block that was
        given up. With recurrent layers it may be earlier: see `first_row_after_roll_back`.
        """
        account = self._accounts[request]
        self.paths.cut(request, num_tokens // self.block_size)
        start = self.first_row_after_roll_back(request, num_tokens)
        num_full = start // self.block_size
        if self.states is not None and not self.states.stands_at(request, start):
            self.states.rewind(request, account.nodes[num_full - 1] if start else None, start)
        if len(account.nodes) <= num_full:
            return start
        for index in range(num_full, len(account.blocks)):
            if index >= len(account.nodes) or account.nodes[index].block != account.blocks[index]:
                self._pool.give(account.blocks[index])
        for block in self.cache.drop(account.nodes[num_full:]):
            self._pool.give(block)
        del account.blocks[num_full:], account.nodes[num_full:]
        account.num_matched = min(account.num_matched, num_full)
        return start

    def first_row_after_roll_back(self, request: Request, num_tokens: int) -> int:
        """Return the first row that `roll_back` with these arguments computes anew. Changes nothing.

        It is `num_tokens`, the start of the first block that is given up, or with recurrent layers, where the states
        there are not known, the deepest snapshot before, or the first row.
        """
        nodes, num_full = self._accounts[request].nodes, num_tokens // self.block_size
        start = num_tokens if len(nodes) <= num_full else num_full * self.block_size
        if self.states is None or self.states.stands_at(request, start):
            return start
        return len(self.paths.up_to_snapshot(nodes[:num_full])) * self.block_size

    def close(self, request: Request) -> None:
        """Release all blocks of the request: published blocks stay cached, the rest is free."""
        account = self._accounts.pop(request)
        if self.states is not None:
            self.states.close(request)
        for index, block in enumerate(account.blocks):
            if index >= len(account.nodes) or account.nodes[index].block != block:
                self._pool.give(block)
        for block in self.cache.drop(account.nodes):
            self._pool.give(block)

    def forget(self, request: Request) -> None:
        """Drop the remembered hashes of a request that has ended. It must be closed."""
        assert request not in self._accounts
        self.paths.forget(request)

    def flush(self) -> tuple[int, int]:
        """Free every cached block and drop every pin.

        Returns how many blocks, and how many of them had pins. Running requests keep their blocks, and other requests
        still find them in the cache.
        """
        if not self._accounts:
            return self._clear("flush_cache")
        num_pins = self.pins.drop_all("flush_cache")
        blocks = self.cache.evict(len(self.cache))
        for block in blocks:
            self._pool.give(block)
        return len(blocks), num_pins

    def start_epoch(self) -> tuple[int, int]:
        """Start a new epoch, for new weights: no earlier KV matches again, and all pins are dropped. Returns as
        `flush`.

        Running requests keep their blocks, as private ones, and publish nothing more.
        """
        self.epoch += 1
        for account in self._accounts.values():
            account.is_publishing = False
        return self._clear("new weights were committed")

    def _clear(self, why: str) -> tuple[int, int]:
        num_pins = self.pins.drop_all(why)
        blocks = self.cache.clear()
        for block in blocks:
            self._pool.give(block)
        return len(blocks), num_pins

    def evict_below(self, node: Node) -> int:
        """Free every block below `node` without a holder or a pin that protects it; returns how many."""
        blocks = self.cache.evict_below(node)
        for block in blocks:
            self._pool.give(block)
        return len(blocks)

    def check_idle(self) -> None:
        """Check that free + cached + pinned is the pool while no request is admitted. Raises LedgerError.

        Cheap enough for each idle time.
        """
        usage = self.usage
        if not self._accounts and usage.num_held:
            parts = f"free {usage.num_free} + cached {usage.num_cached} + pinned {usage.num_pinned}"
            raise LedgerError(f"idle, but {parts} != pool {usage.num_blocks}")
        if self.states is not None and (wrong := self.states.check_idle()):
            raise LedgerError(f"idle, but {'; '.join(wrong)}")

    def check(self) -> None:
        """Check the ledger block by block. Raises LedgerError listing everything that is wrong. Changes nothing."""
        wrong = self.cache.check() + self.pins.check()
        if self.states is not None:
            wrong += self.states.check()
        wrong += wrong_blocks(self._pool, self.cache, self._accounts)
        if wrong:
            raise LedgerError("; ".join(wrong))
