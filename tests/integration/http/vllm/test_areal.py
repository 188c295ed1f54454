"""Tests of the paths that AReaL's server adds to vLLM's, in the order of its trainers' calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.clients.gloo_sender import GlooSender

ASK = {
    "prompt": [5, 17, 9], "max_tokens": 400, "logprobs": 0, "return_tokens_as_token_ids": True, "top_k": int(1e8),
    "top_p": 1.0, "temperature": 1.0, "stop_token_ids": [], "ignore_eos": True, "use_beam_search": False,
}  # fmt: skip


@pytest.fixture
def service(make_model, tmp_path) -> Iterator[RolloutService]:
    make_model("qwen3").save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="64 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def client(service) -> Iterator[httpx.Client]:
    server = serve_in_background(service, HttpConfig(port=0))
    with server as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
        client.post("/areal_continue_generation", json={})


def post(client: httpx.Client, path: str, **body: object) -> dict:
    answer = client.post(f"/{path}", json=body)
    assert answer.status_code == 200 and answer.json()["success"] is True, answer.text
    return answer.json()


def begin(client: httpx.Client, answers: list[dict]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=ASK).json()))
    thread.start()
    return thread


def test_a_pause_ends_requests_with_their_tokens_and_holds_those_that_come(client, service, until):
    answers: list[dict] = []
    running = begin(client, answers)
    until(lambda: service.engine.state()["num_running"])
    post(client, "areal_pause_generation")
    running.join(60)
    [choice] = answers.pop()["choices"]
    ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
    assert choice["finish_reason"] == "abort" and len(ids) == len(choice["logprobs"]["token_logprobs"]) < 400
    held = begin(client, answers)
    until(lambda: service.engine.state()["num_waiting"])
    post(client, "areal_pause_generation")  # which ends it, too, with no tokens
    held.join(60)
    [choice] = answers.pop()["choices"]
    assert (choice["finish_reason"], choice["logprobs"]["tokens"]) == ("abort", [])
    post(client, "areal_continue_generation")
    assert not service.engine.is_paused


def test_an_update_over_a_group_tells_its_tensors_first_and_is_committed_when_generation_continues(
    client, service, tmp_path
):
    sender = GlooSender(str(tmp_path / "model"), packed=False)
    init = {name: sender.init_info[name] for name in ("master_address", "rank_offset", "world_size")}
    group = {"group_name": sender.group_name}
    more = {"master_port": str(sender.init_info["master_port"]), "backend": "gloo"}
    refused = client.post("/areal_update_weights_xccl", json={})
    assert refused.status_code == 400 and "/areal_set_update_weight_meta first" in refused.json()["message"]
    joining = threading.Thread(target=sender.join)
    joining.start()
    post(client, "areal_init_weights_update_group", **init | more | group)
    joining.join(60)
    before = service.engine.weight_digest
    post(client, "areal_pause_generation")
    info = sender.update_info
    tensors = {"names": info["names"], "dtypes": info["dtype_names"], "shapes": info["shapes"], **group}
    post(client, "areal_set_update_weight_meta", **tensors)
    sending = threading.Thread(target=sender.send)
    sending.start()
    post(client, "areal_update_weights_xccl")
    sending.join(60)
    assert service.engine.weight_digest == before != sender.digest
    post(client, "areal_continue_generation")
    assert service.engine.weight_digest == sender.digest
    sender.close()


def test_a_folder_is_read_at_once_and_requests_that_run_end_with_what_they_have(
    client, service, make_model, tmp_path, until
):
    answers: list[dict] = []
    running, before = begin(client, answers), service.engine.weight_digest
    until(lambda: service.engine.state()["num_running"])
    make_model("qwen3", seed=7).save_pretrained(tmp_path / "newer")
    post(client, "areal_update_weights", model_path=str(tmp_path / "newer"))
    running.join(60)
    assert answers[0]["choices"][0]["finish_reason"] == "abort" and service.engine.weight_digest != before


def test_adapters_as_tensors_are_refused_by_name(client):
    refused = client.post("/areal_update_weights_lora_xccl", json={})
    assert refused.status_code == 501 and "weight_update_mode=disk" in refused.json()["message"]
