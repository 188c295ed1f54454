"""Which blocks hold the KV of which token prefix: a tree with one node per full block.

A node is found by the chained hash of its whole prefix, and its own tokens and parent are compared before it is used,
so a collision can cost a hit but never serve another prefix's KV. One node per block means that no node is ever split:
prefixes part ways at a block boundary or not at all.

Who owns a block in the tree:

    num_holders > 0     held by that many running sequences; so are all its ancestors
    num_holders == 0    cached: evictable, leaves first, least recently used first
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Iterator, Sequence

_HASH_SEED = b"lockstep-kv-1"


def root_hash(extra_key: str = "") -> int:
    """Hash that the first block of a prefix chains from; prefixes under different keys never meet."""
    return _digest64(_HASH_SEED + extra_key.encode())


def block_hash(parent_hash: int, token_ids: Sequence[int]) -> int:
    """Chained hash of one full block: a signed 64-bit number, equal in every process and run."""
    return _digest64(parent_hash.to_bytes(8, "little", signed=True) + array("i", token_ids).tobytes())


def _digest64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


class Node:
    """One full block of KV and the tokens it stands for."""

    __slots__ = ("hash", "token_ids", "block", "parent", "num_children", "num_holders", "last_used", "num_hits")

    def __init__(self, hash: int, token_ids: tuple[int, ...], block: int, parent: Node | None) -> None:
        self.hash = hash
        self.token_ids = token_ids
        self.block = block
        self.parent = parent  # None: the first block of a prefix
        self.num_children = 0
        self.num_holders = 0
        self.last_used = 0  # ticks of the cache's own clock
        self.num_hits = 0

    @property
    def is_evictable_leaf(self) -> bool:
        return self.num_holders == 0 and self.num_children == 0


class RadixCache:
    """The tree, its index from hash to node, and the eviction order."""

    def __init__(self) -> None:
        self._index: dict[int, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last_used, tie, leaf); stale entries are skipped
        self._clock = 0
        self._num_pushed = 0
        self.num_cached = 0  # nodes that nobody holds

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_eviction_candidates(self) -> int:
        """Entries of the eviction order, stale ones included: in proportion to the tree, however long it is used."""
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._index.values())

    def find(self, hash: int, token_ids: Sequence[int], parent: Node | None) -> Node | None:
        """The node of this block, or None. Changes nothing."""
        node = self._index.get(hash)
        if node is None or node.parent is not parent or node.token_ids != tuple(token_ids):
            return None
        return node

    def insert(self, hash: int, token_ids: Sequence[int], block: int, parent: Node | None) -> Node | None:
        """Put a block in the tree, held once by the caller. None, and nothing changed, where the hash is taken."""
        if hash in self._index:
            return None
        node = Node(hash, tuple(token_ids), block, parent)
        self._index[hash] = node
        if parent is not None:
            assert parent.num_holders > 0, "a sequence holds every ancestor of the block it publishes"
            parent.num_children += 1
        node.num_holders = 1
        return node

    def hold(self, node: Node) -> None:
        """One more holder; the caller holds, or is about to hold, every ancestor too."""
        if node.num_holders == 0:
            self.num_cached -= 1
        node.num_holders += 1

    def drop(self, nodes: Sequence[Node]) -> list[int]:
        """One holder less for each of a path's nodes, given root first; they stay cached, most recently used.

        Returns the blocks of detached nodes that nobody holds any more: those are not cached but free.
        """
        self._clock += 1
        freed = []
        for node in reversed(nodes):  # children first, so that a leaf is known to be one when it is pushed
            node.last_used = self._clock
            node.num_holders -= 1
            assert node.num_holders >= 0
            if node.num_holders > 0:
                continue
            if self._index.get(node.hash) is not node:
                freed.append(node.block)
                continue
            self.num_cached += 1
            if node.num_children == 0:
                self._push(node)
        return freed

    def evict(self, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` cached leaves, least recently used first; returns their blocks."""
        blocks = []
        while len(blocks) < num_blocks and self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(entry):
                node = entry[2]
                self._remove(node)
                blocks.append(node.block)
        return blocks

    def evict_all(self) -> list[int]:
        """Remove every cached node; returns their blocks. Held ones stay."""
        return self.evict(len(self._index))

    def detach_all(self) -> None:
        """Take the held nodes out of the index, where only they are left: nothing matches any more."""
        assert self.num_cached == 0, "evict the cached nodes first"
        self._index.clear()
        self._leaves.clear()

    def _remove(self, node: Node) -> None:
        del self._index[node.hash]
        self.num_cached -= 1
        parent = node.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.is_evictable_leaf:
                self._push(parent)

    def _push(self, node: Node) -> None:
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushed, node))
        if len(self._leaves) > 2 * len(self._index) + 64:  # mostly stale: without evictions nothing else removes them
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return node.last_used == last_used and node.is_evictable_leaf and self._index.get(node.hash) is node

    def check(self) -> list[str]:
        """What is inconsistent in the tree, in words; empty when nothing is. Cost grows with the tree."""
        wrong = []
        children: dict[int, int] = {}
        num_cached = 0
        for hash, node in self._index.items():
            if node.hash != hash:
                wrong.append(f"node {node.hash} stands under hash {hash}")
            num_cached += node.num_holders == 0
            if (parent := node.parent) is not None:
                children[id(parent)] = children.get(id(parent), 0) + 1
                if self._index.get(parent.hash) is not parent:
                    wrong.append(f"parent of node {hash} is not in the tree")
                if node.num_holders > 0 and parent.num_holders == 0:
                    wrong.append(f"node {hash} is held but its parent is not")
        for node in self:
            if node.num_children != children.get(id(node), 0):
                wrong.append(f"node {node.hash} counts {node.num_children} children, has {children.get(id(node), 0)}")
        if num_cached != self.num_cached:
            wrong.append(f"{num_cached} nodes are cached, {self.num_cached} counted")
        return wrong
