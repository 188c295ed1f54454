"""An engine in a process of its own, controlled over a Unix socket with one JSON object a line.

    python -m lockstep.integration.push.remote_engine --model FOLDER --socket PATH [setting=value ...]

It ends when its standard input does, so it always ends with the process that started it, also where it is stopped. A
request is {"verb", "timeout_s", "arguments"}, the answer {"result"} or {"error": {"kind", "message"}}; each uses its
own connection.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ...kernels.machine.running_time import running_time
from ...rollout.ahead.group import Spans
from ...rollout.ahead.rollouts import AheadCounts, RolloutsAhead
from ...rollout.completion import Completion
from ...rollout.replica.calls import completions_bytes, completions_from
from ...weight_sync.same_host.segment import remove_stale_segments
from ...weight_sync.target import TargetError
from .starter import Starter, end_with_the_starter, end_within

logger = logging.getLogger(__name__)

_READY = "ready"
_SEGMENTS = Path("/dev/shm")
_CLOSE = "close"  # on standard input: its end alone may be that of a process that was killed
_CLOSE_S = 10.0  # from the end of standard input to that of the process
_RETRY_S = 0.5  # until a connection that could not be accepted is accepted again
_LOOK_S = 5.0  # between looks at the process, while its answer is waited for
_GRACE_S = 2.0  # beyond a verb's own deadline, because the engine's own error is more precise


class ProcessLost(TargetError):
    """The error of a call to an engine whose process has ended or is stopped. Its text is one line."""


class RemoteTarget:
    """The client of an engine process; implements `weight_sync.target.Target`."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self._path = path
        self._name = name or path.name

    @property
    def name(self) -> str:
        return self._name

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Call a verb; see `Target.call`."""
        request = json.dumps({"verb": verb, "timeout_s": timeout_s, "arguments": arguments}) + "\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(timeout_s + _GRACE_S)
                connection.connect(str(self._path))
                connection.sendall(request.encode())
                self._await(connection, timeout_s + _GRACE_S)
                with connection.makefile("r", encoding="utf-8") as lines:
                    line = lines.readline()
        except OSError as error:
            raise TargetError(self._name, verb, f"no answer within {timeout_s:g} s: {error}") from error
        if not line.endswith("\n"):
            raise TargetError(self._name, verb, "it closed the connection without an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise TargetError(self._name, verb, answer["error"]["message"], answer["error"]["kind"])
        return answer["result"]

    def close(self) -> None:
        """Do nothing: each call has a connection of its own."""

    def _await(self, connection: socket.socket, timeout_s: float) -> None:
        """Wait for the first byte of an answer. Raises TimeoutError, at once where the process stays stopped."""
        readable, deadline, num_stopped = select.poll(), running_time() + timeout_s, 0
        readable.register(connection, select.POLLIN)
        while not readable.poll(1000 * min(_LOOK_S, max(deadline - running_time(), 0.0))):
            num_stopped = num_stopped + 1 if self._is_stopped() else 0
            if num_stopped == 2 or running_time() >= deadline:  # once: the whole job may have been stopped until now
                raise TimeoutError("timed out")

    def _is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; False where that is not known."""
        return False


