"""Tests of replicas of several ranks behind HTTP: torchrun serves them, they answer as one process does, per rank."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.integration.cli import main as cli
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.integration.weights.verbs import GROUP_NAME
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port, join_group
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.group.protocol import send_update
from lockstep.weight_sync.manifest import Manifest, specs_of

MakeModel = Callable[..., PreTrainedModel]
Until = Callable[..., None]
SETTINGS = {"k_blocks": 4, "kv_cache": "64 blocks", "max_num_seqs": 4}
PROMPT = list(range(3, 40))
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
ENDLESS = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
PATIENCE = 120.0


class Served:
    """`lockstep serve` under torchrun: its address, its processes by rank, and their output."""

    def __init__(self, folder: Path, num_ranks: int, *engine: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += ["-m", "lockstep.integration.cli", "serve", "--model", str(folder), "--port", "0", "--engine"]
        command += [f"{name}={value}" for name, value in SETTINGS.items()] + list(engine)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = prepared_python.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        [found] = self.wait_for(r"serving .* at (http://\S+)")
        self.url = found
        self.pids = self._pids()

    def wait_for(self, pattern: str) -> tuple[str, ...]:
        """Wait for a line that matches and return its groups."""

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
        """Wait until all processes have ended. Returns the launcher's exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)  # the last process that could print has ended
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
        """Return the process ids of the launcher's children, by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ranks = {prepared_python.rank_of(int(pid)): int(pid) for pid in children}
        return {rank: pid for rank, pid in ranks.items() if rank is not None}


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Make served(folder, 2, "tp=2"), see `Served`."""
    all_served: list[Served] = []

    def serve(folder: Path, num_ranks: int, *engine: str) -> Served:
        all_served.append(Served(folder, num_ranks, *engine))
        return all_served[-1]

    yield serve
    for one in all_served:
        one.close()
        print(one.text)  # of a test that fails


@pytest.fixture(autouse=True)
def _one_thread(restore_threads) -> None:
    torch.set_num_threads(1)


def plain(answer: dict) -> tuple[object, ...]:
    """Return the part of an answer that does not depend on names and clocks."""
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["input_token_logprobs"], meta["weight_version"]


def ask(client: httpx.Client, **fields: object) -> dict:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0}
    response = client.post("/generate", json=body | fields)
    assert response.status_code == 200, response.text
    return response.json()


def alone(folder: Path) -> dict:
    """Return the same part of the answer of a server of one rank, with equal k_blocks."""
    service = RolloutService(Engine(folder, EngineConfig.from_dict(SETTINGS)))
    with serve_in_background(service, HttpConfig(port=0)) as server, httpx.Client(base_url=server.url) as client:
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


