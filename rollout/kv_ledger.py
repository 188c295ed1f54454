"""Which request owns which KV blocks. The only place that moves blocks between free, cached and held.

One request's block table, token ranges from left to right:

    | nodes[0] | nodes[1] | ... | own | own | own partly filled |
      published: in the tree,     private: computed by this
      held by this request        request, in nobody's tree

`nodes` is a path in the tree from its root, so entry i of the path is about block i of the table. The block in the
table is the node's own, except where two requests computed the same block at the same time: then the second holds the
first one's node and keeps its own copy as a private block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .block_pool import BlockPool
from .errors import LedgerError
from .radix_cache import Node, RadixCache, block_hash, root_hash
from .request import Request


@dataclass(eq=False)
class _Account:
    """The blocks of one admitted request."""

    blocks: list[int] = field(default_factory=list)  # the block table
    nodes: list[Node] = field(default_factory=list)  # its published part
    is_publishing: bool = True  # False after a hash collision or an epoch change: its blocks stay private
    num_matched: int = 0  # blocks that came from the cache


@dataclass(frozen=True)
class KVUsage:
    """Blocks of the pool by owner; they sum up to `num_blocks`."""

    num_blocks: int
    num_free: int
    num_cached: int  # in the tree, held by nobody
    num_held: int  # owned by running sequences


class KVLedger:
    """Allocates, publishes and releases blocks for requests."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._pool = BlockPool(num_blocks)
        self._cache = RadixCache()
        self._accounts: dict[Request, _Account] = {}
        self._hashes: dict[Request, list[int]] = {}  # of the full blocks of known tokens, for live requests
        self.epoch = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and those that eviction would free."""
        return self._pool.num_free + self._cache.num_cached

    @property
    def usage(self) -> KVUsage:
        """The ledger in four numbers; `num_held` is what free and cached leave."""
        total, free, cached = self._pool.num_blocks, self._pool.num_free, self._cache.num_cached
        return KVUsage(total, free, cached, total - free - cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hash_of_block(self, request: Request, index: int) -> int:
        """Chained hash of the request's full block number `index`; computed once."""
        hashes = self._hashes.setdefault(request, [])
        size, token_ids = self.block_size, request.sequence.token_ids
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else root_hash(request.options.extra_key)
            start = len(hashes) * size
            assert start + size <= len(token_ids), "only full blocks have a hash"
            hashes.append(block_hash(parent, token_ids[start : start + size]))
        return hashes[index]

    def match(self, request: Request) -> list[Node]:
        """The cached path of the request's prefix, as far as it may be reused. Changes nothing."""
        nodes: list[Node] = []
        if not self.prefix_cache:
            return nodes
        size, token_ids = self.block_size, request.sequence.token_ids
        for index in range(request.max_reusable_tokens // size):
            parent = nodes[-1] if nodes else None
            tokens = token_ids[index * size : (index + 1) * size]
            node = self._cache.find(self.hash_of_block(request, index), tokens, parent)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def open(self, request: Request, nodes: list[Node]) -> None:
        """Admit the request with the matched path as the first blocks of its table."""
        assert request not in self._accounts
        for node in nodes:
            self._cache.hold(node)
            node.num_hits += 1
        account = _Account([node.block for node in nodes], list(nodes), self.prefix_cache, len(nodes))
        self._accounts[request] = account

    def block_table(self, request: Request) -> list[int]:
        return self._accounts[request].blocks

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make the table long enough for `num_tokens`, evicting cached blocks if need be.

        Returns the blocks that were added, or None, and leaves every table as it is, when there are not enough.
        """
        account = self._accounts[request]
        num_missing = self.num_blocks_for(num_tokens) - len(account.blocks)
        if num_missing <= 0:
            return []
        if num_missing > self.num_available:
            self._merge_copies()
        if num_missing > self.num_available:
            return None
        if (num_short := num_missing - self._pool.num_free) > 0:
            for block in self._cache.evict(num_short):
                self._pool.give(block)
        blocks = self._pool.take(num_missing)
        account.blocks += blocks
        return blocks

    def _merge_copies(self) -> None:
        """Where a request holds a node besides its own copy of the block, and nobody else does, the node takes the copy
        and its block is free: no table names it."""
        for account in self._accounts.values():
            for block, node in zip(account.blocks, account.nodes, strict=False):
                if node.block != block and node.num_holders == 1:
                    self._pool.give(node.block)
                    node.block = block

    def publish(self, request: Request, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is complete: put the newly full blocks in the tree."""
        account = self._accounts[request]
        size, token_ids = self.block_size, request.sequence.token_ids
        while account.is_publishing and (len(account.nodes) + 1) * size <= num_tokens:
            index = len(account.nodes)
            parent = account.nodes[-1] if account.nodes else None
            hash = self.hash_of_block(request, index)
            tokens = token_ids[index * size : (index + 1) * size]
            node = self._cache.find(hash, tokens, parent)
            if node is not None:
                self._cache.hold(node)
            else:
                node = self._cache.insert(hash, tokens, account.blocks[index], parent)
            if node is None:
                account.is_publishing = False
            else:
                account.nodes.append(node)

    def close(self, request: Request) -> None:
        """The request gives everything back: published blocks stay cached, the rest is free."""
        account = self._accounts.pop(request)
        for index, block in enumerate(account.blocks):
            if index >= len(account.nodes) or account.nodes[index].block != block:
                self._pool.give(block)
        for block in self._cache.drop(account.nodes):
            self._pool.give(block)

    def forget(self, request: Request) -> None:
        """The request is answered: drop what is remembered of its hashes. It must be closed."""
        assert request not in self._accounts
        self._hashes.pop(request, None)

    def flush(self) -> int:
        """Free every cached block; returns how many. Blocks of running requests stay theirs."""
        blocks = self._cache.evict_all()
        for block in blocks:
            self._pool.give(block)
        return len(blocks)

    def start_epoch(self) -> int:
        """New weights: nothing computed so far may match again. Returns the number of blocks freed.

        Running requests keep their blocks, as private ones, and publish nothing more.
        """
        self.epoch += 1
        num_freed = self.flush()
        self._cache.detach_all()
        for account in self._accounts.values():
            account.is_publishing = False
        return num_freed

    def check_idle(self) -> None:
        """With nobody admitted, free + cached must be the pool. Raises LedgerError; cheap enough for each idle time."""
        usage = self.usage
        if not self._accounts and usage.num_held:
            raise LedgerError(f"idle, but free {usage.num_free} + cached {usage.num_cached} != pool {usage.num_blocks}")

    def check(self) -> None:
        """Sum up the ledger block by block. Raises LedgerError listing everything that is wrong. Changes nothing."""
        wrong = self._cache.check()
        free = self._pool.free_ids()
        if len(free) != self._pool.num_free:
            wrong.append("a block is in the free list twice")
        cached = {node.block for node in self._cache if node.num_holders == 0}
        held: set[int] = set()
        for request, account in self._accounts.items():
            held.update(account.blocks)
            held.update(node.block for node in account.nodes)
            if len(set(account.blocks)) != len(account.blocks):
                wrong.append(f"the block table of {request.id} names a block twice")
        for name, overlap in (("free and cached", free & cached), ("free and held", free & held),
                              ("cached and held", cached & held)):
            if overlap:
                wrong.append(f"blocks {sorted(overlap)} are {name}")
        if len(free) + len(cached) + len(held) != self._pool.num_blocks:
            wrong.append(f"free {len(free)} + cached {len(cached)} + held {len(held)} != pool {self._pool.num_blocks}")
        if wrong:
            raise LedgerError("; ".join(wrong))
