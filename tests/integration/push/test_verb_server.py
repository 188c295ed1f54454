"""The server of verbs in want of resources, and the ends of processes of engines."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.integration.push.remote_engine import ProcessLost, RemoteEngine, RemoteTarget, VerbServer
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import has_ended
from lockstep.weight_sync.target import TargetError

PATIENCE = 30.0  # seconds; far more than any wait here takes
SETTINGS = {"kv_cache": "16 blocks", "max_num_seqs": 4}
OWNER = """
import sys
from pathlib import Path
from lockstep.integration.push.remote_engine import RemoteEngine
from lockstep.weight_sync.same_host.segment import Segment

folder = Path(sys.argv[1])
engine = RemoteEngine(folder / "model", folder, "engine", {"kv_cache": "16 blocks", "max_num_seqs": 4})
segment = Segment(Path("/dev/shm"), 4096)
print(engine.process.pid, segment.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder with a short name: a Unix socket's path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="lockstep-"))
    yield path
    shutil.rmtree(path)


class Heard(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Leave this process no file descriptor for the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, before[1]))
    filling = []
    try:
        while True:
            filling.append(os.dup(0))
    except OSError:
        yield
    finally:
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_without_a_free_descriptor_answers_as_soon_as_there_is_one(folder):
    server = VerbServer(folder / "engine.sock", lambda verb, timeout_s, arguments: {"verb": verb})
    server.start()
    heard = Heard()
    logging.getLogger("lockstep.integration.push.remote_engine").addHandler(heard)
    try:
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            with no_free_descriptor():
                silent.connect(str(folder / "engine.sock"))  # gets the descriptor that `accept` has taken before
                connection.connect(str(folder / "engine.sock"))
                connection.sendall(b'{"verb": "look", "timeout_s": 1.0, "arguments": {}}\n')
                assert heard.event.wait(PATIENCE)
            assert json.loads(connection.recv(1000)) == {"result": {"verb": "look"}}
        assert RemoteTarget(folder / "engine.sock").call("again", timeout_s=PATIENCE) == {"verb": "again"}
    finally:
        logging.getLogger("lockstep.integration.push.remote_engine").removeHandler(heard)
        server.close()


def test_a_server_that_gets_no_thread_for_a_caller_answers_the_next_one(folder, monkeypatch):
    server = VerbServer(folder / "engine.sock", lambda verb, timeout_s, arguments: {"verb": verb})
    server.start()
    start, refused = threading.Thread.start, []

    def none_left(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    target = RemoteTarget(folder / "engine.sock")
    with pytest.raises(TargetError):
        target.call("look", timeout_s=PATIENCE)
    assert refused and target.call("again", timeout_s=PATIENCE) == {"verb": "again"}
    server.close()


@pytest.mark.slow
def test_an_engine_that_is_stopped_or_killed_is_named_with_its_process_and_ends_with_its_owner(make_model, folder):
    make_model("qwen2").save_pretrained(folder / "model")
    stopped = RemoteEngine(folder / "model", folder, "e1", SETTINGS)
    stopped.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ProcessLost, match=rf"^e1: state: its process {stopped.process.pid} is stopped, as by SIGSTOP$"):
        stopped.call("state", timeout_s=0.1)
    began = time.monotonic()
    with pytest.raises(ProcessLost, match="is stopped"):
        stopped.call("state", timeout_s=600.0)
    assert time.monotonic() - began < 60
    stopped.close()
    assert stopped.process.returncode == 0, "it could end by itself"
    killed = RemoteEngine(folder / "model", folder, "e2", SETTINGS)
    assert killed.loss() is None
    killed.process.kill()
    with pytest.raises(ProcessLost, match=rf"^e2: state: its process {killed.process.pid} was killed by SIGKILL, as "):
        killed.call("state", timeout_s=PATIENCE)
    killed.close()


@pytest.mark.slow
def test_a_stopped_engine_and_the_segment_of_its_owner_go_when_the_owner_is_killed(make_model, folder, until):
    make_model("qwen2").save_pretrained(folder / "model")
    owner = prepared_python.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        pid, segment = owner.stdout.readline().split()
        os.kill(int(pid), signal.SIGSTOP)
        assert Path(segment).exists()
        owner.kill()
        owner.wait()
        until(lambda: has_ended(int(pid)))
        assert not Path(segment).exists()
