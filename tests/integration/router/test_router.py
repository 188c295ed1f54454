"""The router over real sockets, with fake workers that produce the rare failures of real ones on demand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.tests.support.fake_workers import (
    WAIT_S,
    FakeWorker,
    Fleet,
    Handler,
    SlowAnswer,
    counted,
    dies,
    refuse,
    settled,
    wait_until,
)

pytestmark = pytest.mark.slow  # many small calls over real sockets

# -- generation ------------------------------------------------------------------------------------------------------


def test_requests_spread_and_a_group_stays_together(fleet):
    def answered(prompt: str) -> str:
        return fleet.post("/generate", {"text": prompt}).json()["text"]

    assert {answered(f"prompt {i}") for i in range(6)} == {worker.url for worker in fleet.workers}
    assert len({answered("one prompt") for _ in range(6)}) == 1
    by_key = [
        fleet.http.post("/generate", json={"text": f"{i}"}, headers={"X-SMG-Routing-Key": "k"}).json()["text"]
        for i in range(6)
    ]
    assert len(set(by_key)) == 1


def test_authorization_query_and_body_go_through_as_they_are(fleet):
    body = '{"text":  "\\u00e9", "unknown": [1.50]}'
    headers = {"Authorization": "Bearer k", "content-type": "application/json"}
    answer = fleet.http.post("/generate?x=1&y=%20", content=body, headers=headers)
    assert answer.headers["x-lockstep-worker"] == answer.json()["text"]
    [worker] = [w for w in fleet.workers if w.asked("/generate")]
    method, path, seen, got = next(call for call in worker.calls if call[1].startswith("/generate"))
    own = {name: got.pop(name) for name in ("default_seed", "progress")}
    assert (method, path, got) == ("POST", "/generate?x=1&y=%20", json.loads(body))
    assert seen["authorization"] == "Bearer k"
    assert int(seen["Content-Length"]) == len(body) + len(json.dumps(own, separators=(",", ":"))) - 1


@pytest.mark.parametrize(
    ("sent", "got"),
    [("/%67enerate", "/generate"), ("/v1%2fchat/completion%73?a=%2F", "/v1/chat/completions?a=%2F"),
     ("/v1/models/a%20b", "/v1/models/a%20b"), ("/v1/models/%D0%BA%25", "/v1/models/%D0%BA%25")],
)  # fmt: skip
def test_a_path_of_plain_characters_has_one_spelling_and_others_stay(fleet, sent, got):
    assert fleet.post(sent, {"text": "a"}).status_code == 200
    [(path, body)] = [(call[1], call[3]) for one in fleet.workers for call in one.calls if call[0] == "POST"]
    assert path == got and ("default_seed" in body) == ("models" not in got)


def test_a_compressed_body_is_a_415_that_says_so(fleet):
    answer = fleet.http.post("/generate", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "Content-Encoding: 'gzip' is not supported" in answer.text


def test_errors_of_a_worker_go_through(fleet):
    for worker in fleet.workers:
        worker.generate = lambda handler, body: handler.reply(400, {"error": {"message": "sampling_params.x"}})
    answer = fleet.post("/generate", {"text": "a"})
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "sampling_params.x"}})


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/inference/v1/generate", "/tokenize"])
def test_a_request_that_produced_nothing_moves_to_another_worker(fleet, path):
    dying, other = fleet.workers
    dying.generate = dies
    answers = [fleet.post(path, {"text": f"prompt {i}"}) for i in range(6)]
    assert [answer.json() for answer in answers] == [{"text": other.url}] * 6
    assert dying.asked(path)


def test_a_stream_that_produced_no_event_moves_too(fleet):
    def half(handler: Handler, body: dict) -> None:
        handler.begin_stream()
        handler.send_part(b"data: {half an ev")
        handler.die()

    def whole(handler: Handler, body: dict) -> None:
        handler.begin_stream()
        for part in (b"data: 1\n", b"\nda", b"ta: 2\n\ndata: [DONE]\n\n", b""):
            handler.send_part(part)

    fleet.workers[0].generate, fleet.workers[1].generate = half, whole
    for i in range(4):
        answer = fleet.post("/generate", {"text": f"p {i}", "stream": True})
        assert answer.text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert fleet.workers[0].asked("/generate")


def test_a_stream_that_has_begun_ends_with_a_clear_error(fleet):
    def begins(handler: Handler, body: dict) -> None:
        handler.begin_stream()
        handler.send_part(b"data: 1\n\ndata: {half an ev")
        handler.die()

    for worker in fleet.workers:
        worker.generate = begins
    answer = fleet.post("/generate", {"text": "a", "stream": True})
    first, error, end = answer.text.split("\n\n")
    told = json.loads(error.removeprefix("data: "))["error"]
    assert (first, end, told["type"], told["code"]) == ("data: 1", "", "worker_died", 502)
    assert answer.headers["x-lockstep-worker"] in told["message"]
    assert sum(len(worker.asked("/generate")) for worker in fleet.workers) == 1


def test_a_request_that_kills_workers_does_not_kill_all(make_fleet):
    fleet = make_fleet(3, max_attempts=2)
    for worker in fleet.workers:
        worker.generate = dies
    answer = fleet.post("/v1/completions", {"prompt": "a"})
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "workers_failed"
    assert sum(len(worker.asked("/v1/completions")) for worker in fleet.workers) == 2


def test_a_worker_that_hangs_is_given_up_and_its_requests_move(make_fleet):
    fleet = make_fleet(2, health_timeout_s=0.3, dead_after=2)
    hung, other = fleet.workers
    release = threading.Event()

    def hangs(*_: object) -> None:
        release.wait(WAIT_S)

    hung.generate = hangs
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(fleet.post, "/generate", {"text": f"{i}"}) for i in range(4)]
        wait_until(lambda: fleet.report(hung)["load"], "a request at the worker that hangs")
        hung.answer = hangs  # type: ignore[method-assign]
        assert {answer.result(WAIT_S).json()["text"] for answer in answers} == {other.url}
    assert fleet.report(hung)["status"] == "dead"
    release.set()


def test_a_client_that_leaves_takes_its_request_along(fleet):
    left = threading.Event()

    def streams(handler: Handler, body: dict) -> None:
        handler.begin_stream()
        handler.send_part(b"data: 1\n\n")
        try:
            handler.connection.settimeout(WAIT_S)
            if handler.connection.recv(1) == b"":
                left.set()
        except ConnectionError:
            left.set()

    for worker in fleet.workers:
        worker.generate = streams
    with fleet.http.stream("POST", "/generate", json={"text": "a", "stream": True}) as answer:
        lines = answer.iter_lines()  # kept in a variable, because the answer is closed with it
        assert next(lines) == "data: 1"
        wait_until(lambda: sum(fleet.report(w)["load"] for w in fleet.workers) == 1, "the load is counted")
    assert left.wait(WAIT_S)
    wait_until(lambda: not any(fleet.report(w)["load"] for w in fleet.workers), "the load is gone")


def test_without_workers_the_answer_is_503_with_the_reasons(make_fleet):
    fleet = make_fleet(1)
    assert fleet.http.get("/health").status_code == fleet.http.get("/readiness").status_code == 200
    fleet.post(f"/workers/{fleet.report(fleet.workers[0])['id']}/disable")
    answer = fleet.post("/generate", {"text": "a"})
    assert answer.status_code == 503 and "is disabled" in answer.json()["message"]
    assert answer.headers["retry-after"] == "1"
    assert fleet.http.get("/readiness").status_code == 503
    assert fleet.http.get("/liveness").status_code == 200


# -- workers ---------------------------------------------------------------------------------------------------------


def test_workers_come_and_go_by_both_generations_of_paths(fleet):
    new = FakeWorker()
    fleet.workers.append(new)
    answer = fleet.post("/workers", {"url": new.url, "worker_type": "regular"})
    assert answer.status_code == 202 and answer.json()["url"] == new.url
    assert fleet.post("/workers", {"url": new.url}).status_code == 200
    wait_until(lambda: fleet.report(new)["routable"], "the new worker is routable")
    assert fleet.http.get("/list_workers").json() == {"urls": [worker.url for worker in fleet.workers]}
    assert fleet.http.get(f"/workers/{answer.json()['worker_id']}").json()["url"] == new.url
    assert fleet.http.delete(f"/workers/{answer.json()['worker_id']}").status_code == 202
    assert fleet.http.post("/add_worker", params={"url": new.url}).status_code == 202
    assert fleet.http.post("/remove_worker", params={"url": new.url}).status_code == 202
    assert fleet.http.post("/remove_worker", params={"url": new.url}).status_code == 404
    assert fleet.post("/workers", {"url": "ftp://x"}).json()["param"] == "url"
    loads = fleet.http.get("/get_loads").json()["workers"]
    assert loads == [{"worker": worker.url, "load": 0} for worker in fleet.workers[:2]]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_worker_that_is_added_as_disabled_is_disabled_also_where_it_was_there(make_fleet, is_new):
    fleet, new = make_fleet(1), FakeWorker()
    fleet.workers.append(new)
    if not is_new:
        assert fleet.post("/workers", {"url": new.url}).status_code == 202
        wait_until(lambda: fleet.report(new)["routable"], "it gets requests")
    answer = fleet.post("/workers", {"url": new.url, "disabled": True})
    assert answer.status_code == (202 if is_new else 200) and "disabled" in answer.json()["message"]
    assert fleet.report(new)["disabled"]
    again = fleet.post("/workers", {"url": new.url})  # as a worker does that is started again
    assert again.status_code == 200 and fleet.report(new)["disabled"]
    fleet.post(f"/workers/{fleet.report(new)['id']}/enable").raise_for_status()
    assert not fleet.report(new)["disabled"]


def test_a_worker_that_died_comes_back(fleet):
    gone, other = fleet.workers
    port = gone.port
    gone.stop()
    wait_until(lambda: fleet.report(gone)["status"] == "dead", "it is dead")
    assert {fleet.post("/generate", {"text": f"{i}"}).json()["text"] for i in range(4)} == {other.url}
    gone.start(port)
    wait_until(lambda: fleet.report(gone)["routable"], "it is back")
    assert fleet.report(gone)["num_deaths"] == 1


def test_a_worker_that_comes_back_with_other_weights_waits_for_an_update(fleet):
    gone, other = fleet.workers
    port = gone.port
    gone.stop()
    wait_until(lambda: fleet.report(gone)["status"] == "dead", "it is dead")
    gone.version = "0"
    gone.start(port)
    wait_until(lambda: "version" in fleet.report(gone)["held"], "it is held")
    assert {fleet.post("/generate", {"text": f"{i}"}).json()["text"] for i in range(4)} == {other.url}

    def update(worker: FakeWorker) -> Callable:
        def run(body: dict) -> tuple[int, object]:
            worker.version = body["weight_version"]
            return 200, {"success": True, "message": "done"}

        return run

    for worker in fleet.workers:
        worker.answers["/update_weights_from_disk"] = update(worker)
    answer = fleet.post("/update_weights_from_disk", {"model_path": "m", "weight_version": "2"})
    assert answer.status_code == 200, answer.text
    assert fleet.report(gone)["routable"] and fleet.report(gone)["weight_version"] == "2"


# -- administration --------------------------------------------------------------------------------------------------


def test_a_verb_reaches_every_live_worker_and_equal_values_are_lifted(fleet):
    answer = fleet.post("/model_info")
    assert answer.status_code == 200
    assert answer.json()["model_path"] == "m" and answer.json()["weight_version"] == "1"
    assert {result["worker"] for result in answer.json()["results"]} == {worker.url for worker in fleet.workers}
    assert fleet.http.get("/update_weights_from_disk").status_code == 405
    assert fleet.post("/no_such_verb").status_code == 404


def test_mixed_weight_versions_are_a_409_that_lists_them(fleet):
    fleet.workers[1].version = "2"
    for path in ("/model_info", "/get_weight_version"):
        answer = fleet.http.get(path)
        assert answer.status_code == 409 and answer.json()["mixed_state"] is True
        assert answer.json()["weight_versions"] == {fleet.workers[0].url: "1", fleet.workers[1].url: "2"}


def test_targets_get_nothing_during_an_update_and_a_disabled_one_stays_disabled(make_fleet):
    fleet = make_fleet(2)
    disabled, other = fleet.workers
    fleet.http.put(f"/workers/{fleet.report(disabled)['id']}", json={"disabled": True})
    disabled.answers["/pause_generation"] = slow = SlowAnswer()
    with ThreadPoolExecutor(4) as pool:
        pausing = pool.submit(fleet.post, "/pause_generation", {"mode": "retract"})
        assert slow.entered.wait(WAIT_S)
        assert "broadcast" in fleet.report(other)["held"] and fleet.report(disabled)["disabled"]
        generating = pool.submit(fleet.post, "/generate", {"text": "a"})
        busy = fleet.post("/workers", {"url": "http://127.0.0.1:1"})
        assert busy.status_code == 409 and busy.json()["age_s"] >= 0
        assert not other.asked("/generate")
        slow.leave.set()
        assert pausing.result(WAIT_S).status_code == 200
        assert generating.result(WAIT_S).json()["text"] == other.url
    assert fleet.report(disabled)["disabled"] and not fleet.report(disabled)["held"]
    assert fleet.report(other)["routable"]


def test_a_request_does_not_wait_for_an_update_for_ever(make_fleet):
    fleet = make_fleet(1, queue_timeout_s=0.2)
    fleet.workers[0].answers["/pause_generation"] = slow = SlowAnswer()
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(fleet.post, "/pause_generation")
        assert slow.entered.wait(WAIT_S)
        answer = fleet.post("/generate", {"text": "a"})
        assert answer.status_code == 503 and "pause_generation is under way" in answer.json()["message"]
        slow.leave.set()
        assert pausing.result(WAIT_S).status_code == 200


def test_changes_run_one_at_a_time_and_the_wait_has_a_limit(make_fleet):
    fleet = make_fleet(2, lock_limit_s=0.3)
    fleet.workers[0].answers["/update_weights_from_disk"] = slow = SlowAnswer()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fleet.post, "/update_weights_from_disk", {"model_path": "m"})
        assert slow.entered.wait(WAIT_S)
        for path in ("/continue_generation", "/update_weights_from_disk", "/init_weights_update_group"):
            answer = fleet.post(path)
            assert answer.status_code == 503, path
            assert "admin update lock" in answer.json()["message"]
            assert "update_weights_from_disk has been under way" in answer.json()["message"]
        assert fleet.post("/model_info").status_code == 200  # reads do not wait
        assert fleet.post("/abort_request", {"abort_all": True}).status_code == 200
        slow.leave.set()
        assert first.result(WAIT_S).status_code == 200
    assert len(fleet.workers[1].asked("/update_weights_from_disk")) == 1
    assert fleet.post("/continue_generation").status_code == 200


def test_a_change_whose_client_left_or_whose_time_is_over_never_runs(fleet):
    fleet.workers[0].answers["/pause_generation"] = slow = SlowAnswer()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fleet.post, "/pause_generation")
        assert slow.entered.wait(WAIT_S)
        with pytest.raises(httpx.ReadTimeout):
            fleet.http.post("/continue_generation", json={}, timeout=0.3)
        answer = fleet.post("/update_weights_from_disk", {"timeout_s": 0.2})
        assert answer.status_code == 503
        slow.leave.set()
        assert first.result(WAIT_S).status_code == 200
    assert fleet.post("/release_weight_undo").status_code == 200  # waits for all of them
    for worker in fleet.workers:
        assert not worker.asked("/continue_generation") and not worker.asked("/update_weights_from_disk")


def test_paused_workers_are_known_and_avoided(fleet):
    paused, other = fleet.workers
    paused.is_paused = True  # by a client that called the worker directly
    wait_until(lambda: fleet.report(paused)["paused"], "the pause is seen")
    assert {fleet.post("/generate", {"text": f"{i}"}).json()["text"] for i in range(4)} == {other.url}
    other.is_paused = True
    wait_until(lambda: fleet.report(other)["paused"], "the pause is seen")
    assert fleet.post("/generate", {"text": "a"}).status_code == 200  # the engine makes it wait


def commit_at_the_end_of_a_pause(make_fleet, *digests: str, **settings: float) -> Fleet:
    """Play a trainer that writes without a session, as SGLang's and AReaL's do: its end of the pause commits."""

    def commits(worker: FakeWorker, digest: str) -> Callable[[dict], tuple[int, object]]:
        def answer(body: dict) -> tuple[int, object]:
            worker.info["weight_digest"] = digest
            return 200, {"success": True}

        return answer

    workers = [FakeWorker("default", weight_digest="d0", guarantee={"dtype": "float32"}) for _ in digests]
    for worker, digest in zip(workers, digests, strict=True):
        worker.answers["/continue_generation"] = commits(worker, digest)
    fleet = make_fleet(workers, **settings)
    for verb in ("pause_generation", "update_weights_from_tensor", "continue_generation"):
        assert fleet.post(f"/{verb}").json()["success"], verb
    return fleet


def test_weights_committed_by_the_end_of_a_pause_are_read_at_all_workers_before_one_is_compared(make_fleet, caplog):
    fleet = commit_at_the_end_of_a_pause(make_fleet, "d1", "d1", health_interval_s=3600)  # no probe comes between
    reports = [fleet.report(worker) for worker in fleet.workers]
    assert [(report["weight_digest"], report["routable"]) for report in reports] == [("d1", True)] * 2
    assert "no update through this router" not in caplog.text


def test_weights_committed_by_the_end_of_a_pause_at_one_worker_alone_hold_it(make_fleet):
    fleet = commit_at_the_end_of_a_pause(make_fleet, "d1", "d0")
    wait_until(lambda: not fleet.report(fleet.workers[0])["routable"], "it is held")
    assert "weight version" in fleet.report(fleet.workers[0])["held"]["version"]
    assert fleet.report(fleet.workers[1])["routable"]


def test_one_init_call_serves_workers_of_several_ranks(make_fleet):
    fleet = make_fleet([FakeWorker(tp_size=2, pp_size=1), FakeWorker(tp_size=1, pp_size=3), FakeWorker()])
    body = {"master_address": "h", "master_port": "1", "rank_offset": "1", "world_size": 7, "group_name": "g"}
    answer = fleet.post("/init_weights_update_group", {**body, "world_size": 6})
    assert answer.status_code == 422 and "world_size 6 is too small" in answer.json()["message"]
    assert not fleet.workers[0].asked("/init_weights_update_group")
    assert fleet.stats()["num_routable"] == 3
    assert fleet.post("/init_weights_update_group", body).status_code == 200
    sent = [worker.asked("/init_weights_update_group") for worker in fleet.workers]
    assert sent == [[{**body, "rank_offset": offset}] for offset in (1, 3, 6)]
    assert fleet.post("/init_weights_update_group", body).status_code == 409
    assert fleet.post("/update_weights_from_distributed", {"group_name": "g"}).status_code == 200

    lost = fleet.workers[2]
    port = lost.port
    lost.stop()
    wait_until(lambda: fleet.report(lost)["status"] == "dead", "it is dead")
    lost.start(port)
    wait_until(lambda: fleet.report(lost)["routable"], "it is back")
    answer = fleet.post("/update_weights_from_distributed", {"group_name": "g"})
    assert answer.status_code == 409 and f"{lost.url} left it" in answer.json()["message"]
    assert len(fleet.workers[0].asked("/update_weights_from_distributed")) == 1
    assert fleet.post("/destroy_weights_update_group", {"group_name": "g"}).status_code == 200
    assert fleet.post("/init_weights_update_group", body).status_code == 200


def test_areals_names_of_verbs_reach_all_workers_by_the_rules_of_those_verbs(fleet):
    body = {"master_address": "h", "master_port": "1", "rank_offset": 1, "world_size": 3, "group_name": "g"}
    assert fleet.post("/areal_init_weights_update_group", body).status_code == 200
    assert [worker.asked("/areal_init_weights_update_group") for worker in fleet.workers] == [
        [{**body, "rank_offset": offset}] for offset in (1, 2)
    ]

    def pauses(worker: FakeWorker, is_paused: bool) -> Callable[[dict], tuple[int, object]]:
        def answer(body: dict) -> tuple[int, object]:
            worker.is_paused = is_paused  # which probes read
            return 200, {"success": True}

        return answer

    for worker in fleet.workers:
        worker.answers["/areal_pause_generation"] = pauses(worker, True)
        worker.answers["/areal_continue_generation"] = pauses(worker, False)
    for path in ("areal_pause_generation", "areal_set_update_weight_meta", "areal_update_weights_xccl"):
        assert fleet.post(f"/{path}").status_code == 200
        assert all(fleet.report(worker)["paused"] for worker in fleet.workers)
    assert fleet.post("/areal_update_weights", {"model_path": "m"}).status_code == 200
    assert [worker.asked("/areal_update_weights") for worker in fleet.workers] == [[{"model_path": "m"}]] * 2
    assert fleet.post("/areal_continue_generation").status_code == 200
    wait_until(lambda: not any(fleet.report(worker)["paused"] for worker in fleet.workers), "generation goes on")


def test_a_worker_whose_group_init_failed_stays_out_until_it_is_enabled(make_fleet):
    fleet = make_fleet(2, admin_timeout_s=0.2)
    failing, other = fleet.workers
    leave = threading.Event()
    failing.answers["/init_weights_update_group"] = lambda body: (leave.wait(WAIT_S), (200, {}))[1]
    body = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3}
    answer = fleet.post("/init_weights_update_group", body)
    assert answer.status_code == 502
    told = {result["worker"]: result for result in answer.json()["results"]}
    assert told[other.url]["success"] and "timed out" in told[failing.url]["error"]
    assert "group" in fleet.report(failing)["held"] and fleet.report(other)["routable"]
    assert {fleet.post("/generate", {"text": f"{i}"}).json()["text"] for i in range(4)} == {other.url}
    fleet.post(f"/workers/{fleet.report(failing)['id']}/enable")
    assert fleet.report(failing)["routable"]
    leave.set()


# -- the journal -----------------------------------------------------------------------------------------------------


def test_an_update_that_fails_on_one_worker_holds_all_until_it_is_resolved(fleet):
    good, bad = fleet.workers

    def update(body: dict) -> tuple[int, object]:
        assert json.loads(fleet.journal.read_text())["failure"] is None  # written before the first worker is called
        good.version = "2"
        return 200, {"success": True}

    good.answers["/update_weights_from_disk"] = update
    bad.answers["/update_weights_from_disk"] = refuse("disk full")
    answer = fleet.post("/update_weights_from_disk", {"model_path": "m"})
    assert answer.status_code == 502 and "disk full" in answer.json()["message"]
    assert [result["success"] for result in answer.json()["results"]] == [True, False]
    assert fleet.stats()["num_routable"] == 0
    assert "unresolved" in fleet.post("/generate", {"text": "a"}).json()["message"]
    for path in ("/update_weights_from_disk", "/begin_weight_update"):
        assert fleet.post(path).status_code == 409
    assert fleet.http.get("/weight_update_journal").json()["unresolved"] is True
    assert fleet.post("/weight_update_journal/resolve").json()["param"] == "acknowledge"
    answer = fleet.post("/weight_update_journal/resolve", {"acknowledge": True, "enable": False})
    assert answer.json()["mixed_state"] is True
    assert answer.json()["weight_versions"] == {good.url: "2", bad.url: "1"}
    assert not fleet.journal.exists()
    assert all(fleet.report(worker)["disabled"] and not fleet.report(worker)["held"] for worker in fleet.workers)
    bad.answers["/update_weights_from_disk"] = lambda body: (setattr(bad, "version", "2"), (200, {}))[1]
    assert fleet.post("/update_weights_from_disk").status_code == 200


def test_an_update_that_all_refuse_leaves_nothing_behind(fleet):
    for worker in fleet.workers:
        worker.answers["/update_weights_from_disk"] = refuse("no such folder")
    answer = fleet.post("/update_weights_from_disk", {"model_path": "m"})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "no such folder"
    assert not fleet.journal.exists() and fleet.stats()["num_routable"] == 2


def test_a_session_is_in_the_journal_from_begin_to_end(fleet):
    assert fleet.post("/lockstep/begin_weight_update", {"weight_version": "2"}).status_code == 200
    assert json.loads(fleet.journal.read_text())["session"] is True
    assert fleet.stats()["num_routable"] == 2  # the engines themselves refuse to sample now
    for worker in fleet.workers:
        worker.answers["/begin_weight_update"] = refuse("a session is open", "SessionError")
    answer = fleet.post("/begin_weight_update")
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "SessionError"
    assert fleet.post("/update_weights_from_distributed").status_code == 200
    assert fleet.journal.exists()
    assert fleet.post("/lockstep/end_weight_update").status_code == 200
    assert not fleet.journal.exists()


def test_a_session_that_failed_is_mended_by_aborting_it(fleet):
    good, bad = fleet.workers
    assert fleet.post("/begin_weight_update").status_code == 200
    bad.answers["/update_weights_from_tensor"] = refuse("a digest differs", "DigestMismatch")
    assert fleet.post("/update_weights_from_tensor").status_code == 502
    assert fleet.post("/end_weight_update").status_code == 409
    assert not good.asked("/end_weight_update")
    assert fleet.stats()["num_routable"] == 0
    bad.version = "9"
    fleet.post("/abort_weight_update")
    assert fleet.http.get("/weight_update_journal").json()["unresolved"]  # the versions are still mixed
    bad.version = "1"
    assert fleet.post("/abort_weight_update").status_code == 200
    assert not fleet.journal.exists() and fleet.stats()["num_routable"] == 2


def test_a_session_that_ended_at_some_workers_is_taken_back_there_when_it_is_given_up(fleet):
    good, bad = fleet.workers
    assert fleet.post("/lockstep/begin_weight_update", {"weight_version": "2"}).status_code == 200
    good.answers["/lockstep/end_weight_update"] = lambda body: (setattr(good, "version", "2"), (200, {}))[1]
    bad.answers["/lockstep/end_weight_update"] = refuse("a tensor is missing")
    assert fleet.post("/lockstep/end_weight_update").status_code == 502
    assert fleet.http.get("/model_info").json()["weight_versions"] == {good.url: "2", bad.url: "1"}
    assert fleet.stats()["num_routable"] == 0
    good.answers["/lockstep/abort_weight_update"] = refuse("none is open", "SessionError")
    good.answers["/lockstep/revert_weight_update"] = lambda body: (setattr(good, "version", "1"), (200, {}))[1]
    answer = fleet.post("/lockstep/abort_weight_update", {"timeout_s": 5, "why": "a test"})
    assert answer.status_code == 200, answer.text
    assert good.asked("/lockstep/revert_weight_update") == [{"timeout_s": 5}]
    assert not bad.asked("/lockstep/revert_weight_update")
    assert fleet.http.get("/model_info").json()["weight_version"] == "1"
    assert not fleet.journal.exists() and fleet.stats()["num_routable"] == 2
    # Without an unfinished update, a session that is not open is no failure.
    assert fleet.post("/lockstep/abort_weight_update").status_code == 502
    assert len(good.asked("/lockstep/revert_weight_update")) == 1


def test_a_worker_that_met_trouble_is_asked_before_it_is_counted(make_fleet):
    fleet = make_fleet(2, health_interval_s=60.0)
    gone, other = fleet.workers
    gone.stop()
    answer = fleet.post("/model_info")  # the first call that detects it
    assert answer.status_code == 502 and gone.url in answer.json()["message"]
    answer = fleet.post("/pause_generation")
    assert answer.status_code == 200 and [r["worker"] for r in answer.json()["results"]] == [other.url]
    assert fleet.report(gone)["status"] == "dead"


def test_another_process_with_other_weights_at_the_same_address_is_noticed(fleet):
    replaced = fleet.workers[0]
    body = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3, "group_name": "g"}
    assert fleet.post("/init_weights_update_group", body).status_code == 200
    replaced.info, replaced.version = {"startup_time": -1.0}, "0"
    wait_until(lambda: "version" in fleet.report(replaced)["held"], "it is held")
    assert fleet.report(replaced)["num_deaths"] == 1
    answer = fleet.post("/update_weights_from_distributed", {"group_name": "g"})
    assert answer.status_code == 409 and f"{replaced.url} left it" in answer.json()["message"]


def test_a_journal_that_cannot_be_written_refuses_the_update(fleet):
    fleet.journal.with_name("journal.json.part").mkdir()
    answer = fleet.post("/update_weights_from_disk")
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "journal_unwritable"
    assert not fleet.workers[0].asked("/update_weights_from_disk") and fleet.stats()["num_routable"] == 2


# -- counts ----------------------------------------------------------------------------------------------------------


def test_requests_retries_affinity_broadcasts_and_the_journal_are_counted(make_fleet):
    fleet = make_fleet(3, http=HttpConfig(port=0, admin_api_key="boss"))
    dying, other, third = fleet.workers
    fleet.post(f"/workers/{fleet.report(third)['id']}/disable")
    assert counted(fleet)["workers", "routable"] == 2 and counted(fleet)["workers", "disabled"] == 1
    dying.generate = dies
    for i in range(6):
        assert fleet.post("/generate", {"text": f"prompt {i % 3}"}).json()["text"] == other.url
    other.generate = lambda handler, body: handler.reply(400, {"error": {"message": "no"}})
    fleet.post("/generate", {"text": "prompt 0"})
    now = settled(fleet)
    num_moved = now["requests_total", "moved", dying.url]
    assert now["requests_total", "answered", other.url] == 6 and now["requests_total", "refused", other.url] == 1
    assert 1 <= num_moved == now["retries_total",] == len(dying.asked("/generate"))
    assert now["affinity_total", "hit"] >= 3 and now["affinity_total", "unknown"] >= 1
    assert now["journal", "empty"] == 1 and now["load", other.url] == 0
    other.answers["/update_weights_from_disk"] = refuse("disk full")
    assert fleet.post("/update_weights_from_disk").status_code == 502
    assert fleet.http.get("/model_info").status_code == 200
    assert fleet.post("/no_such_verb").status_code == 404
    assert fleet.post("/generate", {"text": "a"}).status_code == 503
    now = counted(fleet)
    assert now["journal", "unresolved"] == 1 and now["journal_age_seconds",] > 0
    assert now["broadcasts_total", "failed", "update_weights_from_disk"] == 1
    assert now["broadcasts_total", "done", "model_info"] == 1
    assert now["broadcast_seconds_total", "update_weights_from_disk"] > 0
    assert now["unanswered_requests_total", "no_workers"] == 1
    assert now["workers", "held"] == 2 and now["workers", "disabled"] == 1
    assert not any("no_such_verb" in key for key in now)
    fleet.post("/weight_update_journal/resolve", {"acknowledge": True})
    fleet.post("/remove_worker?url=" + dying.url)
    assert not any(dying.url in key for key in counted(fleet))  # a removed worker has no counts


# -- keys ------------------------------------------------------------------------------------------------------------


def test_the_router_has_keys_of_its_own_and_passes_them_on(make_fleet):
    fleet = make_fleet(2, http=HttpConfig(port=0, api_key="user", admin_api_key="boss"))
    with httpx.Client(base_url=fleet.router.url, timeout=WAIT_S) as nobody:
        assert nobody.get("/health").status_code == nobody.get("/liveness").status_code == 200
        for path in ("/generate", "/workers", "/pause_generation", "/weight_update_journal/resolve"):
            answer = nobody.post(path, json={})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", path
        user = {"Authorization": "Bearer user"}
        assert nobody.post("/generate", json={"text": "a"}, headers=user).status_code == 200
        assert nobody.get("/get_loads", headers=user).status_code == 200
        for path in ("/workers", "/pause_generation", "/weight_update_journal/resolve", "/remove_worker"):
            assert nobody.post(path, json={}, headers=user).status_code == 403, path
    # A path that would become another one at the worker is not forwarded.
    port = int(fleet.router.url.rpartition(":")[2])
    for path in ("/v1/../pause_generation", "/v1/%2e%2e/pause_generation", "/v1/x/../../pause_generation"):
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as raw:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer user\r\nconnection: close\r\n"
            raw.sendall(f"{head}content-length: 2\r\n\r\n{{}}".encode())
            assert raw.makefile("rb").readline().split()[1] == b"404", path
    assert not fleet.workers[0].asked("/pause_generation") and not fleet.workers[1].asked("/pause_generation")
    assert fleet.post("/pause_generation").status_code == 200
    paused = [call for call in fleet.workers[0].calls if call[1] == "/pause_generation"]
    assert [headers["authorization"] for _, _, headers, _ in paused] == ["Bearer boss"]


def test_a_page_of_another_site_cannot_call_the_router(fleet):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        answer = fleet.http.post("/pause_generation", json={}, headers=headers)
        assert answer.status_code == 403, headers
    own = fleet.http.post("/continue_generation", json={}, headers={"Origin": fleet.router.url})
    assert own.status_code == 200
    assert not any(worker.asked("/pause_generation") for worker in fleet.workers)
