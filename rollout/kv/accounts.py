"""The blocks of admitted requests, block by block, and the sums of all blocks by owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..sequences.request import Request
from .block_pool import BlockPool
from .radix_cache import Node, RadixCache


@dataclass(eq=False)
class Account:
    """The blocks of one admitted request."""

    blocks: list[int] = field(default_factory=list)  # the block table
    nodes: list[Node] = field(default_factory=list)  # nodes of its published part
    is_publishing: bool = True  # False after a hash collision or an epoch change: its blocks stay private
    num_matched: int = 0  # blocks that came from the cache
    is_cut: bool = False  # blocks at its end were given back, of which the managers do not know yet
    snapshots_at: tuple[int, ...] = ()  # tokens after which a chunk of its prompt ends, for a snapshot of its states


@dataclass(frozen=True)
class KVUsage:
    """Blocks of the pool by owner; they sum up to `num_blocks`."""

    num_blocks: int
    num_free: int
    num_cached: int  # in the tree, without holder and not pinned: eviction can take them
    num_pinned: int  # in the tree, without holder, kept by pins on them or on blocks below them
    num_held: int  # owned by running sequences


def wrong_blocks(pool: BlockPool, cache: RadixCache, accounts: Mapping[Request, Account]) -> list[str]:
    """Return a description of each block with no owner or several; empty when there is none. Changes nothing."""
    wrong = []
    free = pool.free_ids()
    if len(free) != pool.num_free:
        wrong.append("a block is in the free list twice")
    cached = {node.block for node in cache if node.num_holders == 0}
    held: set[int] = set()
    for request, account in accounts.items():
        held.update(account.blocks)
        held.update(node.block for node in account.nodes)
        if len(set(account.blocks)) != len(account.blocks):
            wrong.append(f"the block table of {request.id} names a block twice")
    for name, overlap in (
        ("free and cached", free & cached),
        ("free and held", free & held),
        ("cached and held", cached & held),
    ):
        if overlap:
            wrong.append(f"blocks {sorted(overlap)} are {name}")
    if len(free) + len(cached) + len(held) != pool.num_blocks:
        wrong.append(f"free {len(free)} + cached {len(cached)} + held {len(held)} != pool {pool.num_blocks}")
    return wrong
