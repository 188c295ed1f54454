"""`lockstep tinker` as a process: its flags, its ends, and what is left after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from lockstep.integration.cli.main import main
from lockstep.integration.cli.tinker import name_of
from lockstep.tests.support import prepared_python
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.tinker_client import Client, datum

DATA = [datum([1, 2, 3], target_tokens=[2, 3, 4])]


@contextmanager
def serving(folder, *flags: str) -> Iterator[tuple[subprocess.Popen, str]]:
    command = [sys.executable, "-m", "lockstep.integration.cli", "tinker", "--model", str(folder / "model"), "--port",
               "0", "--checkpoints", str(folder / "checkpoints"), "--engine", "kv_cache=32 blocks", *flags]  # fmt: skip
    process = prepared_python.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if " at http" in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe would fill
                yield process, line.split()[-1]
                return
        raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


@pytest.fixture
def folder(tmp_path):
    random_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path


def test_a_signal_ends_it_while_a_client_waits(folder):
    with serving(folder, "--max-lora-rank", "2") as (process, url):
        client = Client(url)
        assert client.base == str(folder / "model")
        model = client.model(rank=2)
        waits = client.post("optim_step", model_id=model.model_id, seq_id=2)["request_id"]
        asked, answers = threading.Event(), []

        def ask() -> None:
            with httpx.Client(base_url=f"{url}/api/v1", timeout=60) as http:
                asked.set()
                try:
                    answers.append(http.post("retrieve_future", json={"request_id": waits}).status_code)
                except httpx.HTTPError as error:
                    answers.append(type(error).__name__)

        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(30)
        model.run(DATA, seq=1)  # so that the question has arrived
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        thread.join(30)
        assert len(answers) == 1


def test_a_killed_server_leaves_whole_checkpoints_and_another_one_goes_on(folder):
    with serving(folder) as (process, url):
        model = Client(url).model(rank=2)
        model.train(DATA)
        path = model.call("save_weights", path="kept")["path"]
        expected = [model.train(DATA) for _ in range(2)]
        process.kill()
        process.wait(30)
    with serving(folder) as (_, url), Client(url) as client:
        resumed = client.model_from(path, optimizer=True)
        assert [resumed.train(DATA) for _ in range(2)] == expected
        assert client.http.post("session_heartbeat", json={"session_id": "former"}).status_code == 410


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--model", "nowhere"),
            "--model: nowhere is not a model folder (it has no config.json): download a model of the Hub to one first",
        ),
        (("--engine", "k_blocks=2"), "engine: adapters need one rank"),
        (("--engine", "invariant=false"), "invariant=false: the log-probabilities"),
        (("--engine", "speed=1"), "unknown"),
        (("--api-key", "own"), "begin with tml-"),
        (("--host", "0.0.0.0"), "without an API key"),
        (("--microbatch-bytes", "12 blocks"), "--microbatch-bytes must be bytes (\"512MiB\"), not '12 blocks'"),
        (("--microbatch-bytes", "xx"), "--microbatch-bytes must be bytes (\"512MiB\"), not 'xx'"),
        (("--max-models", "0"), "max_models must be a whole number"),
        (("--limit", "poll_s=0"), "--limit: poll_s must be a positive number"),
        (("--limit", "speed=1"), "--limit: unknown setting: speed"),
    ],
)
def test_a_mistake_is_one_line(folder, capsys, monkeypatch, flags, reason):
    monkeypatch.chdir(folder)
    assert main(["tinker", "--model", str(folder / "model"), *flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("lockstep: error: ") and reason in said


def test_a_folder_names_its_model_so_that_clients_find_the_tokenizer():
    """The SDK reads a name with two slashes as ORGANISATION/MODEL/VARIANT."""
    assert name_of("/data/model") == "/data/model/"
    assert name_of("/data/models/small") == "/data/models/small"


def test_limits_that_have_a_flag_of_their_own_are_refused(folder, capsys):
    limits = ["max_models=2", "session_timeout_s=900", "poll_s=3", "checkpoints=x"]
    assert main(["tinker", "--model", str(folder / "model"), "--limit", *limits]) == 2
    assert "--limit: checkpoints, max_models, session_timeout_s has a flag of its own" in capsys.readouterr().err
