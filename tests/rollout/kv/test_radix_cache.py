"""The tree of cached prefixes: matches, order of eviction, cost of a collision."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from lockstep.rollout.kv import prefix
from lockstep.rollout.kv.prefix import root_hash, token_bytes
from lockstep.rollout.kv.radix_cache import Node, RadixCache


def block_hash(parent: int, tokens: tuple[int, ...]) -> int:
    return prefix.block_hash(parent, token_bytes(tokens))


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
    node = cache.insert(hash, token_bytes(tokens), block, parent)
    assert node is not None
    return [*path, node]


def find(cache: RadixCache, *blocks: tuple[int, ...]) -> list[int]:
    """Find the blocks of the cached path of that prefix."""
    found, parent = [], None
    for hash, tokens in zip(chain(*blocks), blocks, strict=True):
        parent = cache.find(hash, token_bytes(tokens), parent)
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
        "from lockstep.rollout.kv.prefix import block_hash, root_hash, token_bytes as b;"
        "print(block_hash(block_hash(root_hash('k'), b((1, 2, 3))), b((4, 5, 6))))"
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
    assert cache.find(77, token_bytes((1, 2)), None).block == 0
    assert cache.find(77, token_bytes((8, 9)), None) is None
    assert cache.insert(77, token_bytes((8, 9)), 5, None) is None
    assert len(cache) == 1 and cache.check() == []


def test_equal_hash_and_tokens_below_another_parent_do_not_match():
    cache = RadixCache()
    first, second = grow(cache, [], (1, 2), 0), grow(cache, [], (3, 4), 1)
    grow(cache, first, (5, 6), 2, hash=77)
    assert cache.find(77, token_bytes((5, 6)), second[0]) is None
    assert cache.find(77, token_bytes((5, 6)), None) is None


def test_equal_hash_and_tokens_under_another_salt_do_not_match():
    cache = RadixCache()
    cache.insert(77, token_bytes((5, 6)), 0, None, "tenant")
    assert cache.find(77, token_bytes((5, 6)), None) is cache.find(77, token_bytes((5, 6)), None, "other") is None
    assert cache.find(77, token_bytes((5, 6)), None, "tenant").block == 0


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


@pytest.mark.parametrize("seed", range(10))
def test_many_evicted_at_once_are_those_that_go_one_by_one_in_the_same_order(seed):
    def a_cache() -> RadixCache:
        cache, dice, block = RadixCache(), random.Random(seed), itertools.count()
        for _ in range(30):
            path: list[Node] = []
            for _ in range(dice.randint(1, 6)):
                tokens = (dice.randint(1, 2), 0)
                hash = block_hash(path[-1].hash if path else root_hash(), tokens)
                found = cache.find(hash, token_bytes(tokens), path[-1] if path else None)
                if found is None:
                    path = grow(cache, path, tokens, next(block))
                else:
                    cache.hold(found)
                    path.append(found)
            cache.drop(path)
        return cache

    at_once, one_by_one = a_cache(), a_cache()
    num_nodes = len(at_once)
    for num_blocks in (1, 7, 2, num_nodes):
        gone = at_once.evict(num_blocks)
        assert gone == [block for _ in range(num_blocks) for block in one_by_one.evict(1)]
        assert at_once.check() == one_by_one.check() == []
    assert len(at_once) == 0 and num_nodes > 25


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
    assert cache.clear() == []  # both are held
    assert find(cache, (1, 2)) == []
    fresh = grow(cache, [], (1, 2), 7)  # the same prefix, computed again
    assert cache.drop(path) == [1]  # block 0 has another holder
    assert cache.drop(path[:1]) == [0]
    assert find(cache, (1, 2)) == [7]
    assert cache.num_cached == 0
    cache.drop(fresh)
    assert cache.num_cached == 1 and cache.check() == []


def test_guards_are_one_for_the_pin_and_one_for_each_guarded_child():
    cache = RadixCache()
    stem = grow(cache, [], (1, 2), 0)
    cache.hold(stem[0])
    left, right = grow(cache, stem, (3, 4), 1), grow(cache, stem, (5, 6), 2)
    for path in (left, right):
        cache.drop(path)
    assert [cache.num_newly_guarded(node) for node in (stem[0], left[1])] == [1, 2]
    for node in (left[1], right[1], stem[0]):
        cache.pin(node)
        assert cache.check() == []
    assert [node.num_guards for node in (stem[0], left[1], right[1])] == [3, 1, 1]
    assert (cache.num_guarded, cache.num_guarded_idle, cache.num_cached) == (3, 3, 0)
    assert cache.evict(9) == [] and cache.evict_below(stem[0]) == []
    assert cache.unpin(stem[0]) == 0  # the branches still guard it
    assert cache.unpin(left[1]) == 1
    assert cache.evict(9) == [1]
    assert cache.unpin(right[1]) == 2  # its ancestor goes with it
    assert cache.evict(9) == [2, 0] and cache.check() == []


def test_blocks_that_are_guarded_while_held_are_counted_when_their_holder_drops_them():
    cache = RadixCache()
    path = grow(cache, grow(cache, [], (1, 2), 0), (3, 4), 1)
    cache.pin(path[0])
    assert (cache.num_guarded, cache.num_guarded_idle, cache.num_cached) == (1, 0, 0)
    cache.drop(path)
    assert (cache.num_guarded, cache.num_guarded_idle, cache.num_cached) == (1, 1, 1)
    cache.hold(path[0])
    assert cache.num_guarded_idle == 0 and cache.unpin(path[0]) == 0
    cache.drop(path[:1])
    assert (cache.num_guarded, cache.num_guarded_idle, cache.num_cached) == (0, 0, 2) and cache.check() == []


def test_a_block_that_was_touched_while_guarded_is_evicted_after_those_used_before():
    cache = RadixCache()
    first, second = grow(cache, [], (1, 2), 0), grow(cache, [], (3, 4), 1)
    for path in (first, second):
        cache.drop(path)
    cache.pin(first[0])
    cache.touch(first[0])
    cache.unpin(first[0])
    assert cache.evict(2) == [1, 0]


def test_what_is_below_a_block_comes_parents_first_and_is_evicted_children_first():
    cache = RadixCache()
    stem = grow(cache, [], (1, 2), 0)
    cache.hold(stem[0])
    cache.hold(stem[0])
    paths = [grow(cache, grow(cache, stem, (3, 4), 1), (5, 6), 2), grow(cache, stem, (7, 8), 3)]
    for path in paths:
        cache.drop(path)
    below = [node.block for node in cache.below(stem[0])]
    assert sorted(below) == [1, 2, 3] and below.index(1) < below.index(2)
    gone = cache.evict_below(stem[0])
    assert sorted(gone) == [1, 2, 3] and gone.index(2) < gone.index(1)
    assert stem[0].num_holders == 1 and len(cache) == 1 and cache.check() == []


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
    path[1].num_guards = 3
    path[0].children = {}
    wrong = " ".join(cache.check())
    assert "held but its parent is not" in wrong
    assert "counts 3 guards, has 0" in wrong
    assert "does not know it" in wrong
    assert "(1, 1, 0) found, (0, 0, 0) counted" in wrong
