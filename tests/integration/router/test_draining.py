"""Restarts without loss: workers that drain, requests that wait for workers, and a router that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lockstep.tests.support.fake_workers import (
    WAIT_S,
    FakeWorker,
    Fleet,
    Handler,
    SlowAnswer,
    counted,
    dies,
    wait_until,
)
from lockstep.tests.support.forked_ranks import free_port

pytestmark = pytest.mark.slow  # many small calls over real sockets

FULL = {"success": False, "code": 503, "error": {"message": "9 wait (max_waiting_requests)", "code": "overloaded"}}
REFUSAL = {"success": False, "code": 503, "error": {"message": "the server is draining", "code": "draining"}}


def refuses(handler: Handler, body: dict) -> None:
    """Refuse a request as a worker that drains."""
    handler.reply(503, REFUSAL)


class SlowStream:
    """A worker's stream that ends when the test releases it."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, handler: Handler, body: dict) -> None:
        handler.begin_stream()
        handler.send_part(b"data: 1\n\n")
        self.entered.set()
        assert self.leave.wait(WAIT_S)
        for part in (b"data: 2\n\n", b"data: [DONE]\n\n", b""):
            handler.send_part(part)


# -- workers that drain ----------------------------------------------------------------------------------------------


def test_a_draining_worker_gets_no_new_requests_and_its_open_stream_comes_to_its_end(make_fleet, caplog):
    caplog.set_level("INFO")
    fleet = make_fleet(2)
    draining, other = fleet.workers
    draining.generate = stream = SlowStream()
    with ThreadPoolExecutor(1) as pool:
        fleet.post(f"/workers/{fleet.report(other)['id']}/disable")
        open_one = pool.submit(fleet.post, "/generate", {"text": "a", "stream": True})
        assert stream.entered.wait(WAIT_S)
        fleet.post(f"/workers/{fleet.report(other)['id']}/enable")
        draining.is_draining = True
        wait_until(lambda: fleet.report(draining)["status"] == "draining", "it is draining")
        assert {fleet.post("/generate", {"text": f"{i}"}).json()["text"] for i in range(6)} == {other.url}
        report = fleet.report(draining)
        assert (report["routable"], report["is_healthy"], report["load"], report["num_deaths"]) == (False, False, 1, 0)
        assert counted(fleet)["workers", "draining"] == 1 and counted(fleet)["workers", "dead"] == 0
        assert fleet.stats()["num_routable"] == 1
        stream.leave.set()
        assert open_one.result(WAIT_S).text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    port = draining.port
    draining.stop()
    wait_until(lambda: fleet.report(draining)["status"] == "dead", "it has ended")
    said = [record.getMessage() for record in caplog.records if draining.url in record.getMessage()]
    assert any("is draining: it gets no new requests" in line for line in said)
    assert any("was draining and has ended" in line for line in said)
    assert not [record for record in caplog.records if "is dead" in record.getMessage()]
    draining.is_draining, draining.generate = False, other.generate
    draining.start(port)
    wait_until(lambda: fleet.report(draining)["routable"], "it is back")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_request_that_a_draining_worker_refused_moves_and_that_is_no_attempt(make_fleet, path):
    fleet = make_fleet(4, health_interval_s=60.0, max_attempts=1)  # no probe sees it before a request does
    *draining, other = fleet.workers
    for worker in draining:
        worker.generate, worker.is_draining = refuses, True
    answers = [fleet.post(path, {"text": f"{i}"}) for i in range(8)]
    assert [answer.json() for answer in answers] == [{"text": other.url}] * 8
    assert [len(worker.asked(path)) for worker in draining] == [1, 1, 1]  # refused once, then known
    assert [fleet.report(worker)["status"] for worker in draining] == ["draining"] * 3
    now = counted(fleet)
    assert sum(now["requests_total", "draining", worker.url] for worker in draining) == 3


# -- workers that are full --------------------------------------------------------------------------------------------


def full_for(worker: FakeWorker, num_times: int) -> None:
    """Let a worker refuse so many requests before it answers."""
    usual, left = worker.generate, iter(range(num_times))

    def generate(handler: Handler, body: dict) -> None:
        usual(handler, body) if next(left, None) is None else handler.reply(503, FULL)

    worker.generate = generate


def test_a_request_that_a_full_worker_refused_moves_and_that_is_no_attempt(make_fleet):
    fleet = make_fleet(3, max_attempts=1)
    *full, other = fleet.workers
    for worker in full:
        full_for(worker, 100)
    assert [fleet.post("/generate", {"text": f"{i}"}).json()["text"] for i in range(6)] == [other.url] * 6
    assert {fleet.report(worker)["status"] for worker in full} == {"alive"}
    assert sum(counted(fleet)["requests_total", "full", worker.url] for worker in full) > 0


