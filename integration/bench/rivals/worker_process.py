"""A rival's process: a worker script in an environment of its own, driven over a pipe and stopped while it is idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SUPPRESSED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # they refer to our environment
_END_SECONDS = 20.0  # time for a worker to end by itself


class WorkerProcess:
    """A worker that is ready. It answers one line of JSON for each line.

    Between two questions its processes are stopped (SIGSTOP), so that they take no time from the measured engine.
    """

    def __init__(
        self, name: str, python: str, option: str, script: Path, settings: Mapping[str, object],
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Start the worker and wait until it says that it is ready, with its version.

        name: the rival's; option: that which named `python`, for errors; environment: variables beside ours.
        Raises ValueError, with the end of its log where it has one, when it does not start.
        """
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `close`
        try:
            self._process = subprocess.Popen(
                [python, str(script), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1,
                env=_own_environment() | dict(environment), cwd=tempfile.gettempdir(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise ValueError(f"{option}: {error}") from error
        try:
            self.version = str(self._answer()["ready"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        """Return the worker's answer. Raises ValueError with the end of the log when the worker ends."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: there is no answer, and its log says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the worker and all processes that it started."""
        self._signal(signal.SIGCONT)
        self._await_end()
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _await_end(self) -> None:
        """Tell the worker that nothing follows, and give it some time to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._await_end()  # it closes its output before it writes why it ends
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        print(log, file=sys.stderr, flush=True)
        raise ValueError(f"{self._name}'s worker ended: {' | '.join(log.splitlines()[-3:]) or 'it wrote nothing'}")


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that stopped processes do not remain after us. For the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _own_environment() -> dict[str, str]:
    """Return this process's environment without what refers to our packages. Nothing is looked up in a model hub."""
    return {name: value for name, value in os.environ.items() if name not in _SUPPRESSED} | {"HF_HUB_OFFLINE": "1"}
