"""The trainer's end of a process that scores with other packages: its start, its time limits and its end."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

logger = logging.getLogger(__name__)

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 120.0  # the imports of packages, before their first value
_GRACE_S = 30.0  # after a time limit, within which the process answers or ends by itself
# Ends of a process that a completion may bring about: a C function that gets no memory, or calls itself too deeply.
_BY_COMPLETIONS = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)
LOADED = {"loaded": True}  # the first answer to each request; what ends the process later, the completion may have done


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

        An error in the scorer, which a completion may cause, is 0.0 too, and logged, once for each text of it. Raises
        ValueError for a row that cannot be scored, and for a process that ends without a completion's doing.
        """
        with self._lock:
            channel = self._started()
            try:
                channel.send((kind, arguments, limit_s))
                answer = self._answer(kind, channel, limit_s)
            except (EOFError, OSError):
                answer = self._ended(kind, is_loaded=False)
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

    def _answer(self, kind: str, channel: Connection, limit_s: float) -> Mapping[str, Any]:
        """Wait for the answer, first until the process has loaded its packages; {}: it was ended after the limit."""
        is_loaded = False
        while channel.poll(limit_s + _GRACE_S if is_loaded else _START_S):
            try:
                answer: Mapping[str, Any] = json.loads(channel.recv_bytes())
            except (EOFError, OSError):
                return self._ended(kind, is_loaded)
            if answer != LOADED:
                return answer
            is_loaded = True
        self.close()
        if not is_loaded:
            raise ValueError(f"{kind}: the process that scores has not loaded its packages in {_START_S:g} s")
        return {}

    def _ended(self, kind: str, is_loaded: bool) -> Mapping[str, Any]:
        """Return the answer where a completion has ended the process. Raises ValueError where something else has, and
        every completion would have 0.0."""
        assert self._process is not None
        code = self._process.wait()  # it has closed its channel
        self.close()
        if is_loaded and code == -signal.SIGPROF:
            return {}
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if is_loaded and code in _BY_COMPLETIONS:
            return {"error": f"{kind}: the process that scores has ended by {how}"}
        raise ValueError(
            f"{kind}: the process that scores has ended by itself ({how}), "
            f"{'in the middle of a completion' if is_loaded else 'before it could score'}: what it said is above"
        )

    def _started(self) -> Connection:
        """Return the channel to the process, which is started where there is none."""
        if self._process is not None and self._process.poll() is None and self._channel is not None:
            return self._channel
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
        return ours
