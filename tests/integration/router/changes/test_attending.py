"""The update of a client whose connection closes is taken back, whoever else has asked for one meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from types import SimpleNamespace

import pytest

from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.router.attending import OpenAnswer
from lockstep.integration.router.calls import WorkerCall
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.fleet.worker import Worker
from lockstep.tests.integration.http.admin.test_attendance import attend
from lockstep.tests.support.callers import submit, wait_until
from lockstep.tests.support.fake_workers import WAIT_S, Fleet, SlowAnswer, refuse

pytestmark = pytest.mark.slow

BEGIN, ABORT = "/lockstep/begin_weight_update", "/lockstep/abort_weight_update"


@contextmanager
def attending(fleet: Fleet, client: str) -> Iterator[None]:
    """Keep a connection of this client open."""
    with closing(attend(fleet.router.url, client)):
        yield


def taken_back(fleet: Fleet) -> list[list[str]]:
    """Return the names of the clients whose updates each worker was told to take back."""
    return [[body["client"] for body in worker.asked(ABORT)] for worker in fleet.workers]


def test_a_refused_begin_of_another_client_leaves_the_session_to_its_own(fleet):
    with attending(fleet, "a"):
        assert fleet.post(BEGIN, {"client": "a"}).status_code == 200
        for worker in fleet.workers:
            worker.answers[BEGIN] = refuse("a session of a is open", "SessionError")
        with attending(fleet, "b"):
            assert fleet.post(BEGIN, {"client": "b"}).status_code >= 400
        assert fleet.post(BEGIN, {"client": "b"}).status_code >= 400
    wait_until(
        lambda: taken_back(fleet) == [["a"], ["a"]], WAIT_S, "the session of the client that has left is taken back"
    )


def test_the_session_of_a_client_that_leaves_while_it_begins_is_taken_back(fleet):
    slow = SlowAnswer()
    with attending(fleet, "a"):
        fleet.workers[0].answers[BEGIN] = slow
        begun = submit(fleet.post, BEGIN, {"client": "a"})
        assert slow.entered.wait(WAIT_S)
    slow.leave.set()
    assert begun.result(WAIT_S).status_code == 200
    wait_until(lambda: taken_back(fleet) == [["a"], ["a"]], WAIT_S, "it is taken back once it has begun")


# -- workers that hang -----------------------------------------------------------------------------------------------


class Silent:
    """Connections to workers that answer nothing."""

    def __init__(self) -> None:
        self.num_open, self.is_asked = 0, asyncio.Event()

    @asynccontextmanager
    async def call(self, url: str, call: WorkerCall) -> AsyncIterator[None]:
        self.num_open += 1
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.num_open -= 1


class Attended:
    """A client's connection through a router to one worker that answers nothing."""

    def __init__(self, **settings: float) -> None:
        self.wire, self.worker = Silent(), Worker("http://w:1", "w")
        self.sent: list[dict] = []
        self.has_left = asyncio.Event()
        router = SimpleNamespace(
            administering=self.wire, config=RouterConfig(**settings), is_over=asyncio.Event(),
            admin=SimpleNamespace(client_left=self._client_left),
        )  # fmt: skip
        call = WorkerCall("POST", "/lockstep/attend", "", (), b"{}")
        answer = OpenAnswer(router, call, "a", [self.worker])  # type: ignore[arg-type]
        self.answering = asyncio.create_task(answer({"type": "http"}, self._receive, self._send))

    async def _client_left(self, client: str, call: WorkerCall) -> None:
        pass

    async def _receive(self) -> dict:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.sent.append(message)

    async def is_attended(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.sent:
                await asyncio.sleep(0)
        assert self.sent[0]["status"] == 200

    async def leave(self) -> None:
        self.has_left.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({self.answering})
            while self.wire.num_open:
                await asyncio.sleep(0)


def test_a_client_that_leaves_while_a_worker_hangs_takes_its_connections_along():
    async def run() -> None:
        one = Attended(health_timeout_s=WAIT_S * 10)
        await one.wire.is_asked.wait()
        await one.leave()
        with pytest.raises(HttpError, match="left"):
            one.answering.result()
        assert not one.sent

    asyncio.run(run())


def test_a_client_waits_no_longer_for_a_worker_that_hangs_than_a_probe_does():
    async def run() -> None:
        one = Attended(health_timeout_s=0.01, connect_timeout_s=0.01)
        await one.is_attended()
        assert one.worker.is_suspect
        await one.leave()

    asyncio.run(run())


def test_a_client_does_not_wait_for_a_worker_that_is_found_dead():
    async def run() -> None:
        one = Attended(health_timeout_s=WAIT_S * 10)
        await one.wire.is_asked.wait()
        one.worker.died.set()
        await one.is_attended()
        await one.leave()

    asyncio.run(run())
