"""The lock of a session's calls: it is free again however its holder ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.tests.support.callers import soon, submit
from lockstep.weight_sync.errors import SessionBusy
from lockstep.weight_sync.transaction.call_lock import CallLock


class Interrupted:
    """A lock of which one call is interrupted right after its effect, or right before."""

    def __init__(self, lock, call: str, is_before: bool) -> None:
        self._lock, self._call, self._is_before = lock, call, is_before

    def acquire(self, **options: object) -> bool:
        return self._run("acquire", lambda: self._lock.acquire(**options))

    def release(self) -> None:
        self._run("release", self._lock.release)

    def _run(self, call: str, run: Callable[[], object]):
        is_hit, self._call = call == self._call, "" if call == self._call else self._call
        if is_hit and self._is_before:
            raise KeyboardInterrupt
        value = run()
        if is_hit:
            raise KeyboardInterrupt
        return value


def is_free(lock: CallLock) -> bool:
    """Return whether another thread gets the lock."""

    def take() -> bool:
        with lock.held("another call", 0.0, lambda error: None):
            return True

    try:
        return soon(submit(take))
    except SessionBusy:
        return False


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("call", ["acquire", "release"])
@pytest.mark.parametrize("at_last", [False, True])
def test_an_interrupt_beside_the_lock_leaves_it_free(call, is_before, at_last):
    lock = CallLock(1.0)
    lock._lock = Interrupted(lock._lock, call, is_before)
    with pytest.raises(KeyboardInterrupt), lock.held_at_last("a") if at_last else lock.held("a", None, lambda _: None):
        pass
    assert is_free(lock)


def test_a_call_inside_of_another_one_of_its_thread_is_refused_at_once():
    lock, told = CallLock(1e6), []
    with lock.held("outer", None, told.append):
        with pytest.raises(SessionBusy, match=r"inner: waited 0 s for .*\(outer\)"):
            lock.held("inner", None, told.append).__enter__()
        assert not is_free(lock) and len(told) == 1
    assert is_free(lock)
