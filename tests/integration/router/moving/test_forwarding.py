"""What a router does around the answers that it forwards: when it passes events on, asks twice, waits, and counts."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing

import pytest

from lockstep.integration.router.calls import returned
from lockstep.tests.support.fake_workers import (
    WAIT_S,
    FakeWorker,
    Fleet,
    Handler,
    SlowAnswer,
    counted,
    wait_until,
)

pytestmark = pytest.mark.slow  # many small calls over real sockets

NAMED = {"weight_digest": "d" * 64, "guarantee": {"invariant": True}}
NOTED = b': progress {"head":{"rids":["a"]},"guarantee":{},"num_sequences":%d}\n: progress {"index":0}\ndata: 1\n\n'


def held(fleet: Fleet) -> int:
    return fleet.stats()["num_held_requests"]


# -- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "passed_on"),
    [
        ("http://{at}/v1/completions?a=1", "/v1/completions?a=1"),  # as FastAPI redirects a path with a slash behind it
        ("//{at}/v1/completions", "/v1/completions"),
        ("http://{at}", "/"),
        ("http://{at}//elsewhere.example/a", "/elsewhere.example/a"),
        ("/v1/completions", "/v1/completions"),
        ("https://elsewhere.example/a", "https://elsewhere.example/a"),
    ],
)
def test_a_redirect_of_a_worker_to_itself_leads_a_client_to_the_router(make_fleet, told, passed_on):
    fleet = make_fleet(1)
    [worker] = fleet.workers

    def redirect(handler: Handler, body: dict) -> None:
        handler.send_response(307)
        handler.send_header("location", told.format(at=f"127.0.0.1:{worker.port}"))
        handler.send_header("content-length", "0")
        handler.end_headers()

    worker.generate = redirect
    answer = fleet.post("/v1/completions/", {"prompt": "a"})
    assert (answer.status_code, answer.headers["location"]) == (307, passed_on)


@pytest.mark.parametrize(
    ("worker", "told", "passed_on"),
    [
        ("https://w", b"http://w/a?b", b"/a?b"),  # what ends the TLS does not tell the worker of it
        ("https://w:8443", b"http://w:8443/a", b"/a"),
        ("https://w", b"https://w:443/a", b"/a"),
        ("https://w", b"http://w:8080/a", b"http://w:8080/a"),
        ("https://w:8443", b"http://w/a", b"http://w/a"),
        ("http://w", b"https://w/a", b"https://w/a"),  # its own path leads back here
    ],
)
def test_a_redirect_of_a_worker_behind_tls_leads_a_client_to_the_router(worker, told, passed_on):
    assert returned([(b"Location", told)], worker) == [(b"location", passed_on)]


def test_a_redirect_that_is_no_url_is_passed_on_as_it_is():
    for told in (b"http://w:port/a", b"http://[w/a", b"\xff\x00"):
        assert returned([(b"Location", told)], "http://w:1") == [(b"location", told)]


# -- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved_streams", ["proven", "off"])
def test_each_event_of_a_stream_whose_lines_end_with_crlf_is_passed_on_at_once(make_fleet, moved_streams):
    fleet, has_event = make_fleet(1, moved_streams=moved_streams), threading.Event()
    sent = [b"data: 1\r\n\r", b"\ndata: 2\r\n\r\n", b"data: [DONE]\r\n\r\n"]

    def generate(handler: Handler, body: dict) -> None:
        handler.begin_stream()
        for part in sent[:2]:
            handler.send_part(part)
        assert has_event.wait(WAIT_S), "held back"
        handler.send_part(sent[2])
        handler.send_part(b"")

    fleet.workers[0].generate = generate
    with fleet.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        got = b""
        for part in answer.iter_raw():
            got += part
            if b"data: 2\r\n\r\n" in got:
                has_event.set()
    assert got == b"".join(sent)


def test_a_note_that_is_nested_too_deeply_ends_the_stream_with_an_error_that_names_the_worker(make_fleet):
    fleet = make_fleet(1, queue_timeout_s=0.2)

    def generate(handler: Handler, body: dict) -> None:
        if "begun" in body:
            handler.reply(409, {"error": {"message": "not here"}})
            return
        handler.begin_stream()
        for part in (NOTED % 1, b": progress " + b"[" * 200_000 + b"\ndata: 2\n\n", b"data: [DONE]\n\n", b""):
            handler.send_part(part)

    fleet.workers[0].generate = generate
    answer = fleet.post("/generate", {"text": "x", "stream": True})
    events = [event for event in answer.text.split("\n\n") if event]
    assert events[0] == "data: 1" and len(events) == 2, answer.text
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert error["type"] == "worker_died" and fleet.workers[0].url in error["message"]


def test_a_worker_that_claims_a_number_of_sequences_beyond_all_memory_loses_only_the_move_of_the_stream(make_fleet):
    fleet = make_fleet(1)

    def generate(handler: Handler, body: dict) -> None:
        handler.begin_stream()
        for part in (NOTED % 10**12, b"data: [DONE]\n\n", b""):
            handler.send_part(part)

    fleet.workers[0].generate = generate
    assert fleet.post("/generate", {"text": "x", "stream": True}).text == "data: 1\n\ndata: [DONE]\n\n"


# -- hedging, waiting, counting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved_streams", ["proven", "trusted", "off"])
def test_a_request_that_waits_goes_to_a_second_worker_whether_or_not_streams_move(make_fleet, moved_streams):
    workers = [FakeWorker(**NAMED) for _ in range(2)]
    fleet = make_fleet(workers, hedge_after_s=0.05, moved_streams=moved_streams)
    asked, release = threading.Semaphore(1), threading.Event()

    def first_waits(handler: Handler, body: dict) -> None:
        if asked.acquire(blocking=False):
            release.wait(WAIT_S)
        handler.reply(200, {"text": "", "seed": body["default_seed"]})

    for worker in workers:
        worker.generate = first_waits
    try:
        answer = fleet.post("/generate", {"text": "x"})
    finally:
        release.set()
    [seeds] = {tuple(one["default_seed"] for worker in workers for one in worker.asked("/generate"))}
    assert len(seeds) == 2 and set(seeds) == {answer.json()["seed"]}


def begin_a_stream(handler: Handler) -> None:
    """Send the first event of a stream that can go on elsewhere."""
    handler.begin_stream()
    note = {"index": 0, "ids": [1], "logprobs": [-0.5], "chars": 1, "version": "1", "cached": 0,
            "digest": NAMED["weight_digest"]}  # fmt: skip
    head = {"head": {"rids": ["a"]}, "guarantee": NAMED["guarantee"], "num_sequences": 1}
    handler.send_part(b"".join(f": progress {json.dumps(one)}\n".encode() for one in (head, note)) + b"data: 1\n\n")


def test_a_stream_waits_for_the_only_worker_that_can_go_on_with_it_while_that_is_full(make_fleet):
    able, other = FakeWorker(**NAMED), FakeWorker(**{**NAMED, "weight_digest": "e" * 64})
    fleet = make_fleet([able, other], queue_timeout_s=0.5, allow_mixed_versions=True)
    others = f"/workers/{fleet.report(other)['id']}"
    fleet.post(f"{others}/disable").raise_for_status()

    def generate(handler: Handler, body: dict) -> None:
        if "begun" in body:
            handler.reply(503, {"error": {"message": "9 wait", "code": "overloaded"}})
            return
        begin_a_stream(handler)
        fleet.post(f"{others}/enable").raise_for_status()
        handler.close_connection = True  # in the middle of the stream

    able.generate = generate
    answer = fleet.post("/generate", {"text": "x", "stream": True})
    assert answer.text.startswith("data: 1\n\n") and "all workers are full" in answer.text, answer.text
    assert len([body for body in able.asked("/generate") if "begun" in body]) == 1
    assert not other.asked("/generate")


def test_a_stream_does_not_wait_for_a_worker_that_only_an_operator_can_bring_back(make_fleet):
    able, dying = FakeWorker(**NAMED), FakeWorker(**NAMED)
    fleet = make_fleet([able, dying])
    fleet.post(f"/workers/{fleet.report(able)['id']}/disable").raise_for_status()

    def generate(handler: Handler, body: dict) -> None:
        begin_a_stream(handler)
        fleet.post(f"/workers/{fleet.report(dying)['id']}/disable").raise_for_status()
        handler.die()

    dying.generate = generate
    answer = fleet.post("/generate", {"text": "x", "stream": True})  # it would wait longer than this client
    assert answer.text.startswith("data: 1\n\n") and f"{able.url} is disabled" in answer.text, answer.text


class Silenced(FakeWorker):
    """A worker that answers no probe once it has refused to go on with a stream, until the test ends."""

    def __init__(self) -> None:
        self.has_refused, self.leave = threading.Event(), threading.Event()
        super().__init__(**NAMED)
        self.generate = self._go_on

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        if self.has_refused.is_set():
            self.leave.wait(WAIT_S)
        return super().answer(path, body)

    def _go_on(self, handler: Handler, body: dict) -> None:
        if "begun" not in body:
            begin_a_stream(handler)
            handler.die()
        else:
            self.has_refused.set()
            handler.reply(413, {"error": {"message": "the body is too long"}})


def test_a_worker_for_which_a_stream_is_too_long_keeps_the_name_of_its_weights(make_fleet):
    fleet = make_fleet([Silenced(), Silenced()], max_attempts=2, health_timeout_s=WAIT_S)
    answer = fleet.post("/generate", {"text": "x", "stream": True})
    assert "answered 413: " in answer.text and "the body is too long" in answer.text, answer.text
    [refusing] = [worker for worker in fleet.workers if worker.has_refused.is_set()]
    assert fleet.report(refusing)["weight_digest"] == NAMED["weight_digest"]
    for worker in fleet.workers:
        worker.leave.set()


def test_a_client_that_leaves_while_its_new_session_waits_for_a_worker_gives_its_place_back(make_fleet):
    fleet, slow = make_fleet(1), SlowAnswer()
    fleet.workers[0].answers["/pause_generation"] = slow
    pausing = threading.Thread(target=lambda: fleet.post("/pause_generation", {"mode": "in_place"}))
    pausing.start()
    try:
        assert slow.entered.wait(WAIT_S)
        for path in ("/generate", "/open_session"):
            port = int(fleet.router.url.rpartition(":")[2])
            with closing(socket.create_connection(("127.0.0.1", port), WAIT_S)) as client:
                head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{{}}"
                client.sendall(head.encode())
                wait_until(lambda: held(fleet) == 1, "it waits")
            wait_until(lambda: held(fleet) == 0, f"{path} has left")
            assert pausing.is_alive(), f"{path} has waited for the end of the pause"
    finally:
        slow.leave.set()
        pausing.join(WAIT_S)
    assert not fleet.workers[0].asked("/open_session")


def test_requests_that_end_at_a_removed_worker_bring_none_of_its_labels_back(make_fleet):
    fleet, release = make_fleet(2), threading.Event()

    def waits(handler: Handler, body: dict) -> None:
        release.wait(WAIT_S)
        handler.reply(200, {"text": ""})

    for worker in fleet.workers:
        worker.generate = waits
    statuses: list[int] = []
    clients = [
        threading.Thread(target=lambda: statuses.append(fleet.post("/generate", {"text": "x"}).status_code))
        for _ in range(4)
    ]
    for client in clients:
        client.start()
    wait_until(lambda: sum(len(worker.asked("/generate")) for worker in fleet.workers) == 4, "all are sent")
    gone = next(worker for worker in fleet.workers if worker.asked("/generate"))
    assert fleet.http.delete(f"/workers/{fleet.report(gone)['id']}").status_code == 202
    release.set()
    for client in clients:
        client.join(WAIT_S)
    assert statuses == [200] * 4
    assert not any(gone.url in key for key in counted(fleet))
