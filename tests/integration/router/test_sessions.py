"""Tests of sessions behind a router: each lives on one worker, which its id names."""

from __future__ import annotations

import asyncio
import json
import threading
from http.client import HTTPConnection

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.session_paths import path_of
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.router.calls import WorkerCall
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.fleet.worker import Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry
from lockstep.integration.router.server import route_in_background
from lockstep.integration.router.sessions import home_of, opening
from lockstep.tests.integration.http.conversations.conftest import make_service
from lockstep.tests.support.fake_workers import FakeWorker, Fleet, dies, settled, wait_until


def answering() -> FakeWorker:
    """Make a worker that opens sessions, and names itself in its answers."""
    worker = FakeWorker()
    worker.answers["/open_session"] = lambda body: (200, body["session_id"])
    worker.answers["/close_session"] = lambda body: (200, None)
    worker.answers["/session_info"] = lambda body: (200, {"at": worker.url})
    return worker


@pytest.fixture
def fleet(make_fleet) -> Fleet:
    return make_fleet([answering(), answering()])


def opened(fleet: Fleet, **body: object) -> str:
    answer = fleet.post("/open_session", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(answer) -> tuple[int, str, str]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["message"]


def home(fleet: Fleet, id: str) -> FakeWorker:
    return next(worker for worker in fleet.workers if fleet.report(worker)["id"] == id.partition(".")[0])


def test_requests_of_a_session_go_to_its_worker_and_sessions_to_all(fleet):
    ids = [opened(fleet) for _ in range(6)]
    assert {home(fleet, id).url for id in ids} == {worker.url for worker in fleet.workers}
    for id in ids:
        for path, body in (
            ("/generate", {"input_ids": [1, 2], "session_params": {"id": id}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "session_params": {"id": id}}),
            ("/v1/chat/completions", {"prompt_token_ids": [1], "session_params": {"id": id}, "pad": "x" * (1 << 20)}),
        ):
            answer = fleet.post(path, body)
            assert answer.json()["text"] == home(fleet, id).url
        assert fleet.http.get("/session_info", params={"session_id": id}).json() == {"at": home(fleet, id).url}
        assert fleet.post("/close_session", {"session_id": id}).status_code == 200
        assert {"session_id": id} in home(fleet, id).asked("/close_session")


def test_a_name_of_the_callers_stands_behind_the_workers(fleet):
    id = opened(fleet, session_id="my own.name", capacity_of_str_len=10, pin=True)
    assert id.endswith(".my own.name")
    [body] = home(fleet, id).asked("/open_session")
    assert body == {"session_id": id, "capacity_of_str_len": 10, "pin": True}
    for wrong in ("", "x" * 201, "a\nb", 5):
        assert error(fleet.post("/open_session", {"session_id": wrong}))[0] == 400


@pytest.mark.parametrize("path", ["/open_session", "/close_session"])
def test_bodies_that_open_and_close_sessions_are_as_short_as_a_worker_wants_them(make_fleet, path):
    """The router reads them, and writes the one that opens a session anew for each worker that it is sent to."""
    fleet = make_fleet([answering()], http=HttpConfig(port=0, max_control_body_bytes=1000))
    assert fleet.post(path, {"session_id": "a", "pad": "x" * 900}).status_code in (200, 404)
    assert fleet.post(path, {"session_id": "a", "pad": "x" * 1100}).status_code == 413
    assert fleet.post("/generate", {"text": "x" * 1100}).status_code == 200


@pytest.mark.parametrize("body", ['{"a": [1.5, "\\u00e9"], "session_id": "b"}', '{"session_id": "b"}', "{}", ""])
def test_a_session_is_opened_with_the_clients_fields_and_the_routers_id(body):
    opens = asyncio.run(opening(WorkerCall("POST", "/open_session", "", (), body.encode()), 1000))
    values = json.loads(opens.body_at(Worker("http://w:1", "w")))
    own = json.loads(body or "{}")
    assert values == own | {"session_id": f"w.{own.get('session_id', opens.name)}"}


def test_a_router_that_is_started_again_finds_a_session(fleet, tmp_path):
    id = opened(fleet)
    url = home(fleet, id).url
    fleet.router.close()
    again = Fleet(tmp_path, fleet.workers)
    try:
        answer = again.post("/generate", {"input_ids": [1], "session_params": {"id": id}})
        assert answer.json()["text"] == url
    finally:
        again.http.close()
        again.router.close()


def test_a_session_of_a_dead_worker_is_lost_and_says_so(fleet):
    id = opened(fleet)
    worker, url = home(fleet, id), home(fleet, id).url
    worker.stop()
    wait_until(lambda: fleet.stats()["num_healthy"] == 1, "one is dead")
    for path, body in (("/generate", {"input_ids": [1]}), ("/v1/chat/completions", {"input_ids": [1]})):
        status, code, message = error(fleet.post(path, {**body, "session_params": {"id": id}}))
        assert (status, code) == (404, "session_lost") and url in message
    assert error(fleet.post("/close_session", {"session_id": id}))[:2] == (404, "session_lost")
    assert fleet.post("/generate", {"input_ids": [1]}).status_code == 200, "others go on"


@pytest.mark.parametrize("is_seen", [True, False])  # by a probe, before the request
def test_a_session_of_a_worker_that_drains_is_lost_at_once_and_can_be_read_until_its_end(make_fleet, is_seen):
    fleet = make_fleet([answering(), answering()], health_interval_s=0.05 if is_seen else 60.0)
    id = opened(fleet)
    worker = home(fleet, id)
    worker.is_draining = True
    if is_seen:
        wait_until(lambda: fleet.report(worker)["status"] == "draining", "it drains")
    else:
        refused = {"success": False, "error": {"message": "no", "code": "draining"}}
        worker.generate = lambda handler, body: handler.reply(503, refused)
    for path, body in (("/generate", {"input_ids": [1]}), ("/v1/chat/completions", {"input_ids": [1]})):
        status, code, message = error(fleet.post(path, {**body, "session_params": {"id": id}}))
        assert (status, code) == (404, "session_lost")
        assert worker.url in message and "drains" in message and "/session_info" in message
    assert fleet.http.get("/session_info", params={"session_id": id}).json() == {"at": worker.url}
    assert fleet.post("/close_session", {"session_id": id}).status_code == 200
    assert fleet.post("/generate", {"input_ids": [1]}).json()["text"] != worker.url


def test_an_id_that_no_worker_gave_is_unknown(fleet):
    for id in ("mine", "x.mine", "", "00000000-0000-0000-0000-00000000000g.a"):
        status, code, message = error(fleet.post("/generate", {"input_ids": [1], "session_params": {"id": id}}))
        assert (status, code) == (404, "session_unknown") and "/open_session" in message
    other = "00000000-0000-5000-8000-000000000000.mine"
    assert error(fleet.post("/close_session", {"session_id": other}))[1] == "session_lost"


def test_a_request_on_a_session_does_not_move_to_another_worker(fleet):
    id = opened(fleet)
    worker = home(fleet, id)
    worker.generate = dies
    status, code, message = error(fleet.post("/generate", {"input_ids": [1], "session_params": {"id": id}}))
    assert (status, code) in ((502, "workers_failed"), (404, "session_lost")) and worker.url in message
    others = [one for one in fleet.workers if one is not worker]
    assert not any(one.asked("/generate") for one in others) and len(worker.asked("/generate")) == 1


@pytest.mark.parametrize("refusal", ["draining", "overloaded"])
def test_a_session_that_a_worker_does_not_take_is_opened_at_another_one(make_fleet, refusal):
    fleet = make_fleet([answering(), answering()], health_interval_s=60.0)  # no probe sees it before a request does
    refusing, other = fleet.workers
    told = {"success": False, "error": {"message": "no", "code": refusal}}
    refusing.answers["/open_session"] = (503, told)
    ids = [opened(fleet, session_id=f"s{number}") for number in range(4)]
    assert {home(fleet, id).url for id in ids} == {other.url} and ids[0].endswith(".s0")
    assert len(refusing.asked("/open_session")) > 0
    assert fleet.report(refusing)["status"] == ("draining" if refusal == "draining" else "alive")


def test_a_session_is_opened_at_another_worker_where_one_has_ended(make_fleet):
    fleet = make_fleet([answering(), answering()], health_interval_s=60.0)
    failing, other = fleet.workers
    failing.stop()
    assert {home(fleet, opened(fleet)).url for _ in range(3)} == {other.url}


def test_a_request_waits_for_its_own_worker_and_others_do_not_wait_for_it(make_fleet):
    worker, other = answering(), answering()
    worker.is_loading = True  # as after a restart of the router
    fleet = make_fleet([worker, other], wait=False)
    wait_until(lambda: fleet.stats()["num_healthy"] == 1, "the other one is alive")
    found: list[int] = []
    body = {"input_ids": [1], "session_params": {"id": f"{fleet.report(worker)['id']}.mine"}}
    waiting = threading.Thread(target=lambda: found.append(fleet.post("/generate", body).status_code))
    waiting.start()
    wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
    assert fleet.post("/generate", {"input_ids": [1]}).json()["text"] == other.url
    assert not found
    worker.is_loading = False
    waiting.join(20)
    assert found == [200]


def test_a_request_does_not_wait_for_its_own_worker_where_only_an_operator_can_bring_it_back(fleet):
    id = opened(fleet)
    worker, body = home(fleet, id), {"input_ids": [1], "session_params": {"id": id}}
    assert fleet.http.post(f"/workers/{id.partition('.')[0]}/disable").status_code == 200
    refused = fleet.post("/generate", body)  # without a wait of queue_timeout_s, longer than that of this client
    assert refused.status_code == 503 and f"no worker takes requests: {worker.url} is disabled" in refused.text
    assert not worker.asked("/generate")


def test_a_body_that_only_speaks_of_sessions_goes_anywhere(fleet):
    text = 'the field "session_params" {"id": "x"}'
    assert fleet.post("/generate", {"text": text}).status_code == 200
    assert fleet.post("/generate", {"text": "a", "session_params": None}).status_code == 200
    answer = fleet.http.post("/generate", content=b'{"session_params": {"id": "x"', headers={"content-type": "a/json"})
    assert answer.status_code == 400


# -- by path --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/generate"]
)
def test_a_path_of_a_session_goes_to_its_worker_as_it_is_with_a_seed_and_opens_none(fleet, path):
    ids = [opened(fleet, session_id=f"a/ключ {number}") for number in range(4)]
    for id in ids:
        for session_path in (path_of(id, path), path_of(id, path).replace(".a", "%2Ea")):
            answer = fleet.post(session_path, {"prompt": "a", "session_params": {"replace": True}})
            assert answer.json()["text"] == home(fleet, id).url
        [one, two] = home(fleet, id).asked(path_of(id, path))
        assert one["opens_session"] is False and one["session_params"] == {"replace": True}
        assert isinstance(one["default_seed"], int) and one["default_seed"] != two["default_seed"]
        assert "progress" not in one
    assert settled(fleet)["load", fleet.workers[0].url] == 0


