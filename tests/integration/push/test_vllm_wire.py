"""Pushes over vLLM's wire to servers in processes of their own, with real groups, and the calls of a push."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import torch
from torch import nn

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.http_target import HttpTarget, targets_behind
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.push.vllm_wire import VllmCall, VllmWire
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import BackgroundRouter, route_in_background
from lockstep.tests.integration.http.test_sequences import _url_of
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import wait_until
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.target import TargetError
from lockstep.weight_sync.transports.vllm import VllmTransport

KEY = "an-admin-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 30.0


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> Iterator[list[str]]:
    """Serve two engines of the same weights, each in its own process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    random_model("qwen2").save_pretrained(folder)
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(folder), "--port", "0",
               "--engine", "kv_cache=32 blocks", "max_num_seqs=4", "--admin-api-key", KEY]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [prepared_python.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        yield [_url_of(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=30)


@pytest.fixture
def model() -> nn.Module:
    return random_model("qwen2")


def train(model: nn.Module) -> str:
    """Change every weight. Returns the digest."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model_digest(model.named_parameters())


def standing(url: str) -> tuple[str, str, bool]:
    info = httpx.get(f"{url}/model_info", headers=HEADERS, timeout=PATIENCE).json()
    return info["weight_version"], info["weight_digest"], info["engine_paused"]


@pytest.mark.parametrize("buffer_bytes", [None, 20_000, 1 << 30], ids=["plain", "buffers", "one buffer"])
def test_a_push_brings_the_weights_to_every_engine(urls, model, buffer_bytes):
    targets = [HttpTarget(url, KEY, wire="vllm") for url in urls]
    pusher = WeightPusher(targets, VllmTransport(packed_buffer_bytes=buffer_bytes), timeout_s=PATIENCE)
    for step in ("1", "2"):
        version, digest = f"{buffer_bytes}-{step}", train(model)
        assert pusher.push(model, version).digest == digest
        assert [standing(url) for url in urls] == [(version, digest, False)] * 2
    pusher.close()


class Failing(HttpTarget):
    """A target whose next call of a verb is lost, before the call or after it."""

    def __init__(self, url: str, verb: str, *, is_done: bool) -> None:
        super().__init__(url, KEY, name="the failing one", wire="vllm")
        self._verb, self._is_done, self._left = verb, is_done, 1

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        if verb != self._verb or not self._left:
            return super().call(verb, timeout_s=timeout_s, **arguments)
        self._left = 0
        if self._is_done:
            super().call(verb, timeout_s=timeout_s, **arguments)
        raise TargetError(self.name, verb, "lost")


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True], ids=["unheard", "answer lost"])
@pytest.mark.parametrize(
    "verb",
    ["init_weight_transfer_engine", "begin_weight_update", "update_weights", "verify_weight_update",
     "end_weight_update"],
)  # fmt: skip
def test_where_one_engine_fails_both_keep_the_old_version_and_the_next_push_lands(urls, model, verb, is_done):
    before = [standing(url) for url in urls]
    targets = [Failing(urls[0], verb, is_done=is_done), HttpTarget(urls[1], KEY, wire="vllm")]
    pusher = WeightPusher(targets, VllmTransport(), timeout_s=PATIENCE)
    digest = train(model)
    with pytest.raises(PushFailed, match="the failing one") as failed:
        pusher.push(model, "lost")
    assert failed.value.stranded == ()
    assert [standing(url) for url in urls] == before
    version = f"{verb} {is_done}"
    assert pusher.push(model, version).digest == digest
    assert [standing(url) for url in urls] == [(version, digest, False)] * 2
    pusher.close()


@pytest.fixture
def router(urls, tmp_path) -> Iterator[BackgroundRouter]:
    http = HttpConfig(port=0, admin_api_key=KEY)
    config = RouterConfig(tuple(urls), http, journal=tmp_path / "journal.json", health_interval_s=0.1)
    with route_in_background(config) as router:
        wait_until(lambda: httpx.get(f"{router.url}/workers", headers=HEADERS).json()["stats"]["num_routable"] == 2)
        yield router


@pytest.mark.slow
@pytest.mark.parametrize("is_one_target", [True, False], ids=["one target", "its workers"])
def test_a_push_goes_through_a_router(urls, model, router, is_one_target):
    one = [HttpTarget(router.url, KEY, wire="vllm")]
    targets = one if is_one_target else targets_behind(router.url, KEY, wire="vllm")
    pusher = WeightPusher(targets, VllmTransport(), timeout_s=PATIENCE)
    for step in ("1", "2"):
        version, digest = f"router-{is_one_target}-{step}", train(model)
        assert pusher.push(model, version).digest == digest
        assert [standing(url) for url in urls] == [(version, digest, False)] * 2
    pusher.close()
    journal = httpx.get(f"{router.url}/weight_update_journal", headers=HEADERS).json()
    assert not journal.get("unresolved")


@pytest.mark.slow
def test_a_router_answers_vllms_calls_for_all_of_its_workers(urls, router):
    with httpx.Client(base_url=router.url, headers=HEADERS, timeout=PATIENCE) as client:
        assert client.get("/get_world_size").json()["world_size"] == 2
        assert client.get("/is_paused").json()["is_paused"] is False
        assert client.post("/pause?mode=keep&clear_cache=false").json()["status"] == "paused"
        assert [standing(url)[2] for url in urls] == [True, True]
        assert client.get("/is_paused").json()["is_paused"] is True
        assert client.post("/reset_prefix_cache").json()["success"] is True
        assert client.post("/abort_requests").json()["aborted"] == 0
        sums = client.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
        compared = client.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()
        assert compared["match"] is True and compared["mismatches"] == []
        # An update that all workers refuse is over, and the next one may begin.
        for _ in range(2):
            assert client.post("/start_weight_update").json()["message"] == "Weight update started"
            refused = client.post("/update_weights", json={"update_info": {"names": []}})
            assert refused.status_code == 400 and refused.json()["error"]["message"]
        assert client.post("/finish_weight_update").status_code == 400
        assert not client.get("/weight_update_journal").json().get("unresolved")
        assert client.post("/resume").json()["status"] == "resumed"
        assert client.get("/weight_info").json()["weight_version"] == standing(urls[0])[0]


# -- the calls ---------------------------------------------------------------------------------------------------------


def test_verbs_that_vllm_has_are_its_calls_and_the_others_none():
    wire = VllmWire()
    assert wire.calls("pause_generation", {"mode": "retract"}) == [
        VllmCall("POST", "/pause?mode=keep&clear_cache=false")
    ]  # fmt: skip
    assert wire.calls("begin_weight_update", {"weight_version": "7", "undo": "tensors", "lease_s": 3.0}) == [
        VllmCall("POST", "/start_weight_update", {})
    ]
    [finish] = wire.calls("end_weight_update", {})
    assert finish == VllmCall("POST", "/finish_weight_update", {"keep_undo": True, "weight_version": "7"})
    for verb in ("verify_weight_update", "abort_weight_update", "revert_weight_update"):
        assert wire.calls(verb, {}) is None


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("pause_generation", {"mode": "in_place"}),
        ("begin_weight_update", {"undo": "none"}),
        ("begin_weight_update", {"digest": "later"}),
        ("begin_weight_update", {"keep_running": True}),
        ("end_weight_update", {"in_flight": "verify"}),
    ],
)
def test_what_vllms_calls_cannot_express_is_refused_by_name(verb, arguments):
    target = HttpTarget("http://127.0.0.1:9", wire="vllm")
    with pytest.raises(TargetError, match="vLLM's wire has no") as refused:
        target.call(verb, timeout_s=1.0, **arguments)
    assert refused.value.kind == "ValueError"
    target.close()
    with pytest.raises(ValueError, match="wire must be"):
        HttpTarget("http://127.0.0.1:9", wire="pigeon")
    with pytest.raises(ValueError, match="packed_buffer_bytes"):
        VllmTransport(packed_buffer_bytes=0)
