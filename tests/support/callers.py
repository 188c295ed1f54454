"""Threads that call an engine or a service, and waiting for what they bring about: never for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

PATIENCE = 60.0  # seconds that nothing here comes near


def submit(call: Callable, *args: object, **options: object) -> Future:
    """Call it on a thread of its own, which outlives no failed test; its answer is awaited with `soon`."""
    future: Future = Future()

    def answer() -> None:
        try:
            future.set_result(call(*args, **options))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the answer gets it
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return future


def soon(future: Future) -> object:
    return future.result(timeout=PATIENCE)


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE, what: str = "") -> None:
    """Return once `condition()` is true, looking again and again; fails after `timeout_s`.

    For what nobody announces; wait for an event or an answer where there is one.
    """
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"it never came about in {timeout_s:g} s: {what or condition}"
        pause.wait(0.005)