@pytest.mark.parametrize("spelled", ["/v1%2Fmessages", "/%761/message%73", "/v1/%6Des%73ages"])
def test_another_spelling_of_a_path_of_a_session_is_that_path(fleet, spelled):
    id = opened(fleet)
    assert fleet.post(path_of(id, "") + spelled, {"prompt": "a"}).json()["text"] == home(fleet, id).url
    [got] = home(fleet, id).asked(path_of(id, "/v1/messages"))
    assert got["opens_session"] is False and isinstance(got["default_seed"], int)


def test_other_spellings_of_the_paths_of_sessions_find_its_worker(fleet):
    for number in range(4):
        id = fleet.post("/open%5Fsession", {"session_id": f"s{number}"}).json()
        assert fleet.http.get(f"/session%5Finfo?session_id={id}").json() == {"at": home(fleet, id).url}
        assert fleet.post("/%63lose_session", {"session_id": id}).status_code == 200
        assert {"session_id": id} in home(fleet, id).asked("/close_session")


def test_reports_of_a_session_go_to_its_worker_unchanged(fleet):
    id = opened(fleet)
    assert fleet.http.get(path_of(id, "/v1/models")).json()["text"] == home(fleet, id).url
    assert fleet.post(path_of(id, "/v1/messages/count_tokens"), {"a": 1}).json()["text"] == home(fleet, id).url
    assert home(fleet, id).asked(path_of(id, "/v1/messages/count_tokens")) == [{"a": 1}]


