"""The processor time that grammars take, by which those that take too long are found.

The garbage collector runs in whichever thread happens to allocate, and in a trainer's process one collection may take
longer than the slowest grammar. So its time is not counted. A signal's exception that is raised in a callback of the
collector is lost, Ctrl-C's too; so there is one only where grammars are timed.
"""

from __future__ import annotations

import gc
import threading
import time


class _Collections(threading.local):
    """Processor time of the garbage collections that have run in this thread."""

    seconds = 0.0
    began: float | None = None  # None: none runs, or it began before it was listened to


_collections = _Collections()


def thread_time() -> float:
    """Return the processor time of this thread in seconds, without that of the garbage collections in it."""
    if _on_collection not in gc.callbacks:
        gc.callbacks.insert(0, _on_collection)  # the time of other callbacks does not count either
    return time.thread_time() - _collections.seconds


def _on_collection(phase: str, info: dict[str, int]) -> None:
    """Take the time of a collection, called by the collector in the thread where it runs."""
    if phase == "start":
        _collections.began = time.thread_time()
    elif _collections.began is not None:
        _collections.seconds += time.thread_time() - _collections.began
        _collections.began = None
