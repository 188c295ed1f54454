"""Signals of the main thread that wait while it holds a lock.

Python calls a signal's handler in the main thread between two of its instructions, wherever it is, and the handler may
raise, as that of Ctrl-C does. In the middle of a step's commit half of the sequences would have their tokens; right
behind an acquired lock nothing would release it. So a handler is called when the lock is free again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the functions of signal convert handlers to enums, which is slow
import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# Those whose handlers programs of Python set, and that may raise. Of each only a handler in Python waits.
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class HeldSignals:
    """Take the place of the handlers of signals, and call them at once or, while `waits()`, later.

    The second signal of one number that comes while the first waits is handled at once: a program that hangs can be
    interrupted. Every method may be called in any thread, and does nothing but in the main one.
    """

    def __init__(self, waits: Callable[[], bool]) -> None:
        """Keep the condition. waits: whether a handler may not be called now; called in the main thread."""
        self._waits = waits
        self._own: Handler = self._on_signal
        self._handlers: dict[int, Handler] = {}  # whose place is taken
        self._pending: list[int] = []

    def take_over(self) -> None:
        """Take the place of the present handlers. A handler that raises meanwhile has left it as it was, or in part,
        which changes nothing: signals that may not wait are passed on."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler is not self._own:
                self._handlers[number] = handler
                _signal.signal(number, self._own)

    def give_back(self) -> None:
        """Give the handlers their place again, but where another has come since, and call those whose signals have
        come. Raises what they raise."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is self._own:
                _signal.signal(number, handler)
        self.call()

    def call(self) -> None:
        """Call the handlers whose signals have come. Raises what they raise; those that are left are called next
        time."""
        if self._pending and threading.get_ident() == threading.main_thread().ident:
            while self._pending:
                number = self._pending.pop(0)
                self._handlers[number](number, inspect.currentframe())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._waits() and number not in self._pending:
            self._pending.append(number)
        else:
            self._handlers[number](number, frame)


class Uninterrupted:
    """A context in which signals of the main thread wait, for what must be done as a whole without a lock. Re-entrant;
    it may raise, where it ends, what their handlers raise."""

    def __init__(self) -> None:
        self._depth = 0  # of the main thread
        self._signals = HeldSignals(lambda: self._depth > 0)

    def __enter__(self) -> None:
        self._signals.take_over()
        if threading.get_ident() == threading.main_thread().ident:
            self._depth += 1  # no call follows, behind which a handler could raise

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._depth -= 1
            if not self._depth:
                self._signals.give_back()
