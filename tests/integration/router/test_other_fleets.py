"""The file of the weights served last, at a router whose fleet is another one or has lost these weights for good."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.integration.router.fleet.served import Served, ServedFile, Weights
from lockstep.integration.router.fleet.workers import needs_operator
from lockstep.tests.integration.router.test_served_version import come, keep, restart, started
from lockstep.tests.support.fake_workers import WAIT_S, FakeWorker, Fleet, SlowAnswer, wait_until
from lockstep.tests.support.forked_ranks import free_port

SERVED = Served(Weights("step-500", "d500"), {"http://w:1": 1.5, "http://w:2": None})


def becomes(worker: FakeWorker, version: str, answer: tuple[int, object]) -> tuple[int, object]:
    worker.version = version
    return answer


def kept(fleet: Fleet) -> Path:
    return Path(f"{fleet.journal}.served.json")


# -- the file --------------------------------------------------------------------------------------------------------


def test_weights_that_only_other_workers_served_are_forgotten(tmp_path, caplog):
    path = tmp_path / "served.json"
    keep(ServedFile(path), SERVED)
    file = ServedFile(path)
    file.check(["http://w:3", "http://v:1"])
    assert file.first == Served() and not path.exists()
    assert "'step-500' (digest d500)" in caplog.text and "http://w:1, http://w:2" in caplog.text
    keep(file, SERVED)
    assert ServedFile(path).first == SERVED


def test_weights_that_one_of_the_workers_served_are_demanded_and_named_in_the_log(tmp_path, caplog):
    path = tmp_path / "served.json"
    keep(ServedFile(path), SERVED)
    file = ServedFile(path)
    with caplog.at_level(logging.INFO):
        file.check(["http://w:3", "http://w:2"])
    assert file.first == SERVED and path.exists()
    assert "'step-500' (digest d500)" in caplog.text and str(path) in caplog.text


def test_an_operator_forgets_the_file_also_where_it_cannot_be_understood(tmp_path):
    path = tmp_path / "served.json"
    path.write_text("[")
    with pytest.raises(ValueError, match="--forget-served"):
        ServedFile(path)
    assert ServedFile(path, forget=True).first == Served() and not path.exists()
    assert ServedFile(path, forget=True).first == Served()  # there is none


def test_the_file_names_all_workers_that_serve_also_those_that_report_no_start():
    registry, workers = started("1", "1")
    workers[0].startup_time = 7.5
    registry.check_versions(allow_mixed=False)
    assert registry.served.processes == {"http://w:1": 7.5, "http://w:2": None}


# -- a whole router --------------------------------------------------------------------------------------------------


def test_a_new_fleet_with_other_addresses_serves_at_once_under_the_files_of_the_former(make_fleet):
    former = make_fleet([FakeWorker("step-500")])
    wait_until(kept(former).exists, "it is kept")
    former.router.close()
    fresh = make_fleet([FakeWorker("default")])
    assert fresh.post("/generate", {"text": "a"}).status_code == 200
    wait_until(lambda: kept(fresh).exists() and "default" in kept(fresh).read_text(), "the new one is kept")
    assert list(json.loads(kept(fresh).read_text())["processes"]) == [fresh.workers[0].url]


def test_a_fleet_whose_weights_are_all_lost_answers_at_once_and_says_the_remedies(make_fleet):
    fleet = make_fleet(1)  # requests may wait for a minute, and the client less
    [worker] = fleet.workers
    restart(fleet, worker, "default")
    wait_until(lambda: "version" in fleet.report(worker)["held"], "it is held")
    answer = fleet.post("/generate", {"text": "a"})
    said = answer.json()["message"]
    assert answer.status_code == 503 and "last served '1'" in said and str(kept(fleet)) in said
    assert all(remedy in said for remedy in ("update the weights", "enable the worker", "--forget-served"))


def test_requests_wait_for_an_update_that_is_under_way_at_workers_that_lost_their_weights(make_fleet):
    fleet = make_fleet(1)
    [worker] = fleet.workers
    restart(fleet, worker, "default")
    wait_until(lambda: "version" in fleet.report(worker)["held"], "it is held")
    for first, *rest in (["/update_weights_from_disk"], ["/begin_weight_update", "/end_weight_update"]):
        slow = SlowAnswer()
        worker.answers[first] = slow if rest else lambda body, slow=slow: becomes(worker, "2", slow(body))
        worker.answers["/end_weight_update"] = lambda body: becomes(worker, "3", (200, {"success": True}))
        with ThreadPoolExecutor(2) as pool:
            updating = pool.submit(fleet.post, first)
            assert slow.entered.wait(WAIT_S)
            asking = pool.submit(fleet.post, "/generate", {"text": "a"})
            wait_until(lambda: fleet.stats()["num_held_requests"] == 1, "it waits")
            slow.leave.set()
            assert [fleet.post(later).status_code for later in rest] == [200] * len(rest)
            assert updating.result().status_code == asking.result().status_code == 200
        restart(fleet, worker, "default")
        wait_until(lambda: "version" in fleet.report(worker)["held"], "it is held again")


def test_a_router_that_forgets_what_was_served_accepts_the_same_workers(make_fleet):
    former = make_fleet(1)
    [worker] = former.workers
    wait_until(kept(former).exists, "it is kept")
    former.router.close()
    worker.version, worker.info = "default", {"startup_time": time.time()}
    fleet = make_fleet([worker], forget_served=True)
    assert fleet.post("/generate", {"text": "a"}).status_code == 200


@pytest.mark.slow
def test_a_fleet_that_begins_anew_is_accepted_by_the_flag(tmp_path):
    from lockstep.tests.integration.router.test_engines import Process, workers

    worker, journal = FakeWorker("21"), tmp_path / "journal.json"
    router = Process("route", "--port", str(free_port()), "--journal", str(journal), "--worker", worker.url)
    try:
        url = router.ready()
        wait_until(lambda: workers(url) and Path(f"{journal}.served.json").exists(), "the version is kept")
        router.signal(signal.SIGTERM)
        router.kill()
        worker.version, worker.info = "default", {"startup_time": time.time()}
        router.start()
        router.ready()
        wait_until(lambda: workers(url)[worker.url]["held"], "it is held")
        assert any("last served weight version '21'" in line for line in router.log)
        router.kill()
        router.arguments = (*router.arguments, "--forget-served")
        router.start()
        router.ready()
        wait_until(lambda: workers(url)[worker.url]["routable"], "it serves")
    finally:
        router.kill()
        worker.stop()


# -- requests --------------------------------------------------------------------------------------------------------


def test_requests_wait_while_a_worker_may_yet_return_with_the_weights_or_report_them():
    async def run() -> None:
        registry, (first, second) = started("1", "1")
        for worker in (first, second):
            registry.mark_dead(worker, "a test")
        come(registry, first, "default")
        assert not needs_operator(registry)  # the other one is dead, and may return with them
        come(registry, second, "default")
        assert needs_operator(registry)
        second.version = "1"
        registry.mark_draining(second)
        assert not needs_operator(registry)
        registry.mark_dead(second, "a test")
        come(registry, second, "1")
        assert second.can_take_requests and not needs_operator(registry)

    asyncio.run(run())
