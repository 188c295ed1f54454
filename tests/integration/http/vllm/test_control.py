"""Tests of vLLM's calls that pause, sleep and abort."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.disconnect import unless_gone
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.http.vllm import control
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import held_steps, soon, submit

SHORT = {"token_ids": [5, 17, 9], "sampling_params": {"max_tokens": 8, "seed": 3, "ignore_eos": True}}
PATIENCE = 60


@pytest.fixture
def service(make_model, tmp_path) -> Iterator[RolloutService]:
    make_model("qwen3").save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="64 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def clients(service) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Yield clients with the administrator's key and with a user's."""
    with serve_in_background(service, HttpConfig(port=0, api_key="user", admin_api_key="admin")) as server:
        made = [
            httpx.Client(base_url=server.url, timeout=PATIENCE, headers={"Authorization": f"Bearer {key}"})
            for key in ("admin", "user")
        ]
        with made[0], made[1]:
            yield made[0], made[1]
            made[0].post("/wake_up")
            made[0].post("/resume")


def answer(client: httpx.Client, **fields: object) -> list[int]:
    reply = client.post("/inference/v1/generate", json={**SHORT, **fields})
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    return choice["token_ids"]


def begin(client: httpx.Client, answers: list[dict], **params: object) -> threading.Thread:
    body = {**SHORT, "sampling_params": SHORT["sampling_params"] | params}

    def ask() -> None:
        answers.append(client.post("/inference/v1/generate", json=body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_each_mode_of_a_pause_does_what_its_name_says(clients, service, until, monkeypatch, mode):
    admin, user = clients
    is_asked, pause = threading.Event(), service.pause_generation

    def noted(*arguments: object, **options: object) -> None:
        is_asked.set()
        pause(*arguments, **options)

    monkeypatch.setattr(service, "pause_generation", noted)
    alone = answer(user)
    answers: list[dict] = []
    with held_steps(service.engine) as allowed:
        running = begin(user, answers, max_tokens=None)
        allowed.release(5)
        until(lambda: service.engine.num_running == 1)
        pausing = submit(admin.post, f"/pause?mode={mode}&clear_cache=false", content=b"not read")
        until(lambda: mode == "wait" or is_asked.is_set())  # no step that the pause could come too late for
        until(lambda: service.engine.is_paused or allowed.release())
    reply = soon(pausing).json()
    engine_mode = "abort" if mode == "abort" else "retract"
    assert reply == {"status": "paused", "mode": mode, "engine_mode": engine_mode}
    assert user.get("/is_paused").json() == {"is_paused": True}
    waiting = begin(user, waiting_answers := [])
    if mode == "keep":
        assert not answers
        assert admin.post("/resume").json() == {"status": "resumed"}
    running.join(PATIENCE)
    [choice] = answers[0]["choices"]
    room = service.engine.max_model_len - 3
    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert (len(choice["token_ids"]) < room) == (mode == "abort")
    assert choice["token_ids"][:8] == alone[: len(choice["token_ids"])]
    assert mode == "keep" or (waiting.is_alive() and not waiting_answers)
    admin.post("/resume")
    waiting.join(PATIENCE)
    assert waiting_answers[0]["choices"][0]["token_ids"] == alone
    assert user.get("/is_paused").json() == {"is_paused": False}


def test_waiting_for_those_that_run_does_not_wait_for_those_that_come(clients, service, until, monkeypatch):
    admin, user = clients
    waits_began, wait_until = [], service.engine.driver.wait_until

    def noted(is_done) -> None:
        waits_began.append(1)
        wait_until(is_done)

    monkeypatch.setattr(service.engine.driver, "wait_until", noted)
    answers: list[dict] = []
    first = begin(user, answers, max_tokens=None)
    until(lambda: service.engine.num_running == 1)
    replies: list[httpx.Response] = []
    pausing = threading.Thread(target=lambda: replies.append(admin.post("/pause?mode=wait")))
    pausing.start()
    until(lambda: waits_began)
    later: list[dict] = []
    others = [begin(user, later, max_tokens=None, seed=seed) for seed in range(12)]  # more than run at a time
    pausing.join(PATIENCE)
    assert replies[0].status_code == 200
    first.join(PATIENCE)
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    assert len(later) < len(others), "they go on after the pause"
    admin.post("/resume")
    for other in others:
        other.join(PATIENCE)
    assert {reply["choices"][0]["finish_reason"] for reply in later} == {"length"}


def test_pauses_that_wait_leave_threads_to_the_calls_that_end_them(service, until, monkeypatch):
    waits_began, wait_for_running = [], control._wait_for_running

    def noted(*arguments: Any) -> None:
        waits_began.append(1)
        wait_for_running(*arguments)

    monkeypatch.setattr(control, "_wait_for_running", noted)
    limits, answers = HttpConfig(port=0, max_admin_calls=1), list[dict]()
    with serve_in_background(service, limits) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        with held_steps(service.engine) as allowed:
            running = begin(client, answers, max_tokens=None)
            allowed.release(5)
            until(lambda: service.engine.num_running == 1)
            pauses = [submit(client.post, "/pause?mode=wait") for _ in range(3)]
            until(lambda: waits_began)
            resumed = submit(client.post, "/resume")
            until(lambda: resumed.done() or allowed.release())
            assert soon(resumed).status_code == 200 and not answers
        running.join(PATIENCE)
        assert {soon(pause).status_code for pause in pauses} <= {200, 409}
        client.post("/resume")


def test_a_pause_that_waits_does_not_come_after_a_resume(clients, service, until, monkeypatch):
    admin, _ = clients
    wait_until = service.engine.driver.wait_until

    def resumed(is_done: Callable[[], bool]) -> None:
        monkeypatch.setattr(service.engine.driver, "wait_until", wait_until)
        assert admin.post("/resume").status_code == 200
        wait_until(is_done)

    monkeypatch.setattr(service.engine.driver, "wait_until", resumed)
    answer = admin.post("/pause?mode=wait")
    assert answer.status_code == 409 and "continued" in answer.text
    assert not service.engine.is_paused


def test_a_pause_that_waits_does_not_come_after_its_client_has_left(clients, service, until, monkeypatch):
    admin, user = clients
    was_noticed = threading.Event()

    async def noticed(request: Request, work: Coroutine[Any, Any, object]) -> object:
        try:
            return await unless_gone(request, work)
        except ClientDisconnect:
            was_noticed.set()
            raise

    monkeypatch.setattr(control, "unless_gone", noticed)
    service.engine.weights.refuse_sampling("held by a test")  # the request cannot end
    answers: list[dict] = []
    running = begin(user, answers, max_tokens=None)
    until(lambda: service.engine.has_work)
    num_waiting = service.engine.driver._waiters.num_waiting
    with pytest.raises(httpx.ReadTimeout):
        admin.post("/pause?mode=wait", timeout=0.5)
    assert was_noticed.wait(PATIENCE)
    service.engine.weights.allow_sampling("torn")
    running.join(PATIENCE)
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    until(lambda: service.engine.driver._waiters.num_waiting <= num_waiting)
    assert not service.engine.is_paused


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_sleep_releases_memory_by_its_level_and_a_wake_up_brings_it_back(clients, service, level):
    admin, user = clients
    before = answer(user)
    assert admin.post(f"/sleep?level={level}").json() == {"status": "sleeping", "level": level}
    assert user.get("/is_sleeping").json() == {"is_sleeping": True}
    state = user.get("/state").json()
    assert (state["kv_bytes"] > 0, state["holds_weights"], state["paused"]) == (level == 0, level < 2, True)
    if level:
        reply = admin.post("/wake_up?tags=weights").json()
        assert reply == {"status": "sleeping", "tags": ["weights"]}
        reply = admin.post("/wake_up?tags=kv_cache").json()
        assert reply == {"status": "awake", "tags": ["kv_cache"]}
    else:
        assert admin.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert user.get("/is_sleeping").json() == {"is_sleeping": False}
    assert answer(user) == before


def test_weights_that_come_after_a_wake_up_are_sampled_from_without_a_further_call(clients, service, tmp_path):
    admin, user = clients
    before = answer(user)
    for call in ("/start_weight_update", "/finish_weight_update"):  # the weights are those of no folder now
        assert admin.post(call, json={}).status_code == 200
    assert admin.post("/sleep?level=2").status_code == 200
    assert admin.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert user.get("/is_paused").json() == {"is_paused": False}
    assert service.engine.refusal is not None  # requests wait
    answers: list[dict] = []
    waiting = begin(user, answers)
    body = {"model_path": str(tmp_path / "model"), "weight_version": "9"}
    assert admin.post("/update_weights_from_disk", json=body).status_code == 200
    waiting.join(PATIENCE)
    assert [reply["choices"][0]["token_ids"] for reply in answers] == [before]
    assert answer(user) == before


@pytest.mark.parametrize(("path", "body", "whole", "part"), [
    ("/v1/completions", {"prompt": [[5], [6]], "request_id": "q", "n": 2, "max_tokens": 40}, "cmpl-q", "cmpl-q_1"),
    ("/generate", {"input_ids": [[5], [6]], "rid": "z", "sampling_params": {"n": 2, "max_new_tokens": 40}}, "z", "z_1"),
])  # fmt: skip
def test_a_request_of_several_prompts_is_aborted_by_its_id_or_by_those_of_its_prompts(
    clients, service, until, path, body, whole, part
):  # fmt: skip
    admin, user = clients
    for name, num in ((part, 2), (whole, 4)):
        service.engine.pause_generation("in_place")
        asked = submit(user.post, path, json=body)
        until(lambda: service.engine.state()["num_waiting"] == 4)
        assert admin.post("/abort_requests", json={"request_ids": [name]}).json()["aborted"] == num
        service.engine.continue_generation()
        answer = soon(asked).json()
        if path == "/generate":
            reasons = [one["meta_info"]["finish_reason"]["type"] for one in answer]
        else:
            reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert reasons[4 - num :] == ["abort"] * num and reasons.count("abort") == num


def test_requests_are_aborted_by_name_or_all(clients, service, until):
    admin, user = clients
    answers: list[dict] = []
    threads = [begin(user, answers, max_tokens=None) for _ in range(2)]
    until(lambda: service.engine.num_running == 2)
    ids = user.get("/state").json()["running_ids"]
    assert admin.post("/abort_requests", json={"request_ids": [ids[0], "nobody"]}).json() == {
        "status": "aborted", "aborted": 1
    }  # fmt: skip
    assert admin.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 1}
    for thread in threads:
        thread.join(PATIENCE)
    assert [reply["choices"][0]["finish_reason"] for reply in answers] == ["abort", "abort"]
    assert admin.post("/abort_requests").json()["aborted"] == 0


def test_the_prefix_cache_is_emptied_also_under_running_requests_where_asked(clients, service, until):
    admin, user = clients
    answers: list[dict] = []
    running = begin(user, answers, max_tokens=None)
    until(lambda: service.engine.num_running == 1)
    assert admin.post("/reset_prefix_cache").json() == {"success": False}
    assert admin.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
    running.join(PATIENCE)
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    assert admin.post("/reset_prefix_cache").json() == {"success": True}


def test_reports_and_keys(clients):
    admin, user = clients
    assert user.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert user.get("/weight_info").json() == {"weight_version": "default"}
    for path in ("/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/reset_prefix_cache"):
        refused = user.post(path)
        assert refused.status_code == 403 and set(refused.json()["error"]) == {"message", "type", "param", "code"}
    for path, param in (("/pause?mode=nap", "mode"), ("/sleep?level=3", "level"), ("/sleep?level=x", "level"),
                        ("/sleep?mode=nap", "mode"), ("/wake_up?tags=all", None)):  # fmt: skip
        refused = admin.post(path)
        assert refused.status_code == 400
        assert param is None or refused.json()["error"]["param"] == param
    assert user.get("/is_paused").json() == {"is_paused": False}


def test_the_kv_pools_memory_is_released_and_comes_back(clients, service, until):
    admin, user = clients
    before = answer(user)
    running = begin(user, answers := [], max_tokens=None)
    until(lambda: service.engine.num_running == 1)
    assert admin.post("/release_kv_cache_memory").status_code == 400, "its sequences hold KV"
    running.join(PATIENCE)
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    admin.post("/pause?mode=keep")
    assert admin.post("/release_kv_cache_memory").json() == {"status": "kv_cache_released"}
    state = user.get("/state").json()
    assert (state["kv_bytes"], state["holds_weights"]) == (0, True)
    assert admin.post("/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
    assert answer(user) == before


def test_the_prefix_cache_takes_skyrls_body(clients, service, until):
    admin, user = clients
    running = begin(user, answers := [], max_tokens=None)
    until(lambda: service.engine.num_running == 1)
    assert admin.post("/reset_prefix_cache", json={"reset_running_requests": False}).json() == {"success": False}
    assert admin.post("/reset_prefix_cache", json={"reset_running_requests": True}).json() == {"success": True}
    running.join(PATIENCE)
    assert answers[0]["choices"][0]["finish_reason"] == "length"


def test_checksums_are_compared_with_those_of_the_caller(clients, service):
    admin, _ = clients
    sums = admin.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    assert sums == service.weights_checker("checksum")["tensors"] and len(set(map(len, sums.values()))) == 1
    compare = {"action": "compare", "baseline": sums}
    assert admin.post("/weight_checker", json=compare).json() == {"match": True, "mismatches": []}
    names = sorted(sums)
    baseline = {name: sums[name] for name in names[1:]} | {names[1]: "00", "another": "11"}
    found = admin.post("/weight_checker", json={**compare, "baseline": baseline}).json()
    assert found == {"match": False, "mismatches": sorted([names[0], names[1], "another"])}
    admin.post("/pause?mode=keep")
    assert admin.post("/weight_checker", json=compare).json()["match"]
    admin.post("/resume")


def test_reset_weights_generate_nothing_before_they_are_written_again(clients, service, make_model):
    admin, user = clients
    before = answer(user)
    sums = admin.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    assert user.post("/weight_checker", json={"action": "reset"}).status_code == 403
    assert admin.post("/weight_checker", json={"action": "reset"}).json() == {"status": "reset"}
    found = admin.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()
    assert not found["match"] and len(found["mismatches"]) > len(sums) / 2
    assert service.engine.refusal is not None
    service.update_weights_from_named_tensors(make_model("qwen3").named_parameters())
    service.commit_implicit_update()
    assert admin.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()["match"]
    assert answer(user) == before


def test_wrong_checks_and_updates_of_a_draft_model_are_refused_in_vllms_shape(clients):
    admin, _ = clients
    for path, body, param in (
        ("/weight_checker", {"action": "snapshot"}, "action"),
        ("/weight_checker", {}, "action"),
        ("/weight_checker", {"action": "compare"}, "baseline"),
        ("/weight_checker", {"action": "compare", "baseline": ["a"]}, "baseline"),
        ("/start_draft_weight_update", {}, None),
    ):
        refused = admin.post(path, json=body)
        assert refused.status_code == 400, path
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert "no draft model" in admin.post("/start_draft_weight_update").json()["error"]["message"]