def test_a_request_is_held_while_all_workers_are_full(make_fleet):
    fleet = make_fleet(2, max_attempts=1)
    for worker in fleet.workers:
        full_for(worker, 1)
    assert fleet.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert sorted(len(worker.asked("/v1/completions")) for worker in fleet.workers) == [1, 2]


def test_the_refusal_of_full_workers_is_passed_on_where_they_stay_full(make_fleet):
    fleet = make_fleet(2, queue_timeout_s=0.5)
    for worker in fleet.workers:
        full_for(worker, 100)
    answer = fleet.post("/generate", {"text": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "overloaded" and "(max_waiting_requests)" in answer.json()["message"]
    assert [len(worker.asked("/generate")) for worker in fleet.workers] == [1, 1]


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_restarted_alone_answers_the_requests_that_came_meanwhile(make_fleet):
    fleet = make_fleet(1)
    [worker] = fleet.workers
    usual, worker.generate, worker.is_draining = worker.generate, refuses, True
    port = worker.port
    with ThreadPoolExecutor(8) as pool:
        early = [pool.submit(fleet.post, "/generate", {"text": f"{i}"}) for i in range(4)]
        wait_until(lambda: fleet.stats()["num_held_requests"] == 4, "the requests are held")
        worker.stop()
        wait_until(lambda: fleet.report(worker)["status"] == "dead", "it has ended")
        late = [pool.submit(fleet.post, "/generate", {"text": f"{i}"}) for i in range(4)]
        wait_until(lambda: fleet.stats()["num_held_requests"] == 8, "more requests are held")
        assert counted(fleet)["held_requests",] == 8
        worker.generate, worker.is_draining, worker.info = usual, False, {"startup_time": 7.0}
        worker.start(port)
        answers = [one.result(WAIT_S) for one in early + late]
    assert [(answer.status_code, answer.json()["text"]) for answer in answers] == [(200, worker.url)] * 8


def test_a_worker_that_dies_alone_is_not_asked_again_before_it_is_known_to_be_well(make_fleet):
    fleet = make_fleet(1, health_interval_s=0.2)
    [worker] = fleet.workers
    port, usual = worker.port, worker.generate
    worker.generate = dies
    with ThreadPoolExecutor(1) as pool:
        worker.stop()
        answer = pool.submit(fleet.post, "/generate", {"text": "a"})
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "the request is held")
        worker.generate = usual
        worker.start(port)
        assert answer.result(WAIT_S).json() == {"text": worker.url}


def test_an_update_leaves_a_draining_worker_out_and_a_pause_does_not(fleet):
    draining, other = fleet.workers
    draining.is_draining = True
    wait_until(lambda: fleet.report(draining)["status"] == "draining", "it is draining")
    for path in ("/pause_generation", "/continue_generation"):
        assert fleet.post(path).status_code == 200 and draining.asked(path), path

    def update(body: dict) -> tuple[int, object]:
        other.version = "2"
        return 200, {"success": True}

    other.answers["/update_weights_from_disk"] = update
    for path in ("/update_weights_from_disk", "/begin_weight_update", "/end_weight_update"):
        assert fleet.post(path).status_code == 200 and not draining.asked(path), path
    assert fleet.http.get("/get_weight_version").json()["weight_version"] == "2"
    assert not fleet.journal.exists()
    draining.is_draining = False  # it changed its mind
    wait_until(lambda: "version" in fleet.report(draining)["held"], "it is held, for its old weights")


# -- requests that wait for a worker ---------------------------------------------------------------------------------


def test_requests_wait_while_the_workers_start(make_fleet):
    worker = FakeWorker()
    port = worker.port
    worker.stop()
    fleet = make_fleet([worker], wait=False)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(fleet.post, "/generate", {"text": f"{i}"}) for i in range(4)]
        wait_until(lambda: fleet.stats()["num_held_requests"] == 4, "the requests are held")
        assert fleet.report(worker)["status"] == "unseen" and fleet.report(worker)["num_deaths"] == 0
        assert "no connection" in fleet.report(worker)["last_error"]
        worker.is_loading = True
        worker.start(port)
        wait_until(lambda: fleet.report(worker)["status"] == "starting", "it is starting")
        assert not any(answer.done() for answer in answers)
        worker.is_loading = False
        assert {answer.result(WAIT_S).json()["text"] for answer in answers} == {worker.url}


def test_a_router_without_workers_holds_requests_until_one_is_added(make_fleet):
    fleet, worker = make_fleet([]), FakeWorker()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fleet.post, "/generate", {"text": "a"})
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "the request is held")
        fleet.workers.append(worker)
        fleet.post("/workers", {"url": worker.url})
        assert answer.result(WAIT_S).json() == {"text": worker.url}