class RemoteEngine(RemoteTarget):
    """An engine process that this process starts and ends."""

    def __init__(
        self,
        model: str | Path,
        folder: Path,
        name: str,
        settings: Mapping[str, object],
        options: Sequence[str] = (),
        *,
        timeout_s: float = 120.0,
    ) -> None:
        """Start the process on a model folder and wait until it answers. folder: of its socket and its log; options:
        of its command line.

        Raises TargetError, with the end of its log, when it is not ready within `timeout_s`, and ProcessLost when it
        was killed before.
        """
        super().__init__(folder / f"{name}.sock", name)
        self._owner = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{name}.log"
        command = [sys.executable, "-m", "lockstep.integration.push.remote_engine", "--model", str(model)]
        command += ["--socket", str(folder / f"{name}.sock"), "--starter", str(self._owner), *options]
        command += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment()
            )
        self._wait_until_ready(timeout_s)

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Call a verb; see `Target.call`. Raises ProcessLost, a TargetError, if the process has ended or is stopped."""
        try:
            return super().call(verb, timeout_s=timeout_s, **arguments)
        except TargetError as error:
            lost = None if error.kind else self.loss()
            if lost is None:
                raise
            raise ProcessLost(self.name, verb, lost) from error

    def loss(self) -> str | None:
        """Say how the process was lost, by its end or because it is stopped; None while it runs. Waits a moment for its
        end, which comes after that of its connections."""
        try:
            code = self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return f"its process {self.process.pid} is stopped, as by SIGSTOP" if self._is_stopped() else None
        if code == -signal.SIGKILL:
            return f"its process {self.process.pid} was killed by SIGKILL, as the kernel does where memory runs out"
        return f"its process {self.process.pid} has ended with " + (
            f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        )

    def generate(
        self, prompts: Sequence[object], sampling_params: Sequence[Mapping[str, object]], timeout_s: float
    ) -> list[Completion]:
        """Generate completions, in the order of the prompts."""
        return _completions(
            self.call("generate", timeout_s=timeout_s, prompts=prompts, sampling_params=sampling_params)
        )

    def begin(
        self,
        key: int,
        prompts: Sequence[object],
        params: Sequence[Mapping[str, object]],
        schedule: Sequence[Sequence[Spans]] | None,
        timeout_s: float,
    ) -> None:
        """Queue a batch, see `RolloutsAhead.begin`."""
        self.call("begin", timeout_s=timeout_s, key=key, prompts=prompts, params=params, schedule=schedule)

    def settle(self, timeout_s: float) -> None:
        """Wait for the present weights' share of a schedule, see `RolloutsAhead.settle`."""
        self.call("settle", timeout_s=timeout_s)

    def finish_groups(self, key: int, first: int, timeout_s: float) -> list[Completion]:
        """Return the samples of a prompt of a batch, and of those behind it that are there, see
        `RolloutsAhead.finish_groups`."""
        return _completions(self.call("finish_groups", timeout_s=timeout_s, key=key, first=first))

    def counts(self, timeout_s: float) -> AheadCounts:
        """Return the counts of its batches."""
        return AheadCounts(**self.call("ahead_counts", timeout_s=timeout_s))  # type: ignore[arg-type]

    def close(self) -> None:
        """End the process by closing its standard input, also where it is stopped; kill it where that does not help
        within 10 s. Does nothing in a fork of the process that started it."""
        if os.getpid() != self._owner:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.process.stdin.closed:
            with suppress(BrokenPipeError):  # it has ended
                self.process.stdin.write(_CLOSE)
                self.process.stdin.close()
        self.process.send_signal(signal.SIGCONT)  # a stopped process would not notice
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _is_stopped(self) -> bool:
        """See `RemoteTarget._is_stopped`."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        return self.process.poll() is None and stat.read_text().rpartition(")")[2].split()[0] == "T"

    def _wait_until_ready(self, timeout_s: float) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(timeout_s)
        if not lines or lines[0].strip() != _READY:
            why = f"not ready within {timeout_s:g} s" if not lines else "it ended before it was ready"
            lost, code = self.loss(), self.process.returncode
            self.process.kill()
            self.process.communicate()
            if lost is not None and (code is None or code < 0):  # its log does not know
                raise ProcessLost(self.name, "start", f"{why}: {lost}")
            tail = "".join(self._log.read_text().splitlines(keepends=True)[-40:])
            raise TargetError(self.name, "start", f"{why}; its log ends:\n{tail}")


def _completions(answer: Mapping[str, object]) -> list[Completion]:
    return completions_from(cast(str, answer["completions"]).encode())


def _environment() -> dict[str, str]:
    """Return our environment without torchrun's variables for this rank: the engine is no rank of the job."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith("TORCHELASTIC_")}


