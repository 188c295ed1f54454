"""The end of a rank that shares an engine with others: one line that names the lost rank, for people and the
launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ..rollout.errors import DeadlineExceeded, RankFailure
from ..rollout.ranks.channel import RankChannel
from ..rollout.ranks.remote_errors import is_of_a_group
from ..weight_sync.same_host.segment import unlink_own_segments
from ..weight_sync.transaction.peers import PeerFailed
from .one_line import in_the_last_line

_LAST_WORDS_S = 5.0


def outlive_sigterm() -> None:
    """Delay the end by SIGTERM for a few seconds. The launcher sends it as soon as another rank has ended; meanwhile
    this process finds and reports the lost rank and its phase. Main thread only."""

    def end_soon(signum: int, _frame: object) -> None:
        timer = threading.Timer(_LAST_WORDS_S, _end, (128 + signum,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, end_soon)


def loss_of(error: Exception, ranks: RankChannel | None) -> RankFailure | None:
    """Find the rank whose loss caused an error, if any. ranks: of this rank's engine, where several ranks share it.

    Waits a little for signs of life where the error does not name the rank.
    """
    if isinstance(error, RankFailure):
        return error
    is_a_symptom = is_of_a_group(error) or isinstance(error, DeadlineExceeded | PeerFailed)
    cause = ranks.watch.find_culprit() if is_a_symptom and ranks is not None else None
    return cause.error() if cause is not None else None


def leave(error: Exception, rank: int, where: str, *, is_known: bool = False) -> NoReturn:
    """Report the lost rank, or the failure, in one line on stderr and in torchrun's error file, and end this process.

    Nothing is closed, because closing would wait for other ranks; segments of shared memory are unlinked. where: the
    place in the job; is_known: the error's text says everything.
    """
    what = str(error)
    if not is_known and not isinstance(error, RankFailure):
        with suppress(OSError):  # here and below: on a full disk the exit code has to do
            traceback.print_exception(error)
        what = in_the_last_line(error, has_class=True)
    line = f"lockstep: error: rank {rank} stops {where}: {' '.join(what.split())}"
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")  # one write even where stderr has no buffer: other ranks write there too
        sys.stderr.flush()
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    with suppress(OSError):
        sys.stdout.flush()
    _end(1)


def _end(code: int) -> NoReturn:
    """End this process at once, without its segments of shared memory."""
    try:
        unlink_own_segments()
    finally:
        os._exit(code)
