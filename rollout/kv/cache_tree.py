"""A report of the prefix cache: its blocks, their holders and pins, and the point where a prompt leaves it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .ledger import KVLedger
from .prefix import Prefix
from .radix_cache import Node


@dataclass(frozen=True)
class CacheNode:
    """One cached block."""

    hash: int
    parent: int | None  # hash of the block before it; None: the first of its prefix
    depth: int  # blocks before it
    num_tokens: int
    token_ids: tuple[int, ...]
    epoch: int  # epoch of the weights that computed its KV; a block of an older epoch is never in the tree
    salt: str  # extra_key of the requests that may use it
    image_key: str  # names the images that its KV depends on, beside the blocks before; "": none
    num_holders: int  # running sequences that hold it
    num_pins: int  # pins on this block itself
    owners: dict[str, int]  # number of these pins by owner; "" is the owner of pins without one
    is_protected: bool  # by a pin on it, or on a block below it
    num_children: int
    num_hits: int  # requests that found it
    idle_s: float  # seconds since it was last used


@dataclass(frozen=True)
class Divergence:
    """The point where a prompt leaves the cache: its first full block that is not cached."""

    num_blocks: int  # full blocks of the prompt
    num_matched: int  # cached blocks of them, from the start
    hash: int | None  # of the first block that is not cached; None: all are cached
    nearest: int | None  # of the cached block after the same prefix that starts most alike; None: there is none
    num_common_tokens: int  # tokens, from the start of the prompt, that agree with that block
    differs_in_images: bool = False  # whether all tokens of that block agree, and its images or their positions do not


@dataclass(frozen=True)
class CacheTree:
    """The cache at one moment, between two steps."""

    event_seq: int  # last batch of KV events before this report; -1: none
    pin_event_seq: int  # last batch of pin events before this report
    epoch: int
    block_size: int
    num_blocks: int  # the pool; free, cached, held and pinned blocks add up to it
    num_free: int
    num_cached: int  # evictable: in the tree, neither held nor protected
    num_held: int
    num_pinned: int  # protected and not held
    num_protected: int  # protected blocks, held ones included: the budget limits this count
    pin_budget: int  # blocks that pins may protect
    num_pins: int  # blocks with a pin on themselves
    eviction_pressure: float  # recent share of allocated blocks that had to be evicted first, 0 to 1
    num_evicted: int  # blocks, since the start
    num_expired_pins: int
    num_auto_unpinned: int  # blocks whose pins were lifted for a request that could not run
    num_looked_up_tokens: int
    num_hit_tokens: int
    divergence: Divergence | None  # of the prompt in the query; None: no prompt was given
    nodes: tuple[CacheNode, ...]  # parents before their children; each node is followed by its subtree

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)

    def text(self, max_tokens_shown: int = 8) -> str:
        """Return an indented tree for people.

        A block that only continues its parent, with the same values in every shown field, shares its parent's line.
        """
        lines = [
            f"epoch {self.epoch}: {self.num_blocks} blocks of {self.block_size} tokens: {self.num_free} free, "
            f"{self.num_cached} cached, {self.num_held} held, {self.num_pinned} pinned; {self.num_protected} of at "
            f"most {self.pin_budget} protected; eviction pressure {self.eviction_pressure:.2f}"
        ]
        lines += _lines(self.nodes, max_tokens_shown)
        if (d := self.divergence) is not None:
            where = f"leaves the cache at block {d.num_matched}, hash {d.hash}" if d.hash is not None else "is cached"
            beside = ""
            if d.nearest is not None:
                images = " but for its images" if d.differs_in_images else ""
                beside = f"; nearest is {d.nearest}, equal up to token {d.num_common_tokens}{images}"
            lines.append(f"the prompt of {d.num_blocks} full blocks {where}{beside}")
        return "\n".join(lines)


def cache_tree(
    ledger: KVLedger, depth: int | None = None, under: int | None = None, prompt: Prefix | None = None,
    num_prompt_blocks: int = 0,
) -> CacheTree:  # fmt: skip
    """Read the whole tree, or the subtree of the block `under` (itself included), `depth` levels at most.

    prompt: report where this prompt of `num_prompt_blocks` full blocks leaves the cache. Raises ValueError for an
    unknown `under` or a depth below 1. Changes nothing but expired pins, which it lifts.
    """
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ValueError(f"depth must be at least 1, not {depth!r}")
    top = None
    if under is not None and (top := ledger.cache.get(under)) is None:
        raise ValueError(f"no cached block has the hash {under}")
    ledger.pins.expire()
    ledger.events.flush()
    usage, cache, pins, now = ledger.usage, ledger.cache, ledger.pins, time.monotonic()
    roots = [top] if top is not None else [node for node in cache if node.parent is None]
    return CacheTree(
        event_seq=ledger.events.last_seq("kv"),
        pin_event_seq=ledger.events.last_seq("pins"),
        epoch=ledger.epoch,
        block_size=ledger.block_size,
        num_blocks=usage.num_blocks,
        num_free=usage.num_free,
        num_cached=usage.num_cached,
        num_held=usage.num_held,
        num_pinned=usage.num_pinned,
        num_protected=cache.num_guarded,
        pin_budget=pins.max_blocks,
        num_pins=len(pins),
        eviction_pressure=ledger.eviction_pressure,
        num_evicted=cache.num_evicted,
        num_expired_pins=pins.num_expired,
        num_auto_unpinned=pins.num_auto_unpinned,
        num_looked_up_tokens=ledger.num_looked_up_tokens,
        num_hit_tokens=ledger.num_hit_tokens,
        divergence=None if prompt is None else _divergence(ledger, prompt, num_prompt_blocks),
        nodes=tuple(_describe(ledger, node, now) for node in _walk(roots, depth)),
    )


def _walk(roots: list[Node], depth: int | None) -> Iterator[Node]:
    todo = [(node, 1) for node in reversed(roots)]
    while todo:
        node, level = todo.pop()
        yield node
        if depth is None or level < depth:
            todo += [(child, level + 1) for child in reversed(list((node.children or {}).values()))]


def _describe(ledger: KVLedger, node: Node, now: float) -> CacheNode:
    owners = {owner or "": count for owner, count in ledger.pins.owners(node.hash).items()} if node.is_pinned else {}
    return CacheNode(
        hash=node.hash,
        parent=None if node.parent is None else node.parent.hash,
        depth=node.depth,
        num_tokens=len(node.token_ids),
        token_ids=tuple(node.token_ids),
        epoch=ledger.epoch,
        salt=node.salt,
        image_key=node.image_key,
        num_holders=node.num_holders,
        num_pins=sum(owners.values()),
        owners=owners,
        is_protected=node.num_guards > 0,
        num_children=len(node.children or ()),
        num_hits=node.num_hits,
        idle_s=now - node.last_used_at,
    )


def _divergence(ledger: KVLedger, prompt: Prefix, num_blocks: int) -> Divergence:
    path = ledger.paths.of(prompt, num_blocks)
    num_matched, num_common = len(path), len(path) * ledger.block_size
    if num_matched == num_blocks:
        return Divergence(num_blocks, num_blocks, None, None, num_common)
    if path:
        beside = list((path[-1].children or {}).values())
    else:
        beside = [node for node in ledger.cache if node.parent is None and node.salt == prompt.salt]
    tokens, hash = prompt.tokens(num_matched), prompt.hash(num_matched)
    nearest = max(beside, key=lambda node: _num_equal(node.tokens, tokens), default=None)
    if nearest is None:
        return Divergence(num_blocks, num_matched, hash, None, num_common)
    num_common += _num_equal(nearest.tokens, tokens)
    differs_in_images = nearest.tokens == tokens and nearest.image_key != prompt.image_key(num_matched)
    return Divergence(num_blocks, num_matched, hash, nearest.hash, num_common, differs_in_images)


def _num_equal(a: bytes, b: bytes) -> int:
    """Count the token ids that two blocks start with in common."""
    num_bytes = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return num_bytes // 4


def _lines(nodes: tuple[CacheNode, ...], max_tokens_shown: int) -> Iterator[str]:
    indents: dict[int, int] = {}
    index = 0
    while index < len(nodes):
        first = last = nodes[index]
        indent = indents.get(first.parent, 0) if first.parent is not None else 0
        while index + 1 < len(nodes) and _continues(last, nodes[index + 1]):
            index += 1
            last = nodes[index]
        index += 1
        indents[last.hash] = indent + 1
        num_blocks = last.depth - first.depth + 1
        shown = " ".join(map(str, first.token_ids[:max_tokens_shown]))
        what = [f"{num_blocks} block{'s' * (num_blocks > 1)}", f"{num_blocks * first.num_tokens} tokens [{shown} ...]"]
        if first.num_holders:
            what.append(f"held by {first.num_holders}")
        if first.num_pins:
            names = ", ".join(f"{owner or '(nobody)'} x{count}" for owner, count in first.owners.items())
            what.append(f"pinned by {names}")
        elif first.is_protected:
            what.append("protected from below")
        what.append(f"{first.num_hits} hits, idle {first.idle_s:.1f} s")
        name = str(first.hash) if num_blocks == 1 else f"{first.hash} .. {last.hash}"
        yield "  " * (indent + 1) + f"{name}: " + ", ".join(what)


def _continues(node: CacheNode, following: CacheNode) -> bool:
    """Return whether a line about `node` is true of `following` too."""

    def shown(n: CacheNode) -> tuple[object, ...]:
        return (n.num_holders, n.owners, n.is_protected, n.num_hits, round(n.idle_s, 1))

    return following.parent == node.hash and node.num_children == 1 and shown(node) == shown(following)
