"""Python programs that start in a moment: a process that has imported the heavy packages forks for each of them.

An interpreter that imports torch and transformers takes several seconds of a core before its program begins. `Popen`
and `run` have the interface of subprocess for commands of this interpreter. The program runs as `__main__` with its own
arguments, environment, folder and streams, and is the caller's child; torchrun's ranks are forked in the same way.

Not for what only a new interpreter shows: what a program imports, variables that packages read when they are imported,
the hash seed (all forks share one), its teardown. Torchrun with a job and each command are started by a new interpreter
in other tests: tests/examples, tests/integration/cli, bench and http/test_app.py; an engine's process in
push/test_remote_engine.py.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# What the programs of tests import. Nothing of it starts a thread: a fork has one only.
PREPARED = (
    "torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing.api",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
    "lockstep.integration.service", "lockstep.integration.grpo.job", "lockstep.integration.grpo.planning.checks",
)  # fmt: skip
LAUNCHER = "torch.distributed.run"
# What ranks import besides, where it is installed: a job draws and logs, and a model that is saved makes accelerate
# import DeepSpeed, whose optimizers a job with its trainer imports too.
PREPARED_FOR_RANKS = (
    "matplotlib.pyplot", "torch.utils.tensorboard", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer",
)  # fmt: skip
SERVER = "lockstep.integration.cli"
PREPARED_FOR_SERVERS = ("uvicorn", "lockstep.integration.http.app")
ENGINE = "lockstep.integration.push.remote_engine"
FORKS_ENGINES = "LOCKSTEP_TEST_FORKS_ENGINES"  # set for a launcher whose ranks shall fork their engines' processes too
UNSHOWN_WARNINGS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_SET_SUBREAPER = 36  # of prctl
_NewPopen = subprocess.Popen
_imported: set[str] = set()  # of the lists above, by the process that forks
HAS_GPU = Path("/dev/nvidiactl").exists()  # a fork cannot use CUDA once its parent has, so each is a new interpreter


class _Request(NamedTuple):
    """A program to start; its streams travel beside it."""

    command: list[str]  # after the interpreter
    environment: dict[str, str]
    folder: str
    starts_session: bool


class _Forker:
    """The caller's end of the process that forks."""

    def __init__(self, caller: socket.socket, pid: int) -> None:
        self._caller, self.pid, self._lock = caller, pid, threading.Lock()

    def close(self) -> None:
        self._caller.close()

    def fork(self, request: _Request, streams: Sequence[int]) -> int:
        """Start a program. Returns the id of its process, which is a child of this one."""
        message = os.memfd_create("request")
        try:
            os.write(message, pickle.dumps(request))
            with self._lock, _adopting_orphans():
                socket.send_fds(self._caller, [b"r"], [message, *streams])
                return array.array("q", self._caller.recv(8))[0]
        finally:
            os.close(message)


@contextlib.contextmanager
def _adopting_orphans():
    """Become the parent of descendants whose parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(_SET_SUBREAPER, 0, 0, 0, 0)


_forker: _Forker | None = None
_lock = threading.Lock()


def prepare() -> _Forker:
    """Fork the process that forks the others, once: before a test has changed anything here."""
    global _forker
    with _lock:
        if _forker is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                try:
                    _serve(theirs)
                finally:  # it ends by an error only: nothing here may run the caller's code
                    traceback.print_exc()
                    os._exit(1)
            theirs.close()
            _forker = _Forker(ours, pid)
            atexit.register(_end, _forker)
        return _forker


def _end(forker: _Forker) -> None:
    forker.close()
    os.waitpid(forker.pid, 0)


class Popen(subprocess.Popen):
    """subprocess.Popen for commands of this interpreter, without preexec_fn and without other descriptors to pass."""

    def _execute_child(self, *given: Any) -> None:
        if HAS_GPU:
            super()._execute_child(*given)
            return
        named = inspect.signature(super()._execute_child).bind(*given).arguments
        command = [os.fspath(arg) for arg in named["args"]]
        assert command[0] == sys.executable and not (named["preexec_fn"] or named["shell"] or named["pass_fds"]), (
            command
        )
        pipes = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [pipe if pipe != -1 else number for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        environment = dict(os.environ if named["env"] is None else named["env"])
        folder = os.path.abspath(named["cwd"] or ".")
        request = _Request(command[1:], environment, folder, bool(named["start_new_session"]))
        self.pid = prepare().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class PopenOfProduct(Popen):
    """subprocess.Popen for the package's own code: launchers and engines are forked, other commands are not."""

    def _execute_child(self, *given: Any) -> None:
        if LAUNCHER in given[0] or ENGINE in given[0]:
            super()._execute_child(*given)
        else:
            _NewPopen._execute_child(self, *given)


def run(command: Sequence[Any], *, input: str | None = None, capture_output: bool = False, timeout: float | None = None,
        check: bool = False, **options: Any) -> subprocess.CompletedProcess:  # fmt: skip
    """Run a command as subprocess.run does."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def is_engine(pid: int) -> bool:
    """Return whether a process is a remote engine's, started by a rank of the launcher of a test."""
    name, command = (Path(f"/proc/{pid}/{file}").read_text() for file in ("comm", "cmdline"))
    return name.strip() == "engine" or ENGINE in command


