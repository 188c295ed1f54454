"""The server of verbs in want of resources, and the ends of processes of engines."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.integration.push.remote_engine import RemoteTarget, VerbServer

PATIENCE = 30.0  # seconds; far more than any wait here takes


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
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            with no_free_descriptor():
                connection.connect(str(folder / "engine.sock"))
                connection.sendall(b'{"verb": "look", "timeout_s": 1.0, "arguments": {}}\n')
                assert heard.event.wait(PATIENCE)
            assert json.loads(connection.recv(1000)) == {"result": {"verb": "look"}}
        assert RemoteTarget(folder / "engine.sock").call("again", timeout_s=PATIENCE) == {"verb": "again"}
    finally:
        logging.getLogger("lockstep.integration.push.remote_engine").removeHandler(heard)
        server.close()
