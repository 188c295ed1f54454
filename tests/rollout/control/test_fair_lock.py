"""Tests of the engine's lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.rollout.control.fair_lock import FairLock


def lose(lock: FairLock, to: ThreadPoolExecutor) -> None:
    with lock:
        lock.release()
        for _ in range(2):
            assert to.submit(lock.acquire).result(10)


def test_a_block_that_has_lost_the_lock_leaves_its_holders_count_alone():
    """An interrupt between the release and the acquire of `give_way` ends such a block."""
    lock = FairLock()
    with ThreadPoolExecutor(1) as holder:
        with pytest.raises(RuntimeError, match="the lock is not held by this thread"):
            lose(lock, holder)
        assert not holder.submit(lock.give_way).result(10)  # its outer block relies on the lock
        for _ in range(2):
            holder.submit(lock.release).result(10)
    assert lock.acquire(timeout=10)
    lock.release()
