"""Workers that register side by side, as the engines of a job do when they start."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from lockstep.tests.support.fake_workers import WAIT_S, FakeWorker, Fleet, Handler, wait_until

NUM = 12


@pytest.fixture
def silent_urls() -> Iterator[list[str]]:
    """Hold addresses at which nobody listens or begins to, as a server of another test may at one that is only free."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(NUM)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]


@pytest.mark.parametrize("path", ["/workers", "/add_worker"])
def test_workers_that_come_and_go_side_by_side_wait_for_each_other(make_fleet, silent_urls, path):
    fleet, urls = make_fleet(1), silent_urls

    def add(url: str) -> int:
        if path == "/workers":
            return fleet.post(path, {"url": url}).status_code
        return fleet.http.post(path, params={"url": url}).status_code

    with ThreadPoolExecutor(NUM) as callers:
        assert set(callers.map(add, urls)) == {202}
        assert set(urls) <= set(fleet.http.get("/list_workers").json()["urls"])
        removed = callers.map(lambda url: fleet.http.post("/remove_worker", params={"url": url}).status_code, urls)
        assert set(removed) == {202}
    assert not set(urls) & set(fleet.http.get("/list_workers").json()["urls"])


def why(fleet: Fleet, url: str) -> str:
    worker = next(one for one in fleet.http.get("/workers").json()["workers"] if one["url"] == url)
    assert not worker["is_healthy"]
    return worker["last_error"] or ""


@pytest.mark.parametrize(("num", "said"), [(1, "leads back to this router"), (2, "/model_info: it answered 502")])
def test_a_router_is_no_worker_of_its_own_nor_of_one_that_it_leads_to(make_fleet, num, said):
    """Each probe, which goes on to all workers, would ask for another one."""
    fleet = make_fleet(1)
    with ExitStack() as ended:
        other = fleet
        if num == 2:
            folder = fleet.journal.parent / "other"
            folder.mkdir()
            other = Fleet(folder, [], wait=False)
            ended.callback(other.close)
            assert other.post("/workers", {"url": fleet.router.url}).status_code == 202
        assert fleet.post("/workers", {"url": other.router.url}).status_code == 202
        wait_until(lambda: said in why(fleet, other.router.url), "it is known")
        assert fleet.post("/flush_cache").status_code == 200
        assert len(fleet.workers[0].asked("/flush_cache")) == 1
        assert fleet.post("/generate", {"text": "a"}).json()["text"] == fleet.workers[0].url


def test_a_worker_under_two_addresses_is_one_worker(make_fleet):
    fleet = make_fleet(1)
    twin = fleet.workers[0].url.replace("127.0.0.1", "localhost")
    assert fleet.post("/workers", {"url": twin}).status_code == 202
    wait_until(lambda: f"same process as {fleet.workers[0].url}" in why(fleet, twin), "it is known")
    assert fleet.post("/flush_cache").status_code == 200
    assert len(fleet.workers[0].asked("/flush_cache")) == 1
    assert fleet.http.post("/remove_worker", params={"url": fleet.workers[0].url}).status_code == 202
    wait_until(lambda: fleet.stats()["num_healthy"] == 1, "it is a worker like any other now")


class HangingWorker(FakeWorker):
    """A worker that keeps its generations, and its health checks too while it hangs, until the test ends."""

    def __init__(self) -> None:
        self.hangs, self.leave = False, threading.Event()
        super().__init__()
        self.generate = self._keep

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        if self.hangs:
            self.leave.wait(WAIT_S)
        return super().answer(path, body)

    def _keep(self, handler: Handler, body: dict) -> None:
        self.leave.wait(WAIT_S)
        handler.reply(200, {"text": self.url})


@contextmanager
def open_at_a_removed_worker(make_fleet) -> Iterator[tuple[Fleet, HangingWorker, Future[httpx.Response]]]:
    """Yield a request that is open at a worker which was removed, and well until then."""
    kept = HangingWorker()
    fleet = make_fleet([kept, FakeWorker()], health_timeout_s=0.2)
    other = f"/workers/{fleet.report(fleet.workers[1])['id']}"
    fleet.post(f"{other}/disable").raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        try:
            asking = pool.submit(fleet.post, "/generate", {"text": "a"})
            wait_until(lambda: kept.asked("/generate"), "it has the request")
            fleet.post(f"{other}/enable").raise_for_status()
            fleet.http.delete(f"/workers/{fleet.report(kept)['id']}").raise_for_status()
            yield fleet, kept, asking
        finally:
            kept.leave.set()


def test_requests_leave_a_removed_worker_that_hangs(make_fleet):
    with open_at_a_removed_worker(make_fleet) as (fleet, kept, asking):
        kept.hangs = True
        assert asking.result(WAIT_S / 2).json() == {"text": fleet.workers[1].url}
        assert [one["url"] for one in fleet.http.get("/workers").json()["workers"]] == [fleet.workers[1].url]


def test_a_removed_worker_finishes_its_requests_and_is_left_alone_then(make_fleet):
    with open_at_a_removed_worker(make_fleet) as (fleet, kept, asking):
        num = len(kept.asked("/health"))
        wait_until(lambda: fleet.stats() and len(kept.asked("/health")) > num + 5, "it is probed")
        assert not asking.done()
        kept.leave.set()
        assert asking.result(WAIT_S).json() == {"text": kept.url}
    num, before = len(kept.asked("/health")), len(fleet.workers[1].asked("/health"))
    other = fleet.workers[1]
    wait_until(lambda: fleet.stats() and len(other.asked("/health")) > before + 3, "the other one is probed on")
    assert len(kept.asked("/health")) <= num + 1


@pytest.mark.parametrize("value", ["false", 0, 1, [], {}])
def test_a_flag_of_a_worker_that_is_none_is_refused(make_fleet, value):
    fleet = make_fleet(1)
    answer = fleet.post("/workers", {"url": "http://127.0.0.1:9", "disabled": value})
    assert answer.status_code == 400 and "disabled" in answer.text


def test_probes_may_ask_for_the_head_alone(make_fleet):
    fleet = make_fleet(1)
    for path in ("/health", "/ready", "/ping"):
        assert fleet.http.head(path).status_code == fleet.http.get(path).status_code == 200
