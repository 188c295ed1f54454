"""Failed updates are over once none of their processes is left."""

from __future__ import annotations

import json
import time

import pytest

from lockstep.tests.support.fake_workers import FakeWorker, Fleet, wait_until

ONE_CALL, WRITE = "/update_weights_from_disk", "/update_weights_from_tensor"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
FAILS = 500, {"success": False, "message": "boom"}


class Nameless(FakeWorker):
    """A worker that does not report the start of its process."""

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        return (200, {}) if path == "/server_info" else super().answer(path, body)


def is_resolved(fleet: Fleet) -> bool:
    return fleet.http.get("/weight_update_journal").json() == {"unresolved": False, "entry": None}


def is_held(fleet: Fleet, worker: FakeWorker) -> bool:
    return "journal" in fleet.report(worker)["held"]


def kill(fleet: Fleet, worker: FakeWorker) -> None:
    worker.stop()
    wait_until(lambda: fleet.report(worker)["status"] == "dead", "it is dead")


def restart(fleet: Fleet, worker: FakeWorker) -> None:
    kill(fleet, worker)
    worker.answers = {}
    worker.start(worker.port)
    wait_until(lambda: fleet.report(worker)["status"] == "alive", "it is back")


def fail(fleet: Fleet) -> None:
    """Let an update fail at the second worker, so that it is unresolved."""
    fleet.workers[1].answers[ONE_CALL] = FAILS
    assert fleet.post(ONE_CALL).status_code == 502
    assert fleet.http.get("/weight_update_journal").json()["unresolved"] and fleet.stats()["num_routable"] == 0


@pytest.mark.parametrize("kind", [FakeWorker, Nameless])
def test_a_failed_update_is_over_once_all_of_its_workers_are_other_processes(make_fleet, kind):
    fleet = make_fleet([kind(), kind()])
    one, other = fleet.workers
    fail(fleet)
    restart(fleet, one)
    assert is_held(fleet, one) and is_held(fleet, other), "one process has it still"
    assert fleet.post(ONE_CALL).status_code == 409
    restart(fleet, other)
    wait_until(lambda: is_resolved(fleet), "it is over")
    assert fleet.stats()["num_routable"] == 2 and fleet.post("/generate", {"text": "a"}).status_code == 200


def test_a_worker_that_is_dead_may_return_with_a_part_of_a_failed_update(fleet):
    one, other = fleet.workers
    fail(fleet)
    kill(fleet, other)
    restart(fleet, one)
    num = len(one.asked("/health"))
    wait_until(lambda: fleet.stats() and len(one.asked("/health")) > num + 3, "it is probed")
    assert is_held(fleet, one) and not is_resolved(fleet)
    other.start(other.port)


def test_a_worker_that_is_removed_has_no_part_of_a_failed_update_any_more(fleet):
    one, other = fleet.workers
    fail(fleet)
    assert fleet.http.delete(f"/workers/{fleet.report(other)['id']}").status_code == 202
    num = len(one.asked("/health"))
    wait_until(lambda: fleet.stats() and len(one.asked("/health")) > num + 3, "the other one is probed")
    assert is_held(fleet, one), "it has it still"
    assert fleet.post("/workers", {"url": other.url}).status_code == 202
    wait_until(lambda: fleet.report(other)["status"] == "alive", "it is added again")
    assert is_held(fleet, other), "its process is the same"
    assert fleet.http.delete(f"/workers/{fleet.report(other)['id']}").status_code == 202
    restart(fleet, one)
    wait_until(lambda: is_resolved(fleet), "it is over")
    assert fleet.report(one)["routable"]


def test_a_restarted_router_holds_no_worker_for_an_update_of_workers_that_are_none_of_its_own(make_fleet):
    first = make_fleet(2)
    first.http.close()
    first.router.close()
    left = first.workers[0]
    records = [{"url": w.url, "disabled": False, "weight_version": "1", "process": w.info["startup_time"]}
               for w in first.workers]  # fmt: skip
    values = {"verb": "update_weights_from_disk", "started_at": time.time(), "session": False, "failure": None}
    first.journal.write_text(json.dumps({**values, "targets": records}))
    fleet = Fleet(first.journal.parent, [left])
    try:
        assert is_held(fleet, left), "its process is the same"
        restart(fleet, left)
        wait_until(lambda: is_resolved(fleet), "it is over")
        assert fleet.report(left)["routable"]
    finally:
        fleet.router.close()


def test_the_next_call_of_a_failed_session_is_told_that_it_is_over_once_all_processes_are_others(fleet):
    assert fleet.post(BEGIN).status_code == 200
    fleet.workers[1].answers[WRITE] = FAILS
    assert fleet.post(WRITE).status_code == 502
    for worker in fleet.workers:
        restart(fleet, worker)
        worker.calls.clear()
    wait_until(lambda: is_resolved(fleet), "it is over")
    late = fleet.post(WRITE)
    assert late.status_code == 409 and late.json()["error"]["type"] == "update_lost" and is_resolved(fleet)
    assert not any(worker.asked(WRITE) for worker in fleet.workers)
    assert fleet.post(BEGIN).status_code == fleet.post(WRITE).status_code == fleet.post(END).status_code == 200
    assert is_resolved(fleet)


@pytest.mark.parametrize("verb", [BEGIN, ONE_CALL, "/abort_weight_update"])
def test_an_update_that_begins_after_a_failed_session_is_over_is_told_nothing_of_it(fleet, verb):
    assert fleet.post(BEGIN).status_code == 200
    fleet.workers[1].answers[WRITE] = FAILS
    assert fleet.post(WRITE).status_code == 502
    for worker in fleet.workers:
        restart(fleet, worker)
    wait_until(lambda: is_resolved(fleet), "it is over")
    assert fleet.post(verb).status_code == fleet.post(WRITE).status_code == 200