def test_the_queue_has_a_length_and_a_time_and_a_client_that_leaves_makes_room(make_fleet):
    fleet = make_fleet([], max_held_requests=2)
    with ThreadPoolExecutor(2) as pool:
        hasty = pool.submit(fleet.http.post, "/generate", json={}, timeout=0.5)
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "a request is held")
        patient = pool.submit(fleet.post, "/generate")
        wait_until(lambda: fleet.stats()["num_held_requests"] == 2, "two requests are held")
        refused = fleet.post("/generate")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (
            refused.json()["error"]["type"] == "queue_full"
            and counted(fleet)["unanswered_requests_total", "queue_full"]
        )
        with pytest.raises(httpx.ReadTimeout):
            hasty.result(WAIT_S)
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "the client that left has made room")
        fleet.router.close()
        assert patient.result(WAIT_S).json()["error"]["type"] == "draining"


def test_the_wait_for_a_worker_ends_with_a_503_that_says_why(make_fleet):
    worker = FakeWorker()
    worker.stop()
    fleet = make_fleet([worker], wait=False, queue_timeout_s=0.2)
    answer = fleet.post("/v1/completions", {"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert error["code"] == "no_workers" and f"{worker.url} is unseen (no connection" in error["message"]


# -- the end of the router -------------------------------------------------------------------------------------------


class Process:
    """`lockstep route` in a process of its own, before fake workers."""

    def __init__(self, folder: Path, workers: list[FakeWorker], *settings: str) -> None:
        command = [sys.executable, "-m", "lockstep.integration.cli", "route", "--port", str(free_port())]
        command += ["--journal", str(folder / "journal.json"), "--worker", *(worker.url for worker in workers)]
        command += ["--setting", "health_interval_s=0.05", *settings]
        env = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.url = next(line.split()[-1] for line in self.process.stderr if " at http" in line)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.log: list[str] = []
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def _read(self) -> None:
        self.log += self.process.stderr

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.process.stderr.close()


@contextmanager
def streaming(folder: Path, *settings: str) -> Iterator[tuple[Process, SlowStream, Future]]:
    """Yield a router's process, and a stream through it that is open."""
    worker, stream = FakeWorker(), SlowStream()
    worker.generate = stream
    router = Process(folder, [worker], *settings)
    try:
        with ThreadPoolExecutor(1) as pool:
            wait_until(lambda: router.http.get("/ready").status_code == 200, "the router is ready")
            answer = pool.submit(httpx.post, f"{router.url}/generate", json={"stream": True}, timeout=WAIT_S)
            assert stream.entered.wait(WAIT_S)
            yield router, stream, answer
    finally:
        stream.leave.set()
        router.close()
        worker.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_that_is_asked_to_end_finishes_its_open_requests_takes_no_new_ones_and_ends_with_0(tmp_path, number):
    with streaming(tmp_path) as (router, stream, answer):
        router.process.send_signal(number)
        wait_until(lambda: router.http.get("/ready").text == '{"status":"draining"}', "the router is draining")
        assert router.http.get("/ready").status_code == 503
        assert router.http.get("/workers").status_code == router.http.get("/liveness").status_code == 200
        refused = router.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "draining"
        refused = router.http.post("/update_weights_from_disk", json={})
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "draining"
        assert router.http.post("/continue_generation", json={}).status_code == 200  # open requests may need it
        assert not answer.done()
        stream.leave.set()
        assert answer.result(WAIT_S).text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert router.process.wait(WAIT_S) == 0
        assert "Traceback" not in "".join(router.log)


@pytest.mark.parametrize("signals", [1, 2])
def test_the_time_for_open_requests_ends_or_a_second_signal_ends_it_and_the_client_is_told(tmp_path, signals):
    limit = 0.3 if signals == 1 else 600
    with streaming(tmp_path, f"drain_timeout_s={limit}") as (router, _, answer):
        router.process.send_signal(signal.SIGTERM)
        if signals == 2:
            wait_until(lambda: router.http.get("/ready").text == '{"status":"draining"}', "the router is draining")
            router.process.send_signal(signal.SIGTERM)
        text = answer.result(WAIT_S).text
        assert text.startswith("data: 1\n\ndata: {") and "[DONE]" not in text
        assert (
            "the router ended before worker http://127.0.0.1" in json.loads(text.split("data: ")[2])["error"]["message"]
        )
        assert router.process.wait(WAIT_S) == 0
        assert "Traceback" not in "".join(router.log)


def test_an_update_that_is_under_way_when_the_router_ends_is_finished(make_fleet):
    fleet: Fleet = make_fleet(2)
    slow = fleet.workers[0].answers["/update_weights_from_disk"] = SlowAnswer()
    with ThreadPoolExecutor(2) as pool:
        updating = pool.submit(fleet.post, "/update_weights_from_disk", {"model_path": "m"})
        assert slow.entered.wait(WAIT_S)
        closing = pool.submit(fleet.router.close)
        with httpx.Client(base_url=fleet.router.url, timeout=WAIT_S) as other:
            wait_until(lambda: other.get("/ready").text == '{"status":"draining"}', "the router is draining")
        slow.leave.set()
        assert updating.result(WAIT_S).status_code == 200
        closing.result(WAIT_S)
    assert not fleet.journal.exists()