def rank_of(pid: int) -> int | None:
    """Return the rank of a process that torchrun has started, None for another one."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    if name.startswith("rank "):
        return int(name.removeprefix("rank "))
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((int(text.removeprefix("RANK=")) for text in variables if text.startswith("RANK=")), None)


# -- in the process that forks -----------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> NoReturn:
    """Fork a process for each request, until the caller's end closes."""
    _replace_descriptors(requests.fileno())
    _forget_pytest()
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
        if not descriptors:
            os._exit(0)
        _import_for(_read(descriptors[0]))
        requests.send(array.array("q", [_fork(requests, descriptors)]))
        for descriptor in descriptors:
            os.close(descriptor)


def _import_for(request: _Request) -> None:
    """Import what the program needs, unless an earlier one has needed it."""
    optional = PREPARED_FOR_SERVERS if SERVER in request.command else PREPARED_FOR_RANKS
    wanted = (*PREPARED, *(optional if {SERVER, LAUNCHER} & {*request.command} else ()))
    names = [name for name in wanted if name not in _imported]
    for name in names:
        with contextlib.suppress(*([ImportError] if name in optional else [])):
            importlib.import_module(name)
    if names:
        gc.freeze()  # the programs share these objects' memory as long as nothing writes to it
        assert threading.active_count() == 1, "an imported module has started a thread"
    _imported.update(names)


def _read(message: int) -> _Request:
    with open(message, "rb", closefd=False) as file:
        file.seek(0)
        return pickle.load(file)


def _replace_descriptors(kept: int) -> None:
    """Open /dev/null in place of all inherited descriptors but the streams and one.

    The ends of pytest's pipes must not stay open here. Their numbers must: objects of pytest still hold them, and close
    them when they are collected or at exit, when they would be descriptors of the program.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (kept, null):
            with contextlib.suppress(OSError):  # the one that listed them
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _forget_pytest() -> None:
    """Restore the hooks of the interpreter that pytest has replaced."""
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__, sys.__unraisablehook__, threading.__excepthook__,
    )  # fmt: skip
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.showwarning = warnings._showwarning_orig
    warnings.filters[:] = [("ignore", None, category, None, 0) for category in UNSHOWN_WARNINGS]
    warnings._filters_mutated()
    weakref.finalize._registry.clear()  # nothing of the caller's is cleaned up here


def _fork(requests: socket.socket, descriptors: list[int]) -> int:
    """Fork a program. The process between has ended on return, so that the caller has adopted the program."""
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    between = os.fork()
    if between == 0:
        program = os.fork()
        if program:
            os.write(pid_write, array.array("q", [program]))
            os._exit(0)
        for descriptor in (pid_read, pid_write, go_write):
            os.close(descriptor)
        requests.close()
        os.read(go_read, 1)
        os.close(go_read)
        _become(*descriptors)
    os.waitpid(between, 0)
    os.close(pid_write)
    [program] = array.array("q", os.read(pid_read, 8))
    for descriptor in (pid_read, go_read, go_write):
        os.close(descriptor)
    return program


def _become(message: int, *streams: int) -> NoReturn:
    """Run the program of a request in this process, from its streams to its exit code."""
    request = _read(message)
    os.close(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.starts_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    # /proc/PID/environ and /proc/PID/cmdline keep what the first of these processes was started with
    if "RANK" in os.environ:
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
        if FORKS_ENGINES in os.environ:
            _fork_engines()
    elif ENGINE in request.command:
        Path("/proc/self/comm").write_text("engine")
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in request.command
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, encoding="utf-8", closefd=False),
        os.fdopen(1, "w", encoding="utf-8", buffering=1 if is_unbuffered else -1, closefd=False),
        os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False),
    )
    for reference in logging._handlerList:  # of packages that were imported with other streams
        if type(handler := reference()) is logging.StreamHandler:
            handler.stream = sys.stderr  # `setStream` would flush the other one, which pytest may have closed
    _set_threads(request.environment)
    _exit_with(_code_of([part for part in request.command if part != "-u"]))


def _set_threads(environment: Mapping[str, str]) -> None:
    """Give torch the number of threads that it would have taken from the environment.

    Also where it has that number: the first use of torch's pool after a fork makes it anew, and two threads at once
    that do so find none ("Invalid thread pool!").
    """
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _code_of(command: list[str]) -> int:
    """Run the program as the interpreter would; returns its exit code."""
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    try:
        if command[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = command[1:]
            if command[1] == LAUNCHER:
                _fork_ranks()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        elif command[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *command[2:]]
            exec(compile(command[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the interpreter's own last resort
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_with(code: int) -> NoReturn:
    """End the process as the interpreter does, without the teardown of its modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _fork_ranks() -> None:
    """Let the launcher that this process becomes fork its ranks, from a process forked before it has threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    _prepare_own()
    subprocess_handler.Popen = Popen
    # Its own way searches all imported modules for every frame's source, which takes seconds with as many as here.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _fork_engines() -> None:
    """Let the rank that this process becomes fork the processes of its engines."""
    _prepare_own()
    subprocess.Popen = PopenOfProduct  # type: ignore[misc]


def _prepare_own() -> None:
    """Prepare, apart from the process that this one was forked from."""
    global _forker, _lock
    _forker, _lock = None, threading.Lock()
    prepare()
