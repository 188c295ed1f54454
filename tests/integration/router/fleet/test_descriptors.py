"""A router without free file descriptors: that is no fault of its workers, and requests wait until some are free."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import httpx
import pytest

from lockstep.tests.integration.router.test_draining import Process, SlowStream
from lockstep.tests.support.fake_workers import WAIT_S, FakeWorker, wait_until

pytestmark = pytest.mark.slow


@contextmanager
def without_descriptors(router: Process) -> Iterator[None]:
    """Let the router's process open no further descriptor in the block."""
    limits = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    workers = [FakeWorker(), FakeWorker()]
    yield workers
    for worker in workers:
        worker.stop()


@contextmanager
def routing(tmp_path, workers: list[FakeWorker], *settings: str) -> Iterator[Process]:
    with closing(Process(tmp_path, workers, *settings)) as router:
        wait_until(lambda: router.http.get("/workers").json()["stats"]["num_healthy"] == 2, "both are well")
        yield router


def num_probes(workers: list[FakeWorker]) -> int:
    return min(len(worker.asked("/health")) for worker in workers)


def report(router: Process) -> list[tuple[str, int]]:
    return [(one["status"], one["num_deaths"]) for one in router.http.get("/workers").json()["workers"]]


def test_workers_stay_alive_and_their_streams_open_and_requests_wait_for_descriptors(tmp_path, workers):
    stream = workers[0].generate = workers[1].generate = SlowStream()
    with routing(tmp_path, workers) as router, httpx.Client(base_url=router.url, timeout=WAIT_S) as other:
        other.get("/ready").raise_for_status()  # its connection is open now
        with ThreadPoolExecutor(3) as pool:
            open_one = pool.submit(httpx.post, f"{router.url}/generate", json={"stream": True}, timeout=WAIT_S)
            assert stream.entered.wait(WAIT_S)
            with without_descriptors(router):
                waiting = pool.submit(other.post, "/generate", json={"text": "a", "stream": True})
                wait_until(lambda: router.http.get("/workers").json()["stats"]["num_held_requests"] == 1, "it waits")
                late = pool.submit(httpx.get, f"{router.url}/liveness", timeout=WAIT_S)  # over a new connection
                for _ in range(300):  # longer than the probes by which a worker is dead
                    assert report(router) == [("alive", 0)] * 2
                assert not open_one.done() and not waiting.done() and not late.done()
            assert late.result(WAIT_S).status_code == 200
            stream.leave.set()
            assert open_one.result(WAIT_S).text.endswith("[DONE]\n\n")
            assert waiting.result(WAIT_S).text.endswith("[DONE]\n\n")
        before = num_probes(workers)
        wait_until(lambda: report(router) and num_probes(workers) > before + 3, "they are probed again")
        assert report(router) == [("alive", 0)] * 2


def test_a_request_that_waited_too_long_for_descriptors_is_refused_by_name(tmp_path, workers):
    with routing(tmp_path, workers, "queue_timeout_s=0.5") as router:
        with without_descriptors(router):
            refused = router.http.post("/generate", json={"text": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert "file descriptor" in refused.json()["message"] and int(refused.headers["retry-after"]) >= 1
        assert router.http.post("/generate", json={"text": "a"}).status_code == 200


def test_connections_that_find_no_descriptor_are_one_line_of_the_log_and_are_answered_later(tmp_path, workers):
    with routing(tmp_path, workers) as router, ThreadPoolExecutor(8) as pool:
        with without_descriptors(router):
            late = [pool.submit(httpx.get, f"{router.url}/liveness", timeout=WAIT_S) for _ in range(8)]
            until = time.monotonic() + 2.5  # longer than it waits until it accepts again
            while time.monotonic() < until:
                router.http.get("/liveness").raise_for_status()
        assert [one.result(WAIT_S).status_code for one in late] == [200] * 8
        url = router.url
    told = [line for line in router.log if "accept" in line]
    assert len(told) == 1 and "connections wait" in told[0] and "file descriptors" in told[0], (url, router.log[:40])
    assert not [line for line in router.log if "Traceback" in line]
