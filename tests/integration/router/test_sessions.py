"""Tests of sessions behind a router: each lives on one worker, which its id names."""

from __future__ import annotations

import threading

import pytest

from lockstep.integration.router.fleet.workers import WorkerRegistry
from lockstep.integration.router.sessions import home_of
from lockstep.tests.support.fake_workers import FakeWorker, Fleet, dies, wait_until


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


def test_a_request_waits_for_its_own_worker_and_others_do_not_wait_for_it(fleet):
    id = opened(fleet)
    worker = home(fleet, id)
    assert fleet.http.post(f"/workers/{id.partition('.')[0]}/disable").status_code == 200
    found: list[int] = []
    body = {"input_ids": [1], "session_params": {"id": id}}
    waiting = threading.Thread(target=lambda: found.append(fleet.post("/generate", body).status_code))
    waiting.start()
    wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
    assert fleet.post("/generate", {"input_ids": [1]}).json()["text"] != worker.url
    assert not found
    assert fleet.http.post(f"/workers/{id.partition('.')[0]}/enable").status_code == 200
    waiting.join(20)
    assert found == [200]


def test_a_body_that_only_speaks_of_sessions_goes_anywhere(fleet):
    text = 'the field "session_params" {"id": "x"}'
    assert fleet.post("/generate", {"text": text}).status_code == 200
    assert fleet.post("/generate", {"text": "a", "session_params": None}).status_code == 200
    answer = fleet.http.post("/generate", content=b'{"session_params": {"id": "x"', headers={"content-type": "a/json"})
    assert answer.status_code == 400


def test_a_worker_is_found_by_the_beginning_of_an_id_only():
    registry = WorkerRegistry()
    worker, _ = registry.add("http://127.0.0.1:1")
    assert home_of(registry, f"{worker.id}.a", "/generate") is worker
    assert home_of(registry, f"{worker.id}.{worker.id}.b", "/generate") is worker
