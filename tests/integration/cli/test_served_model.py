"""Tests of what `lockstep serve` prepares before it serves."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lockstep.integration.cli import served_model
from lockstep.integration.http import server
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.tests.support.random_models import random_model

FAMILIES = ["qwen3", "qwen3_5", "lfm2", "mamba"]
# A new interpreter, which has loaded no kernels, and a fork of it for each model.
SCRIPT = """
import json, os, sys
from lockstep.integration.cli.served_model import compile_kernels
from lockstep.integration.service import RolloutService
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

assert not native._loaded
for folder in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0, folder
        continue
    service = RolloutService(Engine(folder, EngineConfig(kv_cache="32 blocks")))
    compile_kernels(service)
    before = set(native._loaded)
    for params in (SamplingParams(max_new_tokens=4, top_p=0.9, top_k=5, min_p=0.01, frequency_penalty=0.1, n=3),
                   SamplingParams(max_new_tokens=4, temperature=0)):
        service.engine.generate([[3, 4, 5]], params, options=RequestOptions(0, 2, (1,)))
    service.weights_checker("checksum")
    print(json.dumps([sorted(before), sorted(set(native._loaded) - before)]))
    service.close()
    sys.exit()
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[str]]]:
    """Return the kernels that were loaded before and while a model of each family served."""
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        random_model(family).save_pretrained(folder)
    command = [sys.executable, "-c", SCRIPT, *map(str, folders.values())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")]
    return dict(zip(FAMILIES, lines, strict=True))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_request_or_checksum_waits_for_a_compiler(loaded, family):
    before, later = loaded[family]
    assert "sha256/sha256_tiles.cpp" in before
    assert later == []


@contextmanager
def serving(folder: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a server that ends with its standard input, and yield it with its url."""
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", folder, "--port", "0"]
    command += ["--until-eof", "--engine", "kv_cache=32 blocks"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield server, next(line for line in server.stderr if " at http" in line).split()[-1]
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def test_a_server_ends_with_its_standard_input(make_model, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    with serving(str(tmp_path)) as (server, url):
        server.stdin.write("this is not read\n")
        server.stdin.flush()
        assert httpx.get(f"{url}/health").status_code == 200
        server.stdin.close()
        assert server.wait(timeout=60) == 0


STARTER = """
import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(server.pid, flush=True)
server.wait()
"""


def test_a_server_ends_when_the_program_that_started_it_is_killed(make_model, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(tmp_path), "--port", "0"]
    command += ["--until-eof", "--engine", "kv_cache=32 blocks"]
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(starter.stdout.readline())
    try:
        next(line for line in starter.stderr if " at http" in line)
        starter.send_signal(signal.SIGKILL)
        assert starter.stderr.read() is not None  # to its end: the server, which has the pipe too, is gone
    finally:
        starter.kill()
        starter.communicate()
    assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()


def test_a_port_in_use_is_named_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(served_model, "Engine", lambda *_: pytest.fail("the model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = HttpConfig(port=taken.getsockname()[1])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{config.port}: Address already in use"):
            served_model.serve_model(str(tmp_path), config, EngineConfig(), ServiceConfig())


def test_an_address_is_of_one_server_while_models_are_loaded_and_of_the_next_one_after_it():
    first = server.reserve(HttpConfig(port=0))
    config = HttpConfig(port=first.getsockname()[1])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{config.port}: Address already in use"):
        server.reserve(config)
    server.share_address(first)  # as `serve` does
    first.listen()
    with socket.create_connection(("127.0.0.1", config.port)) as client:
        accepted, _ = first.accept()
        accepted.close()  # the server's end lingers
        assert client.recv(1) == b""
    first.close()
    following = server.reserve(config)
    server.share_address(following)
    following.listen()
    following.close()
