"""Tests of health by the loop's heartbeat, and of the server's reports about itself."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

HEALTH = ("/health", "/health_generate", "/ping")


@pytest.fixture
def service(make_model):
    service = RolloutService(Engine(make_model("qwen2"), EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


def _healthy(client: httpx.Client) -> bool:
    answers = [client.get(path) for path in HEALTH]
    assert all(answer.content == b"" for answer in answers)
    statuses = {answer.status_code for answer in answers}
    assert statuses in ({200}, {503})
    return statuses == {200}


def test_health_is_good_while_idle_paused_released_generating_and_training(client, service):
    assert _healthy(client) and client.get("/ready").status_code == 200
    client.post("/pause_generation", json={})
    assert _healthy(client) and client.get("/ready").status_code == 503
    client.post("/release_memory_occupation", json={})
    assert _healthy(client)
    client.post("/resume_memory_occupation", json={})
    client.post("/continue_generation", json={})
    with service.rollout():
        [completion] = service.engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, ignore_eos=True))
        assert len(completion.token_ids) == 8
    with service.training_numerics():
        assert _healthy(client) and client.get("/ready").status_code == 200


def test_health_waits_for_nobody_who_has_the_engine(client, service):
    engaged, release = threading.Event(), threading.Event()
    holder = threading.Thread(
        target=service.engine.between_steps, args=("hold", lambda: (engaged.set(), release.wait(10)))
    )
    holder.start()
    engaged.wait()
    started = time.monotonic()
    assert _healthy(client)
    assert time.monotonic() - started < 9
    release.set()
    holder.join()


def test_health_is_bad_when_the_loop_has_failed_and_good_again_when_it_is_restarted(
    client, service, monkeypatch, until
):
    def fail() -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(service.engine.gate, "step", fail)
    with service.rollout():
        ids = service.engine.add([1, 2, 3])
        until(lambda: service.engine.failure is not None)
        assert not _healthy(client) and client.get("/ready").status_code == 503
        monkeypatch.undo()
        service.engine.start()
        assert _healthy(client)
        service.engine.abort_request(ids[0])


def test_a_step_that_does_not_end_counts_as_a_loop_that_has_failed(service, monkeypatch, until):
    release = threading.Event()
    step = service.engine.gate.step
    monkeypatch.setattr(service.engine.gate, "step", lambda most: (release.wait(10), step(most)))
    config = HttpConfig(port=0, stall_timeout_s=0.2)
    with serve_in_background(service, config) as server, httpx.Client(base_url=server.url) as client:
        assert _healthy(client)
        with service.rollout():
            service.engine.add([1, 2, 3], SamplingParams(max_new_tokens=1))
            until(lambda: client.get("/health").status_code == 503)
            release.set()
            until(lambda: client.get("/health").status_code == 200)


def test_health_is_bad_while_the_server_is_ending(client, server):
    server.app.state.is_closing = True
    assert not _healthy(client)


def test_model_info_has_sglangs_keys_and_the_weights_identity(client, service):
    service.commit_in_place("7", source=service.engine.model.module.named_parameters())
    info = client.get("/model_info").json()
    for key in ("model_path", "served_model_name", "tokenizer_path", "is_generation", "preferred_sampling_params",
                "weight_version", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode",
                "has_image_understanding", "has_audio_understanding", "model_type", "architectures"):  # fmt: skip
        assert key in info
    assert (info["weight_version"], info["weight_digest"]) == ("7", service.model_digest())
    assert (info["model_type"], info["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert (info["is_generation"], info["disaggregation_mode"]) == (True, "null")
    [stage] = info["stages"]
    assert (stage["stage"], stage["weight_version"], stage["engine_paused"]) == ("rollout", "7", False)
    assert client.post("/model_info", json={}).json() == client.post("/get_model_info").json() == info
    assert client.post("/model_info", json={"stages": ["talker"]}).json()["skipped"]
    assert client.get("/get_weight_version").json() == {"weight_version": "7"}


def test_server_info_is_flat_has_sglangs_names_and_echoes_what_it_was_launched_with(service):
    extra = {"mem_fraction_static": 0.7, "enable_draft_weights_cpu_backup": True, "tp_size": 1, "custom": [1, {"a": 2}]}
    config = HttpConfig(port=0, model_name="policy", model_path="/models/p", extra_server_args=extra)
    with serve_in_background(service, config) as server:
        info = httpx.get(f"{server.url}/server_info").json()
        assert httpx.get(f"{server.url}/get_server_info").json().keys() == info.keys()
    expected = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dp_size": 1, "moe_dp_size": 1, "num_gpus": 0,
                "disaggregation_mode": "null", "disaggregation_bootstrap_port": None, "encoder_only": False,
                "enable_memory_saver": True, "enable_return_routed_experts": False, "dtype": "float32",
                "model_path": "/models/p", "served_model_name": "policy", "frontend": "python", "status": "ready",
                "max_total_tokens": 32 * 16, **extra}  # fmt: skip
    assert {key: info[key] for key in expected} == expected
    assert info["scheduler_info"]["max_total_num_tokens"] == 32 * 16 and info["startup_time"] <= time.time()
    [internal] = info["internal_states"]
    assert internal["effective_max_running_requests_per_dp"] == 4 and internal["world_size"] == 1
    assert internal["memory_usage"]["token_capacity"] == 32 * 16 and "num_free_blocks" in internal


def test_models_are_listed_and_found_by_name(service):
    config = HttpConfig(port=0, model_name="org/policy", model_path="/models/p")
    with serve_in_background(service, config) as server, httpx.Client(base_url=server.url) as client:
        [card] = client.get("/v1/models").json()["data"]
        assert client.get("/v1/models/org/policy").json() == card
        assert client.get("/v1/models/policy").status_code == 404
    assert (card["id"], card["object"], card["root"], card["parent"]) == ("org/policy", "model", "/models/p", None)
    assert card["max_model_len"] == 512 and card["created"] <= time.time()


def test_loads_count_who_runs_and_who_waits(client, service):
    def load() -> dict:
        report = client.get("/v1/loads", params={"include": "core"}).json()
        assert {"timestamp", "version", "accelerator", "num_accelerators"} < report.keys()
        [entry] = report["loads"]
        return entry

    idle = load()
    keys = {"timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
            "num_used_tokens", "num_total_tokens", "num_active_tokens", "max_total_num_tokens", "max_running_requests",
            "token_usage", "gen_throughput", "cache_hit_rate", "utilization"}  # fmt: skip
    assert keys <= idle.keys() and idle["num_running_reqs"] + idle["num_waiting_reqs"] == 0
    service.engine.add([1] * 10)
    service.engine.add([2] * 7)
    waiting = load()
    assert (waiting["num_waiting_reqs"], waiting["num_waiting_uncached_tokens"]) == (2, 17)
    text = client.get("/v1/loads", params={"format": "prometheus"}).text
    assert 'sglang:num_waiting_reqs{dp_rank="0"} 2\n' in text
    client.post("/abort_request", json={"abort_all": True})
    assert load()["num_waiting_reqs"] == 0


def test_a_load_that_there_is_not_is_a_400_naming_the_field(client):
    for name, value in (("include", "cores"), ("dp_rank", "1"), ("dp_rank", "x"), ("format", "xml")):
        answer = client.get("/v1/loads", params={name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_the_state_report_is_the_services(client, service):
    state = client.get("/state").json()
    assert json.loads(json.dumps(service.state())).keys() < state.keys()
    assert (state["pause_seconds_left"], state["update_age_s"]) == (None, None)
    assert client.post("/state").status_code == 405


def test_reports_change_nothing(client, service):
    service.engine.add([1, 2, 3])
    before = service.state()
    for path in ("/model_info", "/server_info", "/v1/models", "/v1/loads", "/state", "/get_weight_version", "/health"):
        assert client.get(path).status_code == 200
    assert service.state() == before