@pytest.mark.parametrize(
    ("num_started", "engine", "words"),
    [
        (None, ["tp=2", "k_blocks=2"], "among 2 processes: start `torchrun --nproc-per-node 2 -m"),
        ("4", ["pp=2"], "tp=1 pp=2 makes a replica of 2, but torchrun started 4 ranks"),
        ("4", ["tp=1"], "makes a replica of 1, but torchrun started 4 ranks"),
    ],
)
def test_other_than_one_replica_of_ranks_is_refused_with_the_command(
    monkeypatch, capsys, tmp_path: Path, num_started: str | None, engine: list[str], words: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if num_started is not None:
        monkeypatch.setenv("WORLD_SIZE", num_started)
    assert cli.main(["serve", "--model", str(tmp_path), "--engine", *engine]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line and "lockstep.integration.cli serve ... --engine tp=" in line


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


# -- every verb on all ranks -------------------------------------------------------------------------------------------


def later(model: PreTrainedModel, step: int) -> PreTrainedModel:
    """Make the trainer's model of some steps later."""
    newer, generator = copy.deepcopy(model), torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return newer


def post(client: httpx.Client, path: str, **body: object) -> dict:
    response = client.post(f"/{path}", json=body)
    assert response.status_code == 200 and response.json()["success"] is True, response.text
    return response.json()


def ranks_of(reply: dict) -> list[tuple[int, bool]]:
    return [(one["rank"], one["success"]) for one in reply["rank_results"]]


def send_over_a_group(client: httpx.Client, model: PreTrainedModel) -> list[dict]:
    """Send weights as rank 0 of a group with the ranks of the replica. Returns the replies to the three calls."""
    port = free_port()
    named = list(model.named_parameters())
    manifest = Manifest("group", specs_of(named))
    address = {"master_address": "127.0.0.1", "master_port": port, "world_size": 3, "backend": "gloo"}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(post, client, "init_weights_update_group", rank_offset=1, **address)
        group = join_group("127.0.0.1", port, 0, 3, GROUP_NAME, timeout_s=PATIENCE)
        joined = joining.result(PATIENCE)
        body = {"load_format": "lockstep", "manifest": manifest.to_json(), "weight_version": "group"}
        updating = pool.submit(post, client, "update_weights_from_distributed", **body)
        send_update(group, manifest, named, timeout_s=PATIENCE)
        updated = updating.result(PATIENCE)
    left = post(client, "destroy_weights_update_group")
    group.destroy()
    return [joined, updated, left]


def assert_reports_agree(
    client: httpx.Client, url: str, shape: str, checked: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare the ranks' states with one update's digest, and the texts of `lockstep ctl` with the checker's reply."""
    states = client.get("/state").json()["ranks"]
    tp = shape == "tp=2"
    assert [(s["rank"], s["tp_rank"], s["pp_rank"]) for s in states] == [(0, 0, 0), (1, int(tp), int(not tp))]
    stand = {(s["weight_version"], s["weight_digest"], s["epoch"]) for s in states}
    assert stand == {("group", checked["model_digest"], 3)}
    assert all(s["kv_bytes"] > 0 and s["kv_used_bytes"] >= 0 for s in states)
    assert cli.main(["ctl", "--url", url, "state"]) == 0
    told = capsys.readouterr().out
    assert told.count(f"weight_digest   {checked['model_digest']}") == 2 and "tp_rank" in told
    assert cli.main(["ctl", "--url", url, "checksum"]) == 0
    told = capsys.readouterr().out
    assert all(f"rank {r['rank']} digest  {r['rank_digest']}" in told for r in checked["rank_results"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tp=2", "pp=2"])
def test_control_weights_and_memory_reach_every_rank_over_a_socket(
    make_model: MakeModel, tmp_path: Path, served: Callable[..., Served], capsys, shape: str
) -> None:
    first = make_model("qwen2")
    newer = {name: later(first, step) for step, name in enumerate(("disk", "tensor", "group"))}
    digests = {name: model_digest(model.named_parameters()) for name, model in newer.items()}
    first.save_pretrained(tmp_path / "first")
    newer["disk"].save_pretrained(tmp_path / "disk")
    replica, everybody = served(tmp_path / "first", 2, shape), [(0, True), (1, True)]
    with replica.client() as client:
        before = ask(client)
        with ThreadPoolExecutor(1) as pool:
            body = {"input_ids": PROMPT, "sampling_params": ENDLESS}
            running = pool.submit(client.post, "/generate", json=body)
            assert post(client, "pause_generation", mode="retract")["engine_paused"]
            post(client, "continue_generation")
            retracted = running.result(PATIENCE).json()
        assert retracted["output_ids"] == client.post("/generate", json=body).json()["output_ids"]

        disk = {"model_path": str(tmp_path / "disk"), "weight_version": "disk"}
        assert ranks_of(post(client, "update_weights_from_disk", **disk)) == everybody
        assert client.get("/model_info").json()["weight_digest"] == digests["disk"]
        named = list(newer["tensor"].named_parameters())
        payloads = [serialize_for_engine(named, "flattened_bucket") for _ in range(2)]  # each can be deserialised once
        body = {"load_format": "flattened_bucket", "serialized_named_tensors": payloads}
        assert ranks_of(post(client, "update_weights_from_tensor", **body)) == everybody
        for reply in send_over_a_group(client, newer["group"]):
            assert ranks_of(reply) == everybody
        checked = post(client, "weights_checker", action="checksum")
        assert checked["model_digest"] == digests["group"] and ranks_of(checked) == everybody
        assert len({one["rank_digest"] for one in checked["rank_results"]}) == 2  # each of its own part
        assert all(one["differing"] == [] for one in checked["rank_results"])

        assert_reports_agree(client, replica.url, shape, checked, capsys)
        post(client, "pause_generation")
        assert client.post("/release_memory_occupation", json={}).json() is None
        released = client.get("/state").json()["ranks"]
        assert [(s["weight_bytes"], s["kv_bytes"]) for s in released] == [(0, 0)] * 2
        client.post("/resume_memory_occupation", json={"tags": ["weights"]})
        first.save_pretrained(tmp_path / "again")
        post(client, "update_weights_from_disk", model_path=str(tmp_path / "again"), weight_version="default")
        assert client.post("/resume_memory_occupation", json={}).json() is None
        post(client, "continue_generation")
        assert plain(ask(client)) == plain(before)

        other = post(client, "update_weights_from_disk", **disk, stages=["encoder"])
        assert other["skipped"] and client.get("/get_weight_version").json() == {"weight_version": "default"}
        mine = post(client, "update_weight_version", new_version="mine", stages=["rollout"])
        assert ranks_of(mine) == everybody  # the ranks of all pipeline stages are one engine, selected together
        assert [s["weight_version"] for s in client.get("/state").json()["ranks"]] == ["mine"] * 2


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "number"), [("tp=2", signal.SIGKILL), ("pp=2", signal.SIGKILL), ("pp=2", signal.SIGSTOP)]
)
def test_a_lost_rank_ends_every_open_request_naming_it(
    make_model: MakeModel, tmp_path: Path, served: Callable[..., Served], shape: str, number: signal.Signals
) -> None:
    make_model("qwen2").save_pretrained(tmp_path)
    replica = served(tmp_path, 2, shape, "rank_timeout_s=15")
    coords = "rank 1 (stage 0, tp 1)" if shape == "tp=2" else "rank 1 (stage 1, tp 0)"
    streams: list[list[str]] = [[], []]
    begun = [threading.Event(), threading.Event()]
    threads = [
        threading.Thread(target=stream_into, args=(lines, replica.url, event), daemon=True)
        for lines, event in zip(streams, begun, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert all(event.wait(PATIENCE) for event in begun)
    os.kill(replica.pids[1], number)
    for thread, lines in zip(threads, streams, strict=True):
        thread.join(PATIENCE)
        assert not thread.is_alive()
        [error] = [line for line in lines if '"error"' in line]
        assert coords in error and '"code":503' in error
        assert lines[-2:] == ["data: [DONE]", ""]
    replica.wait_for(r"(rank 0 stops while serving: rank 1 )")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{replica.url}/health", trust_env=False)
    if number is signal.SIGSTOP:  # the launcher would wait longer for it than this test does
        os.kill(replica.pids[1], signal.SIGKILL)
    assert replica.ended() != 0


def test_health_names_the_rank_that_a_trainers_server_has_lost(
    make_model: MakeModel, tmp_path: Path, until: Until
) -> None:
    make_model("qwen2").save_pretrained(tmp_path / "model")
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def rank(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        service = RolloutService(Engine(tmp_path / "model", EngineConfig.from_dict(SETTINGS | {"pp": 2})))
        if rank == 1:
            service.engine.follow()
            os._exit(0)
        server = serve_in_background(service, HttpConfig(port=0))
        ask(httpx.Client(base_url=server.url, timeout=PATIENCE))
        theirs.send(server.url)
        theirs.recv()
        os._exit(0)

    processes = [fork.Process(target=rank, args=(index,), daemon=True) for index in range(2)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(PATIENCE)
        url = ours.recv()
        assert httpx.get(f"{url}/health").status_code == 200
        processes[1].kill()
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert "rank 1 (stage 1, tp 0) has ended" in httpx.get(f"{url}/health").text
        refused = httpx.post(f"{url}/generate", json={"input_ids": PROMPT}, timeout=PATIENCE)
        assert refused.status_code == 503 and "rank 1 (stage 1, tp 0)" in refused.json()["message"]
        said = httpx.post(f"{url}/weights_checker", json={}, timeout=PATIENCE)
        assert said.status_code == 503 and "rank 1 (stage 1, tp 0)" in said.json()["message"]
    finally:
        for process in processes:
            process.kill()
            process.join()
