"""The tree of cached prefixes: what it finds, what it evicts first, what a collision costs."""

from __future__ import annotations

import subprocess
import sys

from lockstep.rollout.radix_cache import Node, RadixCache, block_hash, root_hash


def chain(*blocks: tuple[int, ...], key: str = "") -> list[int]:
    hashes, parent = [], root_hash(key)
    for tokens in blocks:
        parent = block_hash(parent, tokens)
        hashes.append(parent)
    return hashes


def grow(
    cache: RadixCache, path: list[Node], tokens: tuple[int, ...], block: int, hash: int | None = None
) -> list[Node]:
    """Publish one more block at the end of a held path."""
    parent = path[-1] if path else None
    if hash is None:
        hash = block_hash(parent.hash if parent else root_hash(), tokens)
    node = cache.insert(hash, tokens, block, parent)
    assert node is not None
    return [*path, node]


def find(cache: RadixCache, *blocks: tuple[int, ...]) -> list[int]:
    """Blocks of the cached path of that prefix."""
    found, parent = [], None
    for hash, tokens in zip(chain(*blocks), blocks, strict=True):
        parent = cache.find(hash, tokens, parent)
        if parent is None:
            break
        found.append(parent.block)
    return found


def test_hash_is_chained_so_equal_blocks_after_different_prefixes_differ():
    assert chain((1, 2), (3, 4))[1] != chain((1, 9), (3, 4))[1]
    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))


def test_hash_separates_keys_and_fits_a_signed_64_bit_number():
    hashes = chain((1, 2)) + chain((1, 2), key="tenant") + chain((1, 2), key="other")
    assert len(set(hashes)) == 3
    assert all(-(2**63) <= hash < 2**63 for hash in hashes)


def test_hash_is_equal_in_another_process_with_another_hash_seed():
    code = (
        "from lockstep.rollout.radix_cache import block_hash, root_hash;"
        "print(block_hash(block_hash(root_hash('k'), (1, 2, 3)), (4, 5, 6)))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == chain((1, 2, 3), (4, 5, 6), key="k")[1]


def test_equal_prefix_is_found_as_far_as_it_goes():
    cache = RadixCache()
    grow(cache, grow(cache, [], (1, 2), 0), (3, 4), 1)
    assert find(cache, (1, 2), (3, 4), (5, 6)) == [0, 1]
    assert find(cache, (1, 2), (3, 9)) == [0]
    assert find(cache, (9, 2), (3, 4)) == []


def test_collision_of_hashes_never_serves_the_other_prefix():
    cache = RadixCache()
    grow(cache, [], (1, 2), 0, hash=77)
    assert cache.find(77, (1, 2), None).block == 0
    assert cache.find(77, (8, 9), None) is None
    assert cache.insert(77, (8, 9), 5, None) is None
    assert len(cache) == 1 and cache.check() == []


def test_equal_hash_and_tokens_below_another_parent_do_not_match():
    cache = RadixCache()
    first, second = grow(cache, [], (1, 2), 0), grow(cache, [], (3, 4), 1)
    grow(cache, first, (5, 6), 2, hash=77)
    assert cache.find(77, (5, 6), second[0]) is None
    assert cache.find(77, (5, 6), None) is None


def test_held_nodes_are_never_evicted():
    cache = RadixCache()
    path = grow(cache, grow(cache, [], (1, 2), 0), (3, 4), 1)
    assert cache.evict(5) == []
    cache.drop(path)
    assert cache.num_cached == 2
    assert cache.evict(5) == [1, 0]  # leaf before its parent
    assert len(cache) == 0 and cache.check() == []


def test_least_recently_used_leaf_goes_first():
    cache = RadixCache()
    paths = [grow(cache, [], (i, i), i) for i in range(3)]
    for path in paths:
        cache.drop(path)
    cache.hold(paths[0][0])  # used again
    cache.drop(paths[0])
    assert cache.evict(1) == [1]
    assert cache.evict(2) == [2, 0]


def test_shared_stem_outlives_the_branch_that_is_evicted():
    cache = RadixCache()
    stem = grow(cache, [], (1, 2), 0)
    cache.hold(stem[0])
    left, right = grow(cache, stem, (3, 4), 1), grow(cache, stem, (5, 6), 2)
    cache.drop(left)
    assert cache.num_cached == 1  # the stem is held by the right branch
    assert cache.evict(9) == [1]
    cache.drop(right)
    assert cache.evict(9) == [2, 0]


def test_leaf_that_is_held_again_survives_until_it_is_dropped_again():
    cache = RadixCache()
    path = grow(cache, [], (1, 2), 0)
    cache.drop(path)
    cache.hold(path[0])
    assert cache.evict(1) == [] and cache.num_cached == 0
    cache.drop(path)
    assert cache.evict(1) == [0]


def test_detached_nodes_match_nothing_and_their_blocks_come_back_when_dropped():
    cache = RadixCache()
    path = grow(cache, grow(cache, [], (1, 2), 0), (3, 4), 1)
    cache.hold(path[0])
    cache.detach_all()
    assert find(cache, (1, 2)) == []
    fresh = grow(cache, [], (1, 2), 7)  # the same prefix, computed again
    assert cache.drop(path) == [1]  # block 0 has another holder
    assert cache.drop(path[:1]) == [0]
    assert find(cache, (1, 2)) == [7]
    assert cache.num_cached == 0
    cache.drop(fresh)
    assert cache.num_cached == 1 and cache.check() == []


def test_a_prefix_that_is_hit_again_and_again_does_not_make_the_cache_grow():
    cache = RadixCache()
    path = grow(cache, [], (1, 2), 0)
    cache.drop(path)
    for _ in range(5000):
        cache.hold(path[0])
        cache.drop(path)
    assert cache.num_eviction_candidates < 200
    assert cache.evict(1) == [0]


def test_check_names_what_does_not_add_up():
    cache = RadixCache()
    path = grow(cache, grow(cache, [], (1, 2), 0), (3, 4), 1)
    path[0].num_holders = 0
    path[1].num_children = 3
    wrong = " ".join(cache.check())
    assert "held but its parent is not" in wrong
    assert "counts 3 children, has 0" in wrong
    assert "1 nodes are cached, 0 counted" in wrong
