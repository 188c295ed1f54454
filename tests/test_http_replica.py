"""Replicas of several ranks behind HTTP: torchrun serves them, and what one process answers they answer, per rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from lockstep.integration.http.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.weight_sync.digest import model_digest
from lockstep.weight_sync.disk import save_folder
from lockstep.weight_sync.process_group import WeightGroup
from lockstep.weight_sync.tensors import SharedMemorySender

MakeModel = Callable[..., PreTrainedModel]
Until = Callable[..., None]
SETTINGS = {"k_blocks": 4, "kv_cache": "64 blocks", "max_num_seqs": 4, "rank_timeout_s": 8.0}
PROMPT = list(range(3, 40))
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
PATIENCE = 120.0


class Served:
    """`lockstep serve` under torchrun: its address, its processes by rank, and what they print."""

    def __init__(self, folder: Path, num_ranks: int, *engine: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += ["-m", "lockstep.integration.cli", "serve", "--model", str(folder), "--port", "0", "--engine"]
        command += [f"{name}={value}" for name, value in SETTINGS.items()] + list(engine)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        [found] = self.wait_for(r"serving .* at (http://\S+)")
        self.url = found
        self.pids = self._pids()

    def wait_for(self, pattern: str) -> tuple[str, ...]:
        """The groups of the first line that matches."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._news:
            assert self._news.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE), self.text
            match = found()
        assert match is not None, self.text
        return match.groups()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def ended(self) -> int:
        """Wait until all of its processes have; the launcher's exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)  # the last that could print has ended
        assert not self._reader.is_alive()
        return code

    def close(self) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _pids(self) -> dict[int, int]:
        """Process ids of the launcher's children, by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        pids = {}
        for pid in map(int, children):
            variables = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            if "RANK" in variables:
                pids[int(variables["RANK"])] = pid
        return pids


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """served(folder, 2, "tp=2"): see `Served`."""
    all_served: list[Served] = []

    def serve(folder: Path, num_ranks: int, *engine: str) -> Served:
        all_served.append(Served(folder, num_ranks, *engine))
        return all_served[-1]

    yield serve
    for one in all_served:
        one.close()


@pytest.fixture(autouse=True)
def _one_thread(restore_threads) -> None:
    torch.set_num_threads(1)


def plain(answer: dict) -> tuple[object, ...]:
    """What of an answer does not depend on names and clocks."""
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["input_token_logprobs"], meta["weight_version"]


def ask(client: httpx.Client, **fields: object) -> dict:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0}
    response = client.post("/generate", json=body | fields)
    assert response.status_code == 200, response.text
    return response.json()


def alone(folder: Path) -> dict:
    """The same of a server of one rank, at equal k_blocks."""
    service = RolloutService(Engine(folder, EngineConfig.from_dict(SETTINGS)))
    with serve_in_background(service, HttpConfig(port=0)) as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            answer = ask(client)
    service.close()
    return answer


def stream_into(lines: list[str], url: str, begun: threading.Event) -> None:
    body = {"input_ids": PROMPT, "sampling_params": ENDLESS, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=PATIENCE, trust_env=False) as response:
        for line in response.iter_lines():
            lines.append(line)
            begun.set()


# -- from the shell ----------------------------------------------------------------------------------------------------


def test_a_divided_model_in_one_process_is_refused_with_the_command(make_model: MakeModel, tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path)
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(tmp_path)]
    command += ["--engine", "tp=2", "k_blocks=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "`torchrun --nproc-per-node 2 -m lockstep.integration.cli serve ... --engine tp=2 pp=1`" in done.stderr


def test_other_than_one_replica_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.integration.serving import check_ranks

    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    check_ranks(EngineConfig(tp=2, pp=2, k_blocks=2))
    with pytest.raises(ValueError, match=r"tp=1 pp=2 makes a replica of 2, but torchrun started 4 ranks.*lockstep route"):
        check_ranks(EngineConfig(pp=2))
    with pytest.raises(ValueError, match="replica of 1, but torchrun started 4"):
        check_ranks(EngineConfig())


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "number"), [("tp=2", signal.SIGTERM), ("pp=2", signal.SIGINT)])
def test_torchrun_serves_a_replica_until_a_signal(
    make_model: MakeModel, tmp_path: Path, served: Callable[..., Served], shape: str, number: signal.Signals
) -> None:
    make_model("qwen2").save_pretrained(tmp_path)
    replica = served(tmp_path, 2, shape)
    with replica.client() as client:
        assert plain(ask(client)) == plain(alone(tmp_path))
        assert client.get("/health").status_code == 200
        info = client.get("/server_info").json()
        assert info["internal_states"][0]["world_size"] == 2 and info[f"{shape[:2]}_size"] == 2
    replica.process.send_signal(number)
    replica.ended()
    for pid in replica.pids.values():
        assert not Path(f"/proc/{pid}").exists()
    assert "Traceback" not in replica.text.split("torch/distributed")[0], replica.text
    assert "stops while serving" not in replica.text and "replica is lost" not in replica.text
    assert "SIGKILL" not in replica.text and "Unable to shutdown" not in replica.text
