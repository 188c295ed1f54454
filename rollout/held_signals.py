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

_USERS: list[HeldSignals] = []  # that have taken over; one that was interrupted there may stay, and lets nothing wait
_PENDING: list[_Place] = []  # whose signals have come and wait; one place of each number
_RUNNING: list[_Place] = []  # whose handlers are being called, the innermost last


class _Place:
    """A handler's stand-in, which calls it at once or, while the main thread may not be interrupted, later.

    A place's handler never changes. A program's handler that was set meanwhile may call the place that it found, as
    handlers do that hand a signal on: the next place stands for that handler, and so on down to the first one.
    """

    __slots__ = ("handler", "number")

    def __init__(self, number: int, handler: Handler) -> None:
        self.number, self.handler = number, handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _waits() and all(place.number != number for place in _PENDING):
            _PENDING.append(self)
        else:
            self.run(frame)

    def run(self, frame: FrameType | None) -> None:
        """Call the handler. Raises what it raises."""
        try:
            _RUNNING.append(self)
            self.handler(self.number, frame)
        finally:
            _RUNNING.pop()


class HeldSignals:
    """Take the place of the handlers of signals, and call them at once or, while `waits()`, later.

    The second signal of one number that comes while the first waits is handled at once: a program that hangs can be
    interrupted. A signal waits for every object of this class that asks for it, in whatever order they begin and end.
    Every method may be called in any thread, and does nothing but in the main one.
    """

    def __init__(self, waits: Callable[[], bool]) -> None:
        """Keep the condition. waits: whether a handler may not be called now; called in the main thread."""
        self.waits = waits
        self._places: dict[int, _Place] = {}  # the newest of each number, which stands for the same handler again

    def take_over(self) -> None:
        """Take the place of the present handlers. A handler that raises meanwhile has left it as it was, or in part,
        which changes nothing: signals that may not wait are passed on."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self not in _USERS:
            _USERS.append(self)
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler) and type(handler) is not _Place:
                place = self._places.get(number)
                if place is None or place.handler is not handler:
                    place = self._places[number] = _Place(number, handler)
                _signal.signal(number, place)

    def give_back(self) -> None:
        """Give the handlers their place again, but where another has come since, and call those whose signals have
        come. Does nothing while this object lets signals wait, and leaves the rest to others that do. Raises what the
        handlers raise."""
        if threading.get_ident() != threading.main_thread().ident or self.waits():
            return
        if not _RUNNING:  # a handler may use the lock that the code under it is about to take
            if self in _USERS:
                _USERS.remove(self)
            if _waits():
                return
            for number in _NUMBERS:
                place = _signal.getsignal(number)
                if type(place) is _Place:
                    _signal.signal(number, place.handler)
        self.call()

    def call(self) -> None:
        """Call the handlers whose signals have come, unless others than this object let them wait. Raises what they
        raise; those that are left are called next time."""
        if _PENDING and threading.get_ident() == threading.main_thread().ident and not _waits(but_for=self):
            while _PENDING:
                _PENDING.pop(0).run(inspect.currentframe())


def _waits(but_for: HeldSignals | None = None) -> bool:
    for user in _USERS:  # noqa: SIM110 -- at each step, for which a generator is slow
        if user is not but_for and user.waits():
            return True
    return False


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
