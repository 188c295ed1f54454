"""The process that started an engine's process: its end is this one's, and what it leaves is this one's to remove."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_SIGTERM_S = 5.0  # from a SIGTERM to the end


class Starter:
    """The process that started this one, to be waited for though it is no child."""

    def __init__(self, pid: int | None) -> None:
        """Hold the process of this number; None: there is none to wait for."""
        self._handle: int | None = None
        with suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(pid) if pid is not None else None

    def wait(self) -> None:
        """Wait for its end."""
        if self._handle is not None:
            select.select([self._handle], [], [])


def end_with_the_starter() -> None:
    """Let this process end by the end of its standard input, after the process that started it. Main thread only.

    A launcher sends SIGTERM to both at once, which therefore ends this one only after a few seconds. Where it is
    stopped, the kernel continues it as soon as the thread that started it ends.
    """

    signal.signal(signal.SIGTERM, lambda signum, _frame: end_within(_SIGTERM_S, 128 + signum))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def end_within(seconds: float, code: int) -> None:
    """End this process after so many seconds, unless it has ended before."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