class VerbServer:
    """Answer verbs on a Unix socket, each connection in a thread of its own."""

    def __init__(self, path: Path, run: Callable[[str, float, dict[str, object]], dict[str, object]]) -> None:
        """Open the socket. run(verb, timeout_s, arguments) returns the report; its exceptions are answered as
        errors."""
        self._run, self._path, self._owner = run, path, os.getpid()
        self._is_closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)  # only this user may connect
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._accept, name="lockstep-verbs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take no more connections. In a forked child the parent's socket stays as it is."""
        if os.getpid() != self._owner:
            return
        self._is_closed.set()  # before the shutdown, whose error `accept` raises
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed.is_set():
                    return
                logger.warning("a caller has to wait: %s", error)  # as for lack of a file descriptor
                self._is_closed.wait(_RETRY_S)
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # no further thread: this caller is told by the end of its connection
                logger.warning("a caller gets no answer: %s", error)
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            line = lines.readline()
            if not line.endswith("\n"):
                return  # the caller closed the connection
            answer = self._result_of(line)
            try:
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except OSError as error:
                logger.warning("the caller went away before its answer: %s", error)

    def _result_of(self, line: str) -> dict[str, object]:
        try:
            request = json.loads(line)
            return {"result": self._run(request["verb"], request["timeout_s"], request["arguments"])}
        except Exception as error:  # noqa: BLE001 - a process boundary: the caller gets it
            logger.info("a verb failed: %s", error)
            return {"error": {"kind": type(error).__name__, "message": str(error)}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve an engine until standard input ends."""
    parser = argparse.ArgumentParser(prog="lockstep.integration.push.remote_engine", description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--socket", required=True, type=Path, help="where to listen")
    parser.add_argument("--starter", type=int, help="the process whose end closes standard input")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--on-commit", choices=("verify", "keep", "drop"), default="verify", help="of batches ahead")
    parser.add_argument("--max-lag", type=int, help="with drop: commits that a batch may have seen")
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="of the engine, values as JSON")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(name)s: %(message)s")
    end_with_the_starter()
    starter = Starter(options.starter)
    import torch

    from ...rollout.config import EngineConfig
    from ...rollout.engine import Engine
    from ..service import RolloutService
    from .local_target import run_verb

    torch.set_num_threads(options.threads)
    settings = dict(_setting(text) for text in options.settings)
    service = RolloutService(Engine(options.model, EngineConfig.from_dict(settings)))
    service.engine.start()

    ahead = RolloutsAhead(service.engine, options.on_commit, options.max_lag)

    def run(verb: str, timeout_s: float, arguments: dict[str, Any]) -> dict[str, object]:
        if verb == "begin":
            ahead.begin(**arguments)
            return {}
        if verb == "settle":
            ahead.settle()
            return {}
        if verb == "ahead_counts":
            return asdict(ahead.counts)
        if verb in ("generate", "finish_groups"):
            made = service.engine.generate(**arguments) if verb == "generate" else ahead.finish_groups(**arguments)
            return {"completions": completions_bytes(made).decode()}
        return run_verb(service, verb, timeout_s, arguments)

    server = VerbServer(options.socket, run)
    server.start()
    print(_READY, flush=True)
    was_killed = sys.stdin.read() != _CLOSE
    end_within(_CLOSE_S, 1)
    server.close()
    if _SEGMENTS.is_dir():  # before the service, which may wait for a verb that is under way
        if was_killed:  # it leaves its segments, and holds their locks a little longer than the pipe
            starter.wait()
        remove_stale_segments(_SEGMENTS)
    service.close()
    return 0


def _setting(text: str) -> tuple[str, object]:
    key, found, value = text.partition("=")
    if not found:
        raise SystemExit(f"{text!r} is not setting=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value  # a bare word: a string


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a call that still runs in a thread must not keep the process