def test_a_path_of_a_session_that_no_worker_gave_is_unknown(fleet):
    for id in ("mine", "x" * 256, "00000000-0000-0000-0000-00000000000g.a"):
        for path in ("/v1/chat/completions", "/generate"):
            answer = fleet.post(path_of(id, path), {"prompt": "a"})
            status, code, message = error(answer)
            assert (status, code) == (404, "session_unknown") and "/open_session" in message
            assert ("success" in answer.json()) == (path == "/generate")
        assert error(fleet.http.get(path_of(id, "/v1/models")))[1] == "session_unknown"
    lost = error(fleet.post(path_of("00000000-0000-5000-8000-000000000000.mine", "/generate"), {"text": "a"}))
    assert lost[1] == "session_lost"
    assert not any(one.asked("/generate") for one in fleet.workers)


@pytest.mark.parametrize("given", ["", "..", "%2e%2e", "%0a", "%ff", "x" * 257, "x" * 10_000])
def test_an_id_that_no_session_has_is_refused_by_the_router(fleet, given):
    connection = HTTPConnection(fleet.http.base_url.host, fleet.http.base_url.port, timeout=20)
    connection.request("POST", f"/sessions/{given}/v1/chat/completions", b"{}", {"Content-Type": "application/json"})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    assert (answer.status, told["error"]["param"]) == (400, "session_params.id")


