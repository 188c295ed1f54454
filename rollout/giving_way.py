"""Work of threads that compute for long: one of them computes at a time, in slices, and others go first in between.

The interpreter's lock goes round in turns. An event loop gives it up with each system call, and a thread that computes
would delay each of them by the time of a turn, several threads by several turns. They would gain nothing by it: Python
code of several threads is no faster than that of one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SLICE_S = 0.001
_mine = threading.local()


@contextmanager
def giving_way(wait: Callable[[], None], token: threading.Lock) -> Iterator[None]:
    """Hold the token in the block, and let `give_way` call `wait` without it after each slice of what is computed.

    token: of all threads that compute for the same process. What waits for something else in the block does so in
    `others_compute`, else all would wait for it. Blocks of one thread are not nested.
    """
    with token:
        _mine.wait, _mine.token, _mine.began = wait, token, time.monotonic()
        try:
            yield
        finally:
            _mine.wait = _mine.token = None


def give_way() -> None:
    """Let others go first if this thread has computed for a while. Called often, and never with a lock; does nothing
    outside `giving_way`."""
    wait: Callable[[], None] | None = getattr(_mine, "wait", None)
    if wait is not None and time.monotonic() - _mine.began >= _SLICE_S:
        with others_compute():
            wait()


@contextmanager
def others_compute() -> Iterator[None]:
    """Give the token to others in the block, which waits or computes without the interpreter's lock. Never called with
    a lock; does nothing outside `giving_way`."""
    token: threading.Lock | None = getattr(_mine, "token", None)
    if token is None:
        yield
        return
    token.release()
    try:
        yield
    finally:
        token.acquire()
        _mine.began = time.monotonic()
