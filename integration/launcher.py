"""The end of a rank with its launcher: a rank whose launcher was killed must not go on without supervision."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Let the kernel kill this process as soon as torchrun ends, however it ends. Does nothing without torchrun.

    The kernel looks at the thread that started this process: torchrun starts its ranks from its main thread, which
    lives as long as torchrun. Other launchers make no such promise. Processes that this one starts are not concerned;
    they end with a pipe from it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != launcher:  # it ended before the kernel knew
        sys.stderr.write("lockstep: error: the launcher of this rank has ended\n")
        os._exit(1)
