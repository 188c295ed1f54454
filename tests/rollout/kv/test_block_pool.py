"""Tests of the free list of blocks: its order, and its size in memory."""

from __future__ import annotations

import random
import tracemalloc

from lockstep.rollout.kv.block_pool import BlockPool


def test_blocks_are_taken_in_the_order_of_a_stack_that_began_with_all_of_them():
    chance, pool, stack, taken = random.Random(3), BlockPool(40), list(range(39, -1, -1)), []
    for _ in range(500):
        if taken and chance.random() < 0.5:
            block = taken.pop(chance.randrange(len(taken)))
            pool.give(block)
            stack.append(block)
        else:
            num = chance.randint(0, min(len(stack), 6))
            expected = [stack.pop() for _ in range(num)]
            assert pool.take(num) == expected
            taken += expected
        assert pool.num_free == len(stack) == len(pool.free_ids())
        assert pool.free_ids() == set(stack) and set(pool.free_ids()) == set(stack)
        assert pool.free_ids() & {0, 1, 2, 40} == set(stack) & {0, 1, 2}
    assert bool(BlockPool(0).free_ids()) is False


def test_a_block_that_is_given_twice_is_counted_once_among_the_ids():
    pool = BlockPool(4)
    pool.give(2)
    assert (pool.num_free, len(pool.free_ids()), sorted(pool.free_ids())) == (5, 4, [0, 1, 2, 3])


def test_a_pool_of_many_blocks_takes_no_memory_for_those_that_were_never_taken():
    tracemalloc.start()
    try:
        pool = BlockPool(1 << 30)
        assert pool.take(3) == [0, 1, 2] and pool.num_free == (1 << 30) - 3
        assert next(iter(pool.free_ids())) == 3 and 3 in pool.free_ids()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
