"""Tests of a server whose memory was released and allocated again: its weights come back, or it says that they have
not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

BODY = {
    "input_ids": [3, 14, 15, 92],
    "sampling_params": {"max_new_tokens": 6, "sampling_seed": 1, "ignore_eos": True},
    "return_logprob": True,
}
LOST = "weights hold nothing since they were released"
Serve = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def folder(make_model, tmp_path):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def serve(folder) -> Serve:
    """Return a function that serves the folder, with settings of the server, and yields a client."""

    @contextmanager
    def run(reload_on_resume: bool = True, **http: object) -> Iterator[httpx.Client]:
        engine = Engine(folder, EngineConfig(kv_cache="32 blocks", max_num_seqs=4))
        service = RolloutService(engine, ServiceConfig(reload_on_resume=reload_on_resume))
        with (
            serve_in_background(service, HttpConfig(port=0, **http)) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            yield client
        service.close()

    return run


def answer(client: httpx.Client) -> tuple:
    reply = client.post("/generate", json=BODY)
    assert reply.status_code == 200, reply.text
    reply = reply.json()
    meta = reply["meta_info"]
    return reply["output_ids"], meta["output_token_logprobs"], meta["weight_version"]


def release_and_resume(client: httpx.Client) -> None:
    for verb in ("release", "resume"):
        assert client.post(f"/{verb}_memory_occupation", json={}).status_code == 200


def test_a_server_reads_its_folder_again(serve):
    with serve() as client:
        client.post("/update_weight_version", json={"new_version": "7"})
        before = answer(client)
        digest = client.post("/finish_digest", json={}).json()["weight_digest"]
        for _ in range(2):
            assert client.post("/release_memory_occupation", json={}).status_code == 200
            assert client.get("/model_info").json()["weight_digest"] is None, "nothing has this digest"
            assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
            assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
            assert answer(client) == before
            info = client.get("/model_info").json()
            assert (info["weight_version"], client.get("/health_generate").status_code) == ("7", 200)
            assert info["weight_digest"] and digest in (None, info["weight_digest"])


def test_a_folder_that_an_update_has_read_is_read_again(serve, make_model, tmp_path):
    model = make_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "second")
    with serve() as client:
        first = answer(client)
        body = {"model_path": str(tmp_path / "second"), "weight_version": "2"}
        assert client.post("/update_weights_from_disk", json=body).status_code == 200
        before = answer(client)
        assert before != first
        release_and_resume(client)
        assert answer(client) == before
        # Further weights on top of a folder's are no folder's: they are lost.
        partly = {"model_path": str(tmp_path / "second")}
        client.post("/begin_weight_update", json={"weight_version": "3"})
        assert client.post("/update_weights_from_disk", json=partly).status_code == 200
        assert client.post("/end_weight_update", json={}).status_code == 200
        assert answer(client)[2] == "3"
        release_and_resume(client)
        assert answer(client)[2] == "3"


def change(folder, make_model) -> None:
    model = make_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder, make_model: shutil.rmtree(folder), "could not be read"),
        (change, "it has other weights than those that were released"),
        (lambda folder, make_model: (folder / "model.safetensors").write_bytes(b"no"), "could not be read"),
    ],
    ids=["gone", "changed", "broken"],
)
def test_a_folder_that_has_the_weights_no_more_is_not_taken_for_them(serve, folder, make_model, spoil, says, caplog):
    with serve(refusal_timeout_s=0.2) as client:
        before = answer(client)
        client.post("/release_memory_occupation", json={})
        model = make_model("qwen2")
        spoil(folder, make_model)
        assert client.post("/resume_memory_occupation", json={}).status_code == 200
        assert says in caplog.text
        refused = client.get("/health_generate")
        assert refused.status_code == 503 and LOST in refused.text
        assert client.post("/generate", json=BODY).status_code == 503
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        assert client.post("/update_weights_from_disk", json={"model_path": str(folder)}).status_code == 200
        assert answer(client) == before


def test_requests_wait_for_lost_weights_for_a_limited_time_and_are_seen(serve, folder, caplog, until):
    with serve(reload_on_resume=False, refusal_timeout_s=1.5) as client:
        before = answer(client)
        client.post("/finish_digest", json={})
        release_and_resume(client)
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(client.post("/generate", json=BODY)))
        thread.start()
        until(lambda: client.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 1)
        refused = client.get("/health_generate")
        assert refused.status_code == 503 and LOST in refused.text
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200, "the process lives"
        assert client.get("/model_info").json()["weight_digest"] is None
        thread.join(30)
        assert replies[0].status_code == 503
        assert LOST in replies[0].text and "refusal_timeout_s" in replies[0].text
        assert caplog.text.count("requests wait: ") == 1
        until(lambda: client.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0)
        # A client that streams gets the reason as its stream's last event.
        with client.stream("POST", "/generate", json={**BODY, "stream": True}) as stream:
            assert LOST in "".join(stream.iter_text())
        assert client.post("/update_weights_from_disk", json={"model_path": str(folder)}).status_code == 200
        assert client.get("/health_generate").status_code == 200
        assert answer(client) == before


def test_a_trainer_that_resumes_the_weights_first_finds_a_healthy_server(serve, folder):
    """Monitors kill a server after one bad answer."""
    with serve(reload_on_resume=False) as client:
        before = answer(client)
        statuses = [client.post("/release_memory_occupation", json={}).status_code]
        for verb, body in (
            ("resume_memory_occupation", {"tags": ["weights"]}),
            ("update_weights_from_disk", {"model_path": str(folder), "flush_cache": False}),
            ("resume_memory_occupation", {"tags": ["kv_cache"]}),
        ):
            statuses.append(client.get("/health_generate").status_code)
            statuses.append(client.post(f"/{verb}", json=body).status_code)
        assert statuses == [200] * 7
        assert answer(client) == before


def test_requests_that_wait_while_an_update_is_under_way_wait_on(serve, folder):
    with serve(reload_on_resume=False, refusal_timeout_s=0.2) as client:
        before = answer(client)
        release_and_resume(client)
        client.post("/begin_weight_update", json={})
        replies: list[tuple] = []
        thread = threading.Thread(target=lambda: replies.append(answer(client)))
        thread.start()
        assert client.get("/health_generate").status_code == 200
        thread.join(1.0)
        assert not replies and thread.is_alive(), "it waits for the update"
        assert client.post("/update_weights_from_disk", json={"model_path": str(folder)}).status_code == 200
        assert client.post("/end_weight_update", json={}).status_code == 200
        thread.join(30)
        assert replies == [before]
