"""The router before real engines in processes of their own, which are killed, restarted and updated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import BackgroundRouter, route_in_background
from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.manifest import TensorSpec
from lockstep.weight_sync.transports.group import DistributedTransport

pytestmark = pytest.mark.slow

START_S = 120.0  # for a process that imports everything, on a busy machine
WAIT_S = 60.0
PARAMS = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Check repeatedly until it holds. Every check is a call over the network, so this is no busy loop."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"


class Process:
    """A process of a `lockstep` command that prints its URL."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "lockstep.integration.cli", *self.arguments]
        env = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self.process = prepared_python.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ready(self) -> str:
        """Wait until it listens. Returns its URL."""
        assert self._listens.wait(START_S), "".join(self.log)
        return self.log[-1].split()[-1] if " at http" in self.log[-1] else self._url()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.process.stderr.close()

    def _url(self) -> str:
        said = [line for line in self.log if " at http" in line]
        assert said, "".join(self.log)
        return said[0].split()[-1]

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if " at http" in line:
                self._listens.set()
        self._listens.set()  # the process ended


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[list[Path]]:
    """Save three checkpoints of one model."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        folders.append(tmp_path_factory.mktemp(f"checkpoint-{seed}"))
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3)
        model.save_pretrained(folders[-1])
    return folders


@pytest.fixture(scope="module")
def engines(folders) -> Iterator[list[Process]]:
    engines = [
        Process("serve", "--model", str(folders[0]), "--port", str(free_port()),
                "--engine", "kv_cache=200 blocks", "max_num_seqs=8")
        for _ in range(2)
    ]  # fmt: skip
    for engine in engines:
        engine.url = engine.ready()
    yield engines
    for engine in engines:
        engine.kill()


@pytest.fixture
def settings(engines, tmp_path) -> RouterConfig:
    return RouterConfig(
        tuple(engine.url for engine in engines), HttpConfig(port=0), journal=tmp_path / "journal.json",
        health_interval_s=0.2, affinity_slack=0,
    )  # fmt: skip


@pytest.fixture
def router(settings) -> Iterator[BackgroundRouter]:
    with route_in_background(settings) as router:
        wait_until(lambda: num_routable(router.url) == 2, "both engines are routable")
        yield router


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=WAIT_S, verify=False) as client:
        yield client


def workers(url: str) -> dict[str, dict]:
    return {entry["url"]: entry for entry in httpx.get(f"{url}/workers", verify=False).json()["workers"]}


def num_routable(url: str) -> int:
    return sum(worker["routable"] for worker in workers(url).values())


def request(i: int, **more: object) -> dict:
    return {"input_ids": [1 + i, 2, 3 + i], "sampling_params": PARAMS, **more}


def update_all(http: httpx.Client, url: str, folder: Path, version: str) -> httpx.Response:
    """Update all workers like a trainer: pause, flush, update, continue."""
    http.post(f"{url}/pause_generation", json={"mode": "retract"}).raise_for_status()
    http.post(f"{url}/flush_cache").raise_for_status()
    answer = http.post(f"{url}/update_weights_from_disk", json={"model_path": str(folder), "weight_version": version})
    http.post(f"{url}/continue_generation", json={}).raise_for_status()
    return answer


class Stream:
    """A streaming client in a thread, with the answering worker, the start of the answer and its events."""

    def __init__(self, url: str, body: dict) -> None:
        self.begun, self.done = threading.Event(), threading.Event()
        self.worker, self.events = "", []
        self._url, self._body = url, {**body, "stream": True}
        self.status = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with httpx.stream("POST", f"{self._url}/generate", json=self._body, timeout=WAIT_S, verify=False) as answer:
            self.status, self.worker = answer.status_code, answer.headers.get("x-lockstep-worker", "")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()
        self.done.set()

    def result(self) -> object:
        """Return the last event before [DONE], or the error."""
        assert self.done.wait(WAIT_S), self.events[-1:]
        assert self.status == 200
        return json.loads(self.events[-2] if self.events[-1] == "[DONE]" else self.events[-1])


def test_kill_9_under_load_and_the_worker_returns(engines, router, http):
    solo = [http.post(f"{engines[1].url}/generate", json=request(i)).json()["output_ids"] for i in range(12)]
    victim, other = engines
    begun = None
    for _ in range(20):  # a stream of the victim that has begun, and has not ended when the victim stops
        streams = [Stream(router.url, request(i)) for i in range(4)]
        for stream in streams:
            assert stream.begun.wait(WAIT_S)
        victim.signal(signal.SIGSTOP)
        begun = next((s for s in streams if s.worker == victim.url and s.events[-1] != "[DONE]"), None)
        if begun is not None:
            break
        victim.signal(signal.SIGCONT)
        for stream in streams:
            stream.result()
    assert begun is not None
    before = workers(router.url)[victim.url]["load"]
    with ThreadPoolExecutor(8) as pool:
        later: list[Future] = [pool.submit(http.post, f"{router.url}/generate", json=request(i)) for i in range(4, 12)]
        late_stream = Stream(router.url, request(3))
        wait_until(lambda: workers(router.url)[victim.url]["load"] > before, "requests wait at the stopped engine")
        victim.kill()
        for i, answer in enumerate(later, 4):
            got = answer.result(WAIT_S)
            assert got.status_code == 200 and got.json()["output_ids"] == solo[i]
            assert got.headers["x-lockstep-worker"] == other.url
    assert late_stream.result()["output_ids"] == solo[3]
    for i, stream in enumerate(streams):  # that of the victim goes on at the other engine
        assert stream.result()["output_ids"] == solo[i]
    assert workers(router.url)[victim.url]["status"] == "dead"
    assert all(worker["load"] == 0 for worker in workers(router.url).values())

    victim.start()
    victim.ready()
    wait_until(lambda: num_routable(router.url) == 2, "the killed engine is back")
    answers = [http.post(f"{router.url}/generate", json=request(i)) for i in range(4)]
    assert [answer.json()["output_ids"] for answer in answers] == solo[:4]
    assert {answer.headers["x-lockstep-worker"] for answer in answers} == {victim.url, other.url}


def test_two_clients_updating_at_once_leave_one_version_everywhere(engines, router, http, folders):
    for turn in range(3):
        versions = [f"{turn}-a", f"{turn}-b"]
        with ThreadPoolExecutor(3) as pool:
            updates = [
                pool.submit(update_all, http, router.url, folder, version)
                for folder, version in zip(folders[1:], versions, strict=True)
            ]
            generating = pool.submit(http.post, f"{router.url}/generate", json=request(0))
            statuses = [update.result(WAIT_S).status_code for update in updates]
        assert statuses.count(200) >= 1, [update.result().text for update in updates]
        assert generating.result(WAIT_S).status_code == 200
        answer = http.get(f"{router.url}/model_info")
        assert answer.status_code == 200 and answer.json()["weight_version"] in versions
        sums = http.post(f"{router.url}/weights_checker", json={"action": "checksum"}).json()
        assert sums["success"] and len(sums["per_engine_checksum"]) == 64  # combined, because it is the same on both
        assert num_routable(router.url) == 2
        tokens = {
            tuple(http.post(f"{engine.url}/generate", json=request(5)).json()["output_ids"]) for engine in engines
        }
        assert len(tokens) == 1


def test_one_init_call_and_one_broadcast_serve_both_engines(engines, router, http, folders):
    from safetensors.torch import load_file

    weights = load_file(folders[2] / "model.safetensors")
    port = free_port()
    rendezvous = Rendezvous("127.0.0.1", port, 0, 3, "g", "gloo", WAIT_S, None)
    body = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3, "group_name": "g",
        "backend": "gloo",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(http.post, f"{router.url}/init_weights_update_group", json=body)
        group = rendezvous.join()
        assert joining.result(WAIT_S).status_code == 200
        http.post(f"{router.url}/pause_generation", json={"mode": "retract"}).raise_for_status()
        http.post(f"{router.url}/flush_cache").raise_for_status()
        named = {
            "names": list(weights), "dtypes": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
            "shapes": [list(t.shape) for t in weights.values()], "group_name": "g", "flush_cache": False,
            "weight_version": "sent",
        }  # fmt: skip
        updating = pool.submit(http.post, f"{router.url}/update_weights_from_distributed", json=named)
        deadline = Deadline.after(WAIT_S)
        for tensor in weights.values():
            group.finish(group.broadcast(tensor, deadline), deadline)
        assert updating.result(WAIT_S).status_code == 200, updating.result().text
        http.post(f"{router.url}/continue_generation", json={}).raise_for_status()
        assert http.get(f"{router.url}/get_weight_version").json()["weight_version"] == "sent"
        http.post(f"{router.url}/destroy_weights_update_group", json={"group_name": "g"}).raise_for_status()
    group.destroy()


def test_a_worker_that_is_killed_in_the_middle_of_a_push_leaves_the_others_as_they_were(engines, router, http, folders):
    from safetensors.torch import load_file

    weights = load_file(folders[1] / "model.safetensors")
    specs = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    victim, other = engines
    target = HttpTarget(router.url)
    pusher = WeightPusher([target], DistributedTransport(bucket_bytes=1 << 12), timeout_s=WAIT_S)

    def killing() -> Iterator[tuple[str, torch.Tensor]]:
        for index, named in enumerate(weights.items()):
            if index == len(weights) // 2:
                victim.kill()
            yield named

    try:
        first = pusher.push_tensors(weights.items(), specs, "first")
        digests = {http.get(f"{engine.url}/model_info").json()["weight_digest"] for engine in engines}
        assert digests == {first.digest}
        with pytest.raises(PushFailed) as failed:
            pusher.push_tensors(killing(), specs, "second")
        assert victim.url in failed.value.failures[target.name] and failed.value.stranded == ()
        assert workers(router.url)[victim.url]["status"] == "dead"
        answer = http.get(f"{router.url}/model_info").json()
        assert (answer["weight_version"], answer["weight_digest"]) == ("first", first.digest)
        assert not http.get(f"{router.url}/weight_update_journal").json()["unresolved"]
        assert not answer["engine_paused"] and workers(router.url)[other.url]["routable"]
        victim.start()
        victim.ready()
        wait_until(lambda: "version" in workers(router.url)[victim.url]["held"], "it is back, with other weights")
        mixed = http.get(f"{router.url}/model_info")
        assert mixed.status_code == 409 and set(mixed.json()["weight_versions"].values()) == {"first", "default"}
        third = pusher.push_tensors(weights.items(), specs, "third")
        answer = http.get(f"{router.url}/model_info").json()
        assert (answer["weight_version"], answer["weight_digest"]) == ("third", third.digest)
        assert num_routable(router.url) == 2
    finally:
        pusher.close()
        target.close()


def test_a_router_that_is_killed_in_the_middle_of_an_update_remembers_it(engines, settings, http, folders):
    port = free_port()
    command = ["route", "--port", str(port), "--journal", str(settings.journal), "--worker", *settings.workers]
    command += ["--setting", "health_interval_s=0.2", "dead_after=1000"]
    router = Process(*command)
    try:
        url = router.ready()
        wait_until(lambda: num_routable(url) == 2, "both engines are routable")
        assert update_all(http, url, folders[0], "before").status_code == 200
        ids = {worker["url"]: worker["id"] for worker in workers(url).values()}
        http.put(f"{url}/workers/{ids[engines[0].url]}", json={"disabled": True}).raise_for_status()
        engines[1].signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as pool:
                updating = pool.submit(
                    http.post, f"{url}/update_weights_from_disk",
                    json={"model_path": str(folders[1]), "weight_version": "after"},
                )  # fmt: skip
                first = engines[0].url
                wait_until(
                    lambda: http.get(f"{first}/get_weight_version").json()["weight_version"] == "after",
                    "the first engine has the update",
                )
                router.kill()
                with pytest.raises(httpx.HTTPError):
                    updating.result(WAIT_S)
        finally:
            engines[1].signal(signal.SIGCONT)
        router.start()
        router.ready()
        wait_until(lambda: all(w["is_healthy"] for w in workers(url).values()), "both engines are alive")
        seen = workers(url)
        assert num_routable(url) == 0 and all("journal" in worker["held"] for worker in seen.values())
        assert seen[engines[0].url]["disabled"]  # as set by the operator
        assert http.post(f"{url}/generate", json=request(0)).status_code == 503
        refused = http.post(f"{url}/update_weights_from_disk", json={"model_path": str(folders[1])})
        assert refused.status_code == 409 and "ended in the middle" in refused.json()["message"]
        entry = http.get(f"{url}/weight_update_journal").json()["entry"]
        assert {target["weight_version"] for target in entry["targets"]} == {"before"}
        resolved = http.post(f"{url}/weight_update_journal/resolve", json={"acknowledge": True})
        assert resolved.status_code == 200 and len(resolved.json()["weight_versions"]) == 2
        assert update_all(http, url, folders[1], "again").status_code == 200
        assert http.get(f"{url}/get_weight_version").json()["weight_version"] == "again"
        assert num_routable(url) == 1
        answer = http.post(f"{url}/generate", json=request(0))
        assert answer.status_code == 200 and answer.json()["meta_info"]["weight_version"] == "again"
    finally:
        router.kill()


def test_a_router_that_is_killed_remembers_which_workers_were_changed(http, tmp_path):
    gone, kept, disabled, added = (f"http://127.0.0.1:{free_port()}" for _ in range(4))  # no process listens there
    journal = tmp_path / "journal.json"
    command = ["route", "--port", str(free_port()), "--journal", str(journal), "--worker", gone, kept, disabled]
    router = Process(*command)
    try:
        url = router.ready()
        ids = {worker["url"]: worker["id"] for worker in workers(url).values()}
        http.post(f"{url}/workers", json={"url": added, "disabled": True}).raise_for_status()
        http.delete(f"{url}/workers/{ids[gone]}").raise_for_status()
        http.post(f"{url}/workers/{ids[disabled]}/disable").raise_for_status()
        before = workers(url)
        router.kill()
        router.start()
        router.ready()
        now = workers(url)
        assert list(now) == list(before) == [kept, disabled, added]
        assert [worker["disabled"] for worker in now.values()] == [False, True, True]
        assert any("removed at run time" in line and gone in line for line in router.log)
        # A change that cannot be written is not made.
        journal.with_name("journal.json.workers.json.part").mkdir()
        refused = http.post(f"{url}/workers/{ids[kept]}/disable")
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "roster_unwritable"
        assert not workers(url)[kept]["disabled"]
    finally:
        router.kill()
