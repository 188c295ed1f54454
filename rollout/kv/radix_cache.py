"""The cached KV blocks by token prefix: a tree with one node per full block.

A node is found by the chained hash of its whole prefix, and its own tokens, images, parent and salt are compared before
it is used, so a collision can cost a hit but never serve another prefix's KV. One node per block means that no node is
ever split: prefixes diverge at a block boundary or not at all.

Rules for removing a block from the tree:

    num_holders > 0     never: that many running sequences hold it, and all its ancestors
    num_guards > 0      never: it is pinned, or a block below it is
    neither             by eviction: leaves first, least recently used first

Holds and guards are separate counts, so that the end of a sequence never lifts a pin, and an unpin never ends a hold.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from .events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventLog
from .prefix import token_list


class Node:
    """One full block of KV and its tokens."""

    __slots__ = (
        "hash", "tokens", "salt", "image_key", "block", "parent", "depth", "children", "num_holders", "is_pinned",
        "num_guards", "last_used", "last_used_at", "num_hits",
    )  # fmt: skip

    def __init__(self, hash: int, tokens: bytes, block: int, parent: Node | None, salt: str, image_key: str) -> None:
        self.hash = hash
        self.tokens = tokens
        self.salt = salt
        self.image_key = image_key  # see `media/kv_keys.py`; "": its KV depends on tokens alone
        self.block = block
        self.parent = parent  # None: the first block of a prefix
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] | None = None  # by hash; None until the first one
        self.num_holders = 0
        self.is_pinned = False
        self.num_guards = 0  # 1 if it is pinned, and 1 for each child that has guards
        self.last_used = 0  # ticks of the cache's own clock
        self.last_used_at = time.monotonic()
        self.num_hits = 0

    @property
    def is_free_to_go(self) -> bool:
        """Whether it has no holder and no pin protects it."""
        return self.num_holders == 0 and self.num_guards == 0

    @property
    def is_evictable_leaf(self) -> bool:
        return self.num_holders == 0 and self.num_guards == 0 and not self.children

    @property
    def token_ids(self) -> list[int]:
        return token_list(self.tokens)


class RadixCache:
    """The tree, its index from hash to node, and the eviction order."""

    def __init__(self, block_size: int = 0, events: KVEventLog | None = None) -> None:
        """Create an empty cache. block_size: only for the events."""
        self._block_size = block_size
        self._events = events or KVEventLog()
        self._index: dict[int, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last_used, tie, leaf); stale entries are skipped
        self._clock = 0
        self._num_pushed = 0
        self.num_cached = 0  # nodes that eviction could remove: not held, not guarded
        self.num_guarded = 0  # nodes that pins protect, held ones included
        self.num_guarded_idle = 0  # guarded nodes without a holder
        self.num_evicted = 0  # since the cache was made
        self.on_removed: Callable[[Node], None] = lambda node: None  # called with every node that leaves the tree

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_eviction_candidates(self) -> int:
        """Entries of the eviction order, stale ones included. They stay in proportion to the tree, however long it is
        used; nothing else shows that, so a test reads it here."""
        return len(self._leaves)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._index.values())

    def get(self, hash: int) -> Node | None:
        """Return the node of that hash, whatever its tokens are. Changes nothing."""
        return self._index.get(hash)

    def find(self, hash: int, tokens: bytes, parent: Node | None, salt: str = "", image_key: str = "") -> Node | None:
        """Return the node of this block, or None. Changes nothing."""
        node = self._index.get(hash)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node if node.salt == salt and node.image_key == image_key else None

    def insert(
        self, hash: int, tokens: bytes, block: int, parent: Node | None, salt: str = "", image_key: str = ""
    ) -> Node | None:
        """Put a block in the tree, held once by the caller. Returns None and changes nothing if the hash is taken."""
        if hash in self._index:
            return None
        node = Node(hash, tokens, block, parent, salt, image_key)
        self._index[hash] = node
        if parent is not None:
            assert parent.num_holders > 0, "a sequence holds every ancestor of the block it publishes"
            if parent.children is None:
                parent.children = {hash: node}
            else:
                parent.children[hash] = node
        node.num_holders = 1
        node.last_used = self._clock
        if self._events.is_on:
            parent_hash = None if parent is None else parent.hash
            keys = (image_key,) if image_key else ()
            self._events.append(BlockStored((hash,), parent_hash, tuple(node.token_ids), self._block_size, salt, keys))
        return node

    def hold(self, node: Node) -> None:
        """Add one holder; the caller holds, or is about to hold, every ancestor too."""
        if node.num_holders == 0:
            if node.num_guards:
                self.num_guarded_idle -= 1
            else:
                self.num_cached -= 1
        node.num_holders += 1

    def drop(self, nodes: Sequence[Node]) -> list[int]:
        """Remove one holder from each node of a path, given root first. The nodes stay cached, as most recently used.

        Returns the blocks of detached nodes without holders left: these are free, not cached.
        """
        self._clock += 1
        now = time.monotonic()
        freed = []
        for node in reversed(nodes):  # children first, so that a leaf is known to be one when it is pushed
            node.last_used, node.last_used_at = self._clock, now
            node.num_holders -= 1
            assert node.num_holders >= 0
            if node.num_holders > 0:
                continue
            if self._index.get(node.hash) is not node:
                freed.append(node.block)
            elif node.num_guards:
                self.num_guarded_idle += 1
            else:
                self._let_go(node)
        return freed

    # -- guards: protection by pins ---------------------------------------------------------------------------------

    def num_newly_guarded(self, node: Node) -> int:
        """Count the further nodes that a pin on this one would protect. Changes nothing."""
        count = 0
        at: Node | None = node
        while at is not None and at.num_guards == 0:
            count, at = count + 1, at.parent
        return count

    def pin(self, node: Node) -> None:
        """Protect the node and its ancestors from eviction. It must not be pinned already."""
        assert not node.is_pinned
        node.is_pinned = True
        at: Node | None = node
        while at is not None:
            at.num_guards += 1
            if at.num_guards > 1:
                break  # it was guarded before, and so were its ancestors
            self.num_guarded += 1
            if at.num_holders == 0:
                self.num_cached -= 1
                self.num_guarded_idle += 1
            at = at.parent

    def touch(self, node: Node) -> None:
        """Mark a guarded node as used. (Others are marked when held, which also updates the eviction order.)"""
        assert node.num_guards > 0
        self._clock += 1
        node.last_used, node.last_used_at = self._clock, time.monotonic()

    def unpin(self, node: Node) -> int:
        """Lift the node's pin; returns the number of blocks that become evictable."""
        assert node.is_pinned
        node.is_pinned = False
        num_let_go = 0
        at: Node | None = node
        while at is not None:
            at.num_guards -= 1
            if at.num_guards > 0:
                break
            self.num_guarded -= 1
            if at.num_holders == 0:
                self.num_guarded_idle -= 1
                self._let_go(at)
                num_let_go += 1
            at = at.parent
        return num_let_go

    # -- removal -----------------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` cached leaves, least recently used first; returns their blocks."""
        gone: list[Node] = []
        while len(gone) < num_blocks and self._leaves:
            entry = heapq.heappop(self._leaves)
            at = entry[2] if self._is_current(entry) else None
            while at is not None:
                gone.append(at)
                at = self._remove(at)
                if at is not None and (len(gone) == num_blocks or self._has_earlier(at)):
                    self._push(at)
                    break  # else the parent is next in any case: no detour through the heap
        self.num_evicted += len(gone)
        if gone and self._events.is_on:
            self._events.append(BlockRemoved(tuple(node.hash for node in gone)))
        return [node.block for node in gone]

    def evict_below(self, top: Node) -> list[int]:
        """Remove every node below `top` without a holder or a pin that protects it; returns their blocks."""
        gone: list[Node] = []
        for node in reversed(list(self.below(top))):  # deepest last in the walk, so children go before their parents
            if node.is_evictable_leaf:
                gone.append(node)
                if (parent := self._remove(node)) is not None:
                    self._push(parent)
        self.num_evicted += len(gone)
        if gone and self._events.is_on:
            self._events.append(BlockRemoved(tuple(node.hash for node in gone)))
        return [node.block for node in gone]

    def below(self, top: Node) -> Iterator[Node]:
        """Yield every node below `top`, parents before their children. Changes nothing."""
        todo = [top]
        while todo:
            for child in (todo.pop().children or {}).values():
                yield child
                todo.append(child)

    def clear(self) -> list[int]:
        """Empty the whole tree: nothing matches any more. No node may be pinned.

        Returns the blocks of the nodes without holders; a held block is free when its last holder drops it.
        """
        assert self.num_guarded == 0, "drop the pins first"
        blocks = [node.block for node in self if node.num_holders == 0]
        if self._index:
            self._events.append(AllBlocksCleared())
        for node in self:
            self.on_removed(node)
        self._index.clear()
        self._leaves.clear()
        self.num_cached = 0
        return blocks

    def _let_go(self, node: Node) -> None:
        """Make a node without holders and guards evictable."""
        self.num_cached += 1
        if not node.children:
            self._push(node)

    def _remove(self, node: Node) -> Node | None:
        """Remove a leaf; returns its parent if that is evictable now: the caller pushes it or removes it too."""
        del self._index[node.hash]
        self.on_removed(node)
        self.num_cached -= 1
        parent = node.parent
        if parent is None:
            return None
        assert parent.children is not None
        del parent.children[node.hash]
        return parent if parent.is_evictable_leaf else None

    def _has_earlier(self, node: Node) -> bool:
        """Return whether a leaf in the eviction order goes before or together with this node, which is not in it."""
        return bool(self._leaves) and self._leaves[0][0] <= node.last_used

    def _push(self, node: Node) -> None:
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushed, node))
        if len(self._leaves) > 2 * len(self._index) + 64:  # mostly stale: without evictions nothing else removes them
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return node.last_used == last_used and node.is_evictable_leaf and self._index.get(node.hash) is node

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Return a description of each inconsistency in the tree; empty when there is none. Cost grows with the
        tree."""
        wrong = []
        for hash, node in self._index.items():
            wrong += self._check_node(hash, node)
        counted = (self.num_cached, self.num_guarded, self.num_guarded_idle)
        found = (
            _count(node.is_free_to_go for node in self),
            _count(node.num_guards > 0 for node in self),
            _count(node.num_guards > 0 and node.num_holders == 0 for node in self),
        )
        if counted != found:
            wrong.append(f"cached, guarded, guarded and idle: {found} found, {counted} counted")
        in_order = {entry[2].hash for entry in self._leaves if self._is_current(entry)}
        lost = {node.hash for node in self if node.is_evictable_leaf} - in_order
        wrong += [f"leaf {hash} is not up for eviction" for hash in sorted(lost)]
        return wrong

    def _check_node(self, hash: int, node: Node) -> list[str]:
        wrong = []
        children = list((node.children or {}).values())
        if node.hash != hash:
            wrong.append(f"node {node.hash} stands under hash {hash}")
        if any(child.parent is not node or self._index.get(child.hash) is not child for child in children):
            wrong.append(f"node {hash} names a child that is not in the tree, or not its own")
        guards = int(node.is_pinned) + _count(child.num_guards > 0 for child in children)
        if node.num_guards != guards:
            wrong.append(f"node {hash} counts {node.num_guards} guards, has {guards}")
        parent = node.parent
        if parent is not None:
            if self._index.get(parent.hash) is not parent or (parent.children or {}).get(hash) is not node:
                wrong.append(f"parent of node {hash} is not in the tree, or does not know it")
            if node.num_holders > 0 and parent.num_holders == 0:
                wrong.append(f"node {hash} is held but its parent is not")
        return wrong


def _count(flags: Iterable[bool]) -> int:
    return sum(flags)
