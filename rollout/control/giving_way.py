"""Work of a thread that computes for long, in slices: who runs it says what goes first between two of them.

The interpreter's lock goes round in turns. An event loop gives it up with each system call, and a thread that computes
would delay each of them by the time of a turn, several threads by several turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SLICE_S = 0.001
_turn = threading.local()


@contextmanager
def giving_way(wait: Callable[[], None]) -> Iterator[None]:
    """Let `give_way` call `wait` after each slice of what this thread computes in the block."""
    _turn.wait, _turn.began = wait, time.monotonic()
    try:
        yield
    finally:
        _turn.wait = None


def give_way() -> None:
    """Let others go first if this thread has computed for a while. Called often, and never with a lock; does nothing
    outside `giving_way`."""
    wait: Callable[[], None] | None = getattr(_turn, "wait", None)
    if wait is not None and time.monotonic() - _turn.began >= _SLICE_S:
        wait()
        _turn.began = time.monotonic()
