"""A key-value store of several processes whose calls keep to their deadlines.

Every call to a `TCPStore` blocks as long as the process that hosts it is stopped. Here the calls run in a thread of
their own, and the caller stops waiting at its deadline. Such a thread ends when its connection does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TypeVar

from ..deadline import Deadline
from .sealed_store import Keys

T = TypeVar("T")
Stop = Callable[[], str | None]  # called while waiting; returns None, or the reason to stop

_POLL_S = (0.0002, 0.005)  # first and longest pause between two checks of a store
_POLL_SHARE = 0.05  # longest pause as a share of the time waited so far


class Interrupted(RuntimeError):
    """The wait for a key ended without it, because the deadline passed or `stop` returned a reason."""


class SharedKeys:
    """A key-value store of all ranks whose calls end at their deadline even where torch's would not."""

    def __init__(self, store: Keys) -> None:
        self._store: Keys | None = store
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[Keys], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._submitting = threading.Lock()  # a job never comes behind the end of the thread

    def put(self, key: str, value: str | bytes, deadline: Deadline) -> None:
        """Set a key. This and every other call raises RuntimeError where the host is gone, or silent until the
        deadline."""
        self._call(lambda store: store.set(key, value), deadline)  # type: ignore[arg-type]  # torch's take bytes too

    def has(self, keys: str | Sequence[str], deadline: Deadline) -> bool:
        """Return whether all keys are there."""
        wanted = [keys] if isinstance(keys, str) else list(keys)
        return self._call(lambda store: store.check(wanted), deadline)

    def get(self, key: str, deadline: Deadline, stop: Stop = lambda: None) -> str:
        """Wait for a key and return its value. `stop` is called between two checks and may end the wait with a
        reason."""
        return self.get_bytes(key, deadline, stop).decode()

    def get_bytes(self, key: str, deadline: Deadline, stop: Stop = lambda: None) -> bytes:
        """Wait for a key and return its value, which need not be text."""
        self.wait(key, deadline, stop)
        return self._call(lambda store: store.get(key), deadline)

    def wait(self, keys: str | Sequence[str], deadline: Deadline, stop: Stop = lambda: None) -> None:
        """Wait until all keys are there."""
        # Polled: the store's own wait cannot be ended, and logs a stack trace when it times out.
        idle, started = threading.Event(), time.monotonic()
        while not self.has(keys, deadline):
            if reason := stop():
                raise Interrupted(reason)
            if deadline.has_passed:
                raise Interrupted(f"waited {deadline.timeout_s:g} s for it")
            pause = min(max(_POLL_S[0], _POLL_SHARE * (time.monotonic() - started)), _POLL_S[1])
            idle.wait(min(pause, deadline.left_s))

    def add(self, key: str, amount: int, deadline: Deadline) -> int:
        """Add to a counter and return its new value."""
        return self._call(lambda store: store.add(key, amount), deadline)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys soon, before any later call. Where the host is gone, the keys are gone too."""
        for key in keys:
            self._submit(partial(_delete_key, key=key))

    def close(self) -> None:
        """Release the store. Calls fail from now on."""
        with self._submitting:
            self._store = None
            self._jobs.put(None)

    def _call(self, job: Callable[[Keys], T], deadline: Deadline) -> T:
        try:
            # A call that is answered at once succeeds also after the deadline, so that failures can still be reported.
            return self._submit(job).result(max(deadline.left_s, 0.05))
        except FutureTimeout:
            raise Interrupted("the process that hosts the store does not answer") from None

    def _submit(self, job: Callable[[Keys], T]) -> Future[T]:
        with self._submitting:
            if self._store is None:
                raise Interrupted("the store is closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, args=(self._store,), name="weight-group-store", daemon=True
                )
                self._thread.start()
            future: Future[T] = Future()
            self._jobs.put((future, job))
            return future

    def _work(self, store: Keys) -> None:
        while (task := self._jobs.get()) is not None:
            future, job = task
            try:
                future.set_result(job(store))
            except RuntimeError as error:  # all of torch's store errors; they are raised in the caller
                future.set_exception(error)


def _delete_key(store: Keys, key: str) -> bool:
    return store.delete_key(key)
