"""Threads that call an engine or a service, and waits with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.rollout.engine import Engine

PATIENCE = 60.0  # seconds, far longer than any wait here takes


def submit(call: Callable, *args: object, **options: object) -> Future:
    """Call a function on a daemon thread of its own. `soon` waits for its answer."""
    future: Future = Future()

    def answer() -> None:
        try:
            future.set_result(call(*args, **options))
        except BaseException as error:  # noqa: BLE001 - the future raises it for the caller
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return future


def soon(future: Future) -> object:
    return future.result(timeout=PATIENCE)


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE, what: str = "") -> None:
    """Poll `condition()` until it is true; fails after `timeout_s`.

    For changes without a signal. Wait for an event or an answer if there is one.
    """
    end, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"it never came about in {timeout_s:g} s: {what or condition}"
        pause.wait(0.005)


@contextmanager
def held_between_steps(engine: Engine) -> Iterator[None]:
    """Keep the engine's loop between two steps, as an update does, until the end of the block."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(PATIENCE)

    holder = submit(engine.between_steps, "hold", hold)
    try:
        assert held.wait(PATIENCE)
        yield
    finally:
        release.set()
    soon(holder)


@contextmanager
def held_steps(engine: Engine) -> Iterator[threading.Semaphore]:
    """Let an engine run a step for each release of the semaphore that is yielded, and any number after the block, so
    that a request cannot end before what a test does meanwhile."""
    allowed, is_over, gate = threading.Semaphore(0), threading.Event(), engine.driver._gate
    step = gate.step

    def held(most: int = 1) -> None:
        while not is_over.is_set():
            if allowed.acquire(timeout=0.01):
                most = 1
                break
        step(most)

    gate.step = held
    try:
        yield allowed
    finally:
        is_over.set()
        gate.step = step


def while_it_steps(allowed: threading.Semaphore, call: Callable, *args: object, **options: object) -> object:
    """Call a function while an engine runs a step now and then, see `held_steps`; return what it returns."""
    called = submit(call, *args, **options)
    wait_until(lambda: called.done() or allowed.release())
    return soon(called)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also where its parent has not asked for that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
