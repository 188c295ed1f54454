"""Aborts at a router end the requests that wait there too, before a worker has them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.router.calls import WorkerCall
from lockstep.integration.router.changes.rules import aborted_by
from lockstep.integration.router.fleet.aborted import Abort, Aborted, AbortLog
from lockstep.integration.router.fleet.held import HeldRequests
from lockstep.integration.router.fleet.worker import Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry
from lockstep.tests.support.fake_workers import WAIT_S, Fleet, Handler, SlowAnswer, refuse, wait_until

MAX_LISTS = 1000
EVERYTHING = Abort(None)


def call(path: str, body: object = None, query: str = "", method: str = "POST") -> WorkerCall:
    return WorkerCall(method, path, query, (), json.dumps(body or {}).encode())


async def turns() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


# -- which requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (call("/abort_request", {"rid": "a"}), Abort(frozenset({"a"}))),
        (call("/lockstep/abort_request", {"rid": "a", "abort_message": "why"}), Abort(frozenset({"a"}), "why")),
        (call("/abort_request", {"abort_all": True, "finished_reason": {"message": "m"}}), Abort(None, "m")),
        (call("/abort_request", {}), None),
        (call("/abort_request", {"rid": 7}), None),
        (call("/abort_requests", {"request_ids": ["a"]}), Abort(frozenset({"a"}), "aborted by abort_requests")),
        (call("/abort_requests", {}), Abort(None, "aborted by abort_requests")),
        (
            call("/inference/v1/abort_requests", {"request_ids": ["a"]}),
            Abort(frozenset({"generate-tokens-a"}), "aborted by abort_requests"),
        ),
        (call("/pause_generation", {}), EVERYTHING),
        (call("/pause_generation", {"mode": "retract"}), None),
        (call("/areal_pause_generation", {}), EVERYTHING),
        (call("/lockstep/pause_generation", {"mode": "abort"}), EVERYTHING),
        (call("/lockstep/pause_generation", {}), None),  # its own default is retract
        (call("/lockstep/abort_request", {"abort_all": True, "message": "why"}), Abort(None, "why")),
        (call("/abort_requests", {}, method="GET"), None),  # no worker takes it so
        (call("/lockstep/abort_requests", {}), None),  # nor under this prefix
        (call("/pause", query="mode=abort"), EVERYTHING),
        (call("/pause", query="mode=keep"), None),
        (call("/flush_cache"), None),
    ],
)
def test_a_verb_says_which_requests_it_aborts(verb, expected):
    assert aborted_by(verb, json.loads(verb.body)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "aborted"),
    [
        ("/abort_request", {"rid": "a"}, True),
        ("/abort_request", {"rid": "b"}, False),
        ("/abort_request", {"abort_all": True}, True),
        ("/pause_generation", {"mode": "abort"}, True),
        ("/pause_generation", {"mode": "retract"}, False),
    ],
)
def test_a_request_whose_worker_dies_with_its_abort_does_not_begin_again(make_fleet, path, body, aborted):
    fleet = make_fleet(2, max_attempts=2)
    entered, die = threading.Event(), threading.Event()

    def first_one_dies(handler: Handler, body: dict) -> None:
        if entered.is_set():
            handler.reply(200, {"text": "from its beginning"})
            return
        entered.set()
        die.wait(WAIT_S)
        handler.die()

    for worker in fleet.workers:
        worker.generate = first_one_dies
        worker.answers[path] = refuse("it is busy")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fleet.post, "/generate", {"text": "x", "rid": "a"})
        assert entered.wait(WAIT_S)
        fleet.post(path, body)
        die.set()
        answer = asked.result(WAIT_S).json()
    assert answer["text"] == ("" if aborted else "from its beginning")
    assert not aborted or answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert sum(len(worker.asked("/generate")) for worker in fleet.workers) == (1 if aborted else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"), [("/abort_request", {"rid": "a"}), ("/abort_requests", {"request_ids": ["a"]})]
)
def test_an_abort_of_a_request_that_waits_succeeds_where_no_worker_is_alive(make_fleet, path, body):
    fleet = make_fleet(1)
    fleet.workers[0].is_loading = True
    wait_until(lambda: not fleet.stats()["num_healthy"], "no worker is alive")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fleet.post, "/generate", {"text": "x", "rid": "a"})
        wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
        assert fleet.post(path, {name: "b" if name == "rid" else ["b"] for name in body}).status_code == 503
        answer = fleet.post(path, body)
        assert answer.status_code == 200 and (answer.json()["success"], answer.json()["aborted"]) == (True, 1)
        assert asked.result(WAIT_S).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_aborts_are_noted_as_long_as_a_request_is_open_that_began_before_them():
    log = AbortLog()
    a, b, c = (Abort(frozenset({name})) for name in "abc")
    log.add(a)
    with ExitStack() as older:
        first = older.enter_context(log.since_now())
        log.add(b)
        with log.since_now() as second:
            log.add(c)
            assert (list(first), list(second)) == ([b, c], [c])
        assert list(first) == [b, c]
        with ExitStack() as newer:
            third = newer.enter_context(log.since_now())
            log.add(a)
            older.close()
            assert list(third) == [a] and len(log) == 1
    assert not len(log)


@pytest.mark.slow
def test_a_verb_that_acts_is_no_get(fleet):
    for path in ("/abort_requests", "/abort_request", "/reset_prefix_cache", "/hicache/pin_blocks", "/start_profile"):
        refused = fleet.http.get(path)
        assert refused.status_code == 405 and "POST" in refused.headers["allow"], refused.text
    assert not any(worker.asked("/abort_requests") for worker in fleet.workers)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/generate", {"rid": "a"}, "a"),
        ("/v1/completions", {"rid": "a"}, "a"),
        ("/v1/completions", {"request_id": "a"}, "cmpl-a"),
        ("/v1/chat/completions", {"request_id": "a"}, "chatcmpl-a"),
        ("/v1/messages", {"rid": "a"}, "a"),
        ("/v1/messages", {"request_id": "a"}, "msg_a"),
        ("/v1/responses", {"request_id": "a"}, "resp_a"),
        ("/inference/v1/generate", {"request_id": "a"}, "generate-tokens-a"),
    ],
)
def test_a_waiting_request_is_aborted_by_its_own_name_only_and_leaves_the_queue(path, body, name):
    async def run() -> None:
        registry = WorkerRegistry()
        registry.add("http://w:1")
        held = HeldRequests(registry, 100)

        async def wait() -> Worker:
            async with held.abortable(call(path, body)):
                return await held.worker(lambda: None, time.monotonic() + WAIT_S)

        waiting = asyncio.create_task(wait())
        await turns()
        await held.abort(Abort(frozenset({"b", f"{name}-0"})), MAX_LISTS)
        await turns()
        assert not waiting.done() and len(held) == 1
        for _ in range(2):  # the second one comes while the first one ends it
            await held.abort(Abort(frozenset({name}), "enough"), MAX_LISTS)
        with pytest.raises(Aborted, match="enough"):
            await waiting
        assert not len(held)
        await held.abort(EVERYTHING, MAX_LISTS)

    asyncio.run(run())


def test_a_batch_is_aborted_when_all_its_names_are_and_another_call_never():
    async def run() -> None:
        held = HeldRequests(WorkerRegistry(), 100)

        async def wait(path: str) -> Worker:
            async with held.abortable(call(path, {"rid": ["a", "b"]})):
                return await held.its_worker(lambda: None, time.monotonic() + WAIT_S)

        batch, other = asyncio.create_task(wait("/generate")), asyncio.create_task(wait("/open_session"))
        await turns()
        await held.abort(Abort(frozenset({"a"})), MAX_LISTS)
        await turns()
        assert not batch.done()
        await held.abort(Abort(frozenset({"b"})), MAX_LISTS)
        with pytest.raises(Aborted):
            await batch
        await held.abort(EVERYTHING, MAX_LISTS)
        await turns()
        assert not other.done()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    asyncio.run(run())


def test_a_request_that_finds_its_worker_as_it_is_aborted_is_not_sent():
    async def run() -> None:
        registry, found = WorkerRegistry(), []
        worker, _ = registry.add("http://w:1")
        held = HeldRequests(registry, 100)

        async def wait() -> Worker:
            async with held.abortable(call("/generate", {"rid": "a"})):
                return await held.worker(lambda: found[0] if found else None, time.monotonic() + WAIT_S)

        waiting = asyncio.create_task(wait())
        await turns()
        found.append(worker)
        registry.notify()
        await held.abort(EVERYTHING, MAX_LISTS)
        with pytest.raises(Aborted):
            await waiting

    asyncio.run(run())


# -- answers ---------------------------------------------------------------------------------------------------------


def answered(path: str, **body: object) -> object:
    data, kind = asyncio.run(Aborted(call(path, body), "enough").answer("7", MAX_LISTS))
    if not body.get("stream"):
        assert kind == "application/json"
        return json.loads(data)
    assert kind.startswith("text/event-stream")
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_of_an_aborted_generate_has_no_token_and_the_form_that_was_asked_for(stream):
    one = answered("/generate", text="x", rid="a", stream=stream)
    [one] = one if stream else [one]  # type: ignore[misc]
    assert one["text"] == "" and one["output_ids"] == []
    assert one["meta_info"]["id"] == "a" and one["meta_info"]["weight_version"] == "7"
    assert one["meta_info"]["finish_reason"]["type"] == "abort"
    assert one["meta_info"]["finish_reason"]["message"] == "enough"
    many = answered("/generate", text=["x", "y"], rid=["a", "b"], sampling_params={"n": 2}, stream=stream)
    assert [each["meta_info"]["id"] for each in many] == ["a-0", "a-1", "b-0", "b-1"]  # type: ignore[attr-defined]
    assert [each.get("index") for each in many] == ([0, 1, 2, 3] if stream else [None] * 4)  # type: ignore[attr-defined]
    assert len(answered("/generate", input_ids=[[1]], stream=stream)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "name", "part", "streamed"),
    [
        ("/v1/completions", "id", ("text", ""), ("text", "")),
        (
            "/v1/chat/completions", "id", ("message", {"role": "assistant", "content": ""}),
            ("delta", {"role": "assistant", "content": ""}),
        ),
        ("/inference/v1/generate", "request_id", ("token_ids", []), ("token_ids", [])),
    ],
)  # fmt: skip
def test_the_answer_of_the_other_wires_ends_each_choice_with_abort(path, name, part, streamed):
    whole = answered(path, request_id="a", n=2)
    assert whole[name].endswith("-a") and whole["usage"]["total_tokens"] == 0  # type: ignore[call-overload,index]
    for index, choice in enumerate(whole["choices"]):  # type: ignore[call-overload,index]
        assert choice["index"] == index and choice["finish_reason"] == "abort" and choice[part[0]] == part[1]
        assert choice["finish_message"] == "enough"
    events = answered(path, request_id="a", n=2, stream=True, stream_options={"include_usage": True})
    *choices, usage = events  # type: ignore[misc]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 0
    assert [one["choices"][0]["index"] for one in choices] == [0, 1]
    assert all(one["choices"][0][streamed[0]] == streamed[1] for one in choices)


@pytest.mark.parametrize("rid", [{}, {"rid": "mine"}, {"request_id": "mine"}])
def test_a_message_that_is_aborted_has_paused_its_turn(rid):
    anthropic = pytest.importorskip("anthropic")
    whole = answered("/v1/messages", model="m", messages=[], max_tokens=5, **rid)
    read = anthropic.types.Message.model_validate(whole)
    assert (read.content, read.stop_reason, read.usage.output_tokens) == ([], "pause_turn", 0)
    assert whole["finish_message"] == "enough"  # type: ignore[call-overload,index]
    assert read.id == {"rid": "mine", "request_id": "msg_mine"}.get(next(iter(rid), ""), read.id)
    start, delta, stop = named_events("/v1/messages", model="m", messages=[], max_tokens=5, **rid)
    assert anthropic.types.RawMessageStartEvent.model_validate(start).message.stop_reason is None
    assert anthropic.types.RawMessageDeltaEvent.model_validate(delta).delta.stop_reason == "pause_turn"
    assert stop == {"type": "message_stop"}


def test_a_response_that_is_aborted_is_incomplete():
    openai_types = pytest.importorskip("openai.types.responses")
    body = {"model": "m", "input": "hello", "instructions": "be", "request_id": "a", "tools": []}
    whole = answered("/v1/responses", **body)
    read = openai_types.Response.model_validate(whole)
    assert (read.id, read.status, read.output, read.instructions) == ("resp_a", "incomplete", [], "be")
    assert whole["finish_message"] == "enough"  # type: ignore[call-overload,index]
    assert whole["finish_reason"] == "abort" and read.usage.total_tokens == 0  # type: ignore[call-overload,index]
    events = named_events("/v1/responses", **body)
    assert [one["type"] for one in events] == ["response.created", "response.in_progress", "response.incomplete"]
    assert [one["sequence_number"] for one in events] == [0, 1, 2]
    assert [one["response"]["status"] for one in events] == ["in_progress", "in_progress", "incomplete"]


def test_an_abort_that_is_an_error_is_not_called_again():
    assert Aborted(call("/v1/responses", {}), "enough").headers == {"X-Should-Retry": "false"}


def named_events(path: str, **body: object) -> list[dict]:
    data, kind = asyncio.run(Aborted(call(path, {**body, "stream": True}), "enough").answer("7", MAX_LISTS))
    assert kind.startswith("text/event-stream")
    *events, rest = data.decode().split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, value = event.split("\n")
        found.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_aborted_request_that_is_no_request_or_too_large_gets_an_error():
    bad = WorkerCall("POST", "/generate", "", (), b"[1]")
    with pytest.raises(HttpError) as refused:
        asyncio.run(Aborted(bad, "enough").answer(None, MAX_LISTS))
    assert refused.value.status == 400
    with pytest.raises(Aborted):
        answered("/generate", text=["x"] * 20, sampling_params={"n": 4096})


# -- over sockets ----------------------------------------------------------------------------------------------------


@contextmanager
def being_paused(fleet: Fleet) -> Iterator[ThreadPoolExecutor]:
    """Hold requests inside the block, because the worker is slow to pause."""
    slow = SlowAnswer()
    fleet.workers[0].answers["/pause_generation"] = slow
    with ThreadPoolExecutor(4) as pool:
        pausing = pool.submit(fleet.post, "/pause_generation", {"mode": "in_place"})
        try:
            assert slow.entered.wait(WAIT_S)
            yield pool
        finally:
            slow.leave.set()
            pausing.result(WAIT_S)


def held(fleet: Fleet, num: int) -> None:
    wait_until(lambda: fleet.stats()["num_held_requests"] == num, f"{num} wait")


@pytest.mark.slow
@pytest.mark.parametrize("verb", [{"rid": "a"}, {"abort_all": True}])
def test_an_abort_answers_a_request_that_waits_at_the_router_and_no_worker_gets_it(make_fleet, verb):
    fleet = make_fleet(1)
    [worker] = fleet.workers

    def ask(rid: str) -> httpx.Response:
        return httpx.post(f"{fleet.router.url}/generate", json={"text": "x", "rid": rid}, timeout=WAIT_S)

    with being_paused(fleet) as pool:
        waiting: list[Future[httpx.Response]] = [pool.submit(ask, rid) for rid in "ab"]
        held(fleet, 2)
        assert fleet.post("/abort_request", verb).status_code == 200
        answer = waiting[0].result(WAIT_S)
        assert answer.status_code == 200 and answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        held(fleet, 0 if "abort_all" in verb else 1)
    assert waiting[1].result(WAIT_S).status_code == 200
    assert [body["rid"] for body in worker.asked("/generate")] == ([] if "abort_all" in verb else ["b"])


@pytest.mark.slow
def test_a_pause_that_aborts_ends_the_requests_that_wait_and_another_one_does_not(make_fleet):
    fleet = make_fleet(1)
    [worker] = fleet.workers
    ident = fleet.report(worker)["id"]
    assert (
        fleet.post("/workers", {"url": "http://127.0.0.1:1"}).status_code == 202
    )  # it may start: requests wait for it
    fleet.http.post(f"/workers/{ident}/disable").raise_for_status()
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{fleet.router.url}/v1/completions", json={"prompt": "x"}, timeout=WAIT_S)
        )
    )
    asking.start()
    held(fleet, 1)
    assert fleet.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    held(fleet, 1)
    assert fleet.post("/pause_generation", {}).status_code == 200
    asking.join(WAIT_S)
    assert [answer.json()["choices"][0]["finish_reason"] for answer in answers] == ["abort"]
    assert not worker.asked("/v1/completions")