def test_a_wrong_path_behind_a_session_is_named_and_goes_to_no_worker(fleet):
    id = opened(fleet)
    for path in ("/flush_cache", "/v1/load_lora_adapter", "/v1/nothing", "/sessions/a/v1/models"):
        answer = fleet.post(path_of(id, path))
        assert answer.status_code == 404 and path_of(id, path) in answer.json()["error"]["message"]
    assert not any(path.startswith("/sessions/") for worker in fleet.workers for _, path, _, _ in worker.calls)


def test_keys_of_a_router_guard_the_paths_of_sessions(make_fleet):
    fleet = make_fleet([answering()], http=HttpConfig(port=0, api_key="user", admin_api_key="boss"))
    id = opened(fleet)
    for key, status in ((None, 401), ("wrong", 403), ("user", 200), ("boss", 200)):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=fleet.router.url, timeout=20, headers=headers) as client:
            assert client.post(path_of(id, "/v1/completions"), json={"prompt": "a"}).status_code == status
            expected = {"user": 403, "boss": 404}.get(key or "", status)
            assert client.post(path_of(id, "/flush_cache"), json={}).status_code == expected


def test_a_request_by_path_does_not_move_to_another_worker(fleet):
    id = opened(fleet)
    worker = home(fleet, id)
    worker.generate = dies
    status, code, message = error(fleet.post(path_of(id, "/v1/chat/completions"), {"messages": []}))
    assert (status, code) in ((502, "workers_failed"), (404, "session_lost")) and worker.url in message
    assert not any(one.asked(path_of(id, "/v1/chat/completions")) for one in fleet.workers if one is not worker)


def test_an_agent_behind_a_router_has_its_tokens_stand(tmp_path):
    service = make_service("chatml")
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0)) as server,
        route_in_background(RouterConfig((server.url,), HttpConfig(port=0), journal=tmp_path / "j")) as router,
        httpx.Client(base_url=router.url, timeout=60) as client,
    ):
        wait_until(lambda: client.get("/workers").json()["stats"]["num_healthy"] == 1, "it is alive")
        id = client.post("/open_session", json={"session_id": "task/7"}).json()
        history = [{"role": "user", "content": "hello"}]
        answers = []
        for number in range(3):
            body = {"messages": history, "max_tokens": 6, "return_token_ids": True}
            answers.append(client.post(path_of(id, "/v1/chat/completions"), json=body).raise_for_status().json())
            history += [answers[-1]["choices"][0]["message"], {"role": "user", "content": f"number {number}"}]
        told = client.get("/session_info", params={"session_id": id, "logprobs": True}).json()
        [leaf], [choice] = told["leaves"], answers[-1]["choices"]
        assert leaf == answers[-1]["id"] and told["token_ids"] == choice["prompt_token_ids"] + choice["token_ids"]
        assert [len(run["logprobs"]) for run in told["sampled"]] == [
            run["end"] - run["start"] for run in told["sampled"]
        ]
        client.post("/close_session", json={"session_id": id}).raise_for_status()
        late = client.post(path_of(id, "/v1/chat/completions"), json={"messages": history})
        assert error(late)[:2] == (404, "session_closed"), "a session that is over is not opened again"


def test_a_worker_is_found_by_the_beginning_of_an_id_only():
    registry = WorkerRegistry()
    worker, _ = registry.add("http://127.0.0.1:1")
    assert home_of(registry, f"{worker.id}.a", "/generate") is worker
    assert home_of(registry, f"{worker.id}.{worker.id}.b", "/generate") is worker
