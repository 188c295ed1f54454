"""The trainer's end of a process that scores with other packages: its start, its time limits and its end."""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 120.0  # the imports of the packages, before the first value
_GRACE_S = 30.0  # after a time limit, within which the process answers or ends by itself


class ScoringProcess:
    """Score completions in another process, one at a time; start it with the first, and again when it has ended.

    Scorers of other packages compute with text that a model wrote: they may run for ever, or take all memory. There
    they have a main thread for their signals, and limits. Any thread may call.
    """

    def __init__(self) -> None:
        """Create it without a process."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._warned: set[str] = set()
        atexit.register(self.close)

    def score(self, kind: str, arguments: tuple[object, ...], limit_s: float) -> float:
        """Return the value that `scoring_worker` computes; 0.0 where it takes more than limit_s, or too much memory.

        Raises ValueError for a row that cannot be scored. An error in the scorer, which a completion may cause, is 0.0
        too, and logged, once for each text of it.
        """
        with self._lock:
            channel, wait_s = self._started(limit_s)
            try:
                channel.send((kind, arguments, limit_s))
                answer = json.loads(channel.recv_bytes()) if channel.poll(wait_s) else {}
            except (EOFError, OSError):  # it has ended itself: a limit that no handler could keep
                answer = {}
            if "value" not in answer:
                self.close()
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if (error := answer.get("error")) and error not in self._warned:
            self._warned.add(error)
            logger.warning("a completion is scored 0.0, because its scorer failed: %s", error)
        return float(answer.get("value", 0.0))

    def close(self) -> None:
        """End the process, at once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _started(self, limit_s: float) -> tuple[Connection, float]:
        """Return the channel, and how long to wait for the next answer."""
        if self._process is not None and self._process.poll() is None and self._channel is not None:
            return self._channel, limit_s + _GRACE_S
        self.close()
        ours, theirs = Pipe()
        with theirs:
            # -P: the folder in which the job was started has no say in what the packages import.
            command = [sys.executable, "-P", "-m", f"{__package__}.scoring_worker", str(theirs.fileno())]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
            )  # fmt: skip
        self._channel = ours
        return ours, limit_s + _START_S
