"""The engine's end of a process that compiles grammars: its start, its deadline, and the reason of its death."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from ..errors import EngineStopped, GrammarsUnavailable
from .compiler import Constraint
from .frames import CompilerAnswer, CompilerSetup, read_frame, write_frame

# A program, not `-m`: the child finds the package where this process found it.
_PROGRAM = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "runpy.run_module(sys.argv.pop(), run_name='__main__')"
)
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_START_S = 120.0  # for the start of a process
_WALL_FACTOR = 20  # a process that gets no processor time for so long hangs
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGXCPU)
_OVERFLOW = (signal.SIGSEGV, signal.SIGBUS)


class CompilerProcess:
    """Compile grammars in another process, one at a time; start it with the first, and again when it has ended.

    Used by one thread. `close` may be called by any.
    """

    def __init__(self, setup: Callable[[], CompilerSetup]) -> None:
        """Create it without a process. setup: called with each start."""
        self._make_setup = setup
        self._setup: CompilerSetup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # the text that the process prints
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process, None: there is none now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def compile(self, constraint: Constraint) -> CompilerAnswer:
        """Return the compiled grammar, or the error in it.

        Raises GrammarsUnavailable if the process cannot be started, EngineStopped after `close`.
        """
        process, setup = self._started()
        try:
            write_frame(process.stdin, json.dumps([constraint.kind, constraint.text]).encode())  # type: ignore[arg-type]
            answer = self._answer(process, setup.timeout_s * _WALL_FACTOR)
        except (BrokenPipeError, TimeoutError):
            answer = None
        if answer is None:
            return CompilerAnswer(f"{constraint.kind}: {self._why_dead(setup)}")
        if answer.is_last:
            self._end()
        if answer.error == "memory":
            return CompilerAnswer(f"{constraint.kind}: {_out_of_memory(setup)}")
        return answer

    def close(self) -> None:
        """End the process, at once; a `compile` that runs raises EngineStopped."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()

    def _started(self) -> tuple[subprocess.Popen[bytes], CompilerSetup]:
        if self._process is not None and self._process.poll() is None:
            assert self._setup is not None
            return self._process, self._setup
        self._end()
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), f"{__package__}.worker", json.dumps(sys.path)]
        try:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env={**os.environ, **_ENVIRONMENT},
            )  # fmt: skip
        except OSError as error:
            raise GrammarsUnavailable(f"the process that compiles grammars could not be started: {error}") from error
        try:
            setup = self._setup = self._make_setup()  # while the process starts
        except BaseException:  # without a setup the process is of no use to the next grammar
            self._end()
            raise
        try:
            write_frame(process.stdin, setup.packed())  # type: ignore[arg-type]
            greeting = self._answer(process, _START_S)
        except (BrokenPipeError, TimeoutError):
            greeting = None
        if greeting is None:
            self._end()
            if self._is_closed:
                raise EngineStopped("the engine is closed")
            raise GrammarsUnavailable(
                f"the process that compiles grammars did not start: {self._printed() or 'no reason given'}"
            )
        return process, setup

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> CompilerAnswer | None:
        """Read an answer; None if the process has ended. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        assert process.stdout is not None
        fd = process.stdout.fileno()

        def read(num_bytes: int) -> bytes:
            poll = select.poll()  # `select` does not take descriptors above 1023
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1e3):
                raise TimeoutError
            return os.read(fd, num_bytes)

        frame = read_frame(read)
        return None if frame is None else CompilerAnswer.unpacked(frame)

    def _why_dead(self, setup: CompilerSetup) -> str:
        """End the process, and say which limit the grammar met."""
        assert self._process is not None
        try:
            status = self._process.wait(1.0)  # its output has ended, so it does
        except subprocess.TimeoutExpired:
            status = -signal.SIGPROF  # it hangs
        self._end()
        if self._is_closed:
            raise EngineStopped("the engine is closed")
        if -status in _OUT_OF_TIME:
            return f"takes more than {setup.timeout_s:g} s to compile (grammar_timeout_s)"
        if -status in _OVERFLOW:
            return "nested too deeply: the compiler's stack overflowed"
        if -status == signal.SIGKILL or "bad_alloc" in self._printed():
            return _out_of_memory(setup)
        return f"cannot be compiled: the compiler ended with status {status}"

    def _printed(self) -> str:
        """Return the last line that the process has printed."""
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - 2000, 0))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.seek(0)
        self._errors.truncate()
        return lines[-1] if lines else ""

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # a frame that was not taken
                    pipe.close()


def _out_of_memory(setup: CompilerSetup) -> str:
    return f"takes more than {setup.num_bytes >> 20} MiB to compile (grammar_memory_mb)"
