"""Updates at workers that answer 503: those that are full have done nothing, and those that end are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.integration.router.changes.broadcast import Result
from lockstep.integration.router.fleet.worker import Worker
from lockstep.tests.support.fake_workers import FakeWorker, Fleet, refuse, wait_until

ONE_CALL, WRITE = "/update_weights_from_disk", "/update_weights_from_tensor"
BEGIN, END = "/begin_weight_update", "/end_weight_update"


def unable(code: str, kind: str = "server_error") -> tuple[int, object]:
    return 503, {"success": False, "message": code, "error": {"message": code, "code": code, "type": kind}}


def becomes(worker: FakeWorker, version: str) -> Callable[[dict], tuple[int, object]]:
    def update(body: dict) -> tuple[int, object]:
        worker.version = version
        return 200, {"success": True, "weight_version": version}

    return update


def is_resolved(fleet: Fleet) -> bool:
    return fleet.http.get("/weight_update_journal").json() == {"unresolved": False, "entry": None}


def test_an_update_that_all_workers_are_too_full_for_leaves_nothing_behind(fleet):
    for worker in fleet.workers:
        worker.answers[WRITE] = unable("overloaded", "overloaded")
    answer = fleet.post(WRITE)
    assert answer.status_code == 502 and answer.json()["retryable"]
    assert is_resolved(fleet) and fleet.stats()["num_routable"] == 2
    for worker in fleet.workers:
        del worker.answers[WRITE]
    assert fleet.post(WRITE).status_code == 200


def test_a_session_goes_on_after_a_call_that_all_workers_are_too_full_for(fleet):
    assert fleet.post("/start_weight_update").status_code == 200
    for verb in (WRITE, "/update_weights"):  # a refusal of vLLM's would end the session
        for worker in fleet.workers:
            worker.answers[verb] = unable("overloaded")
        assert fleet.post(verb).status_code == 502
        assert fleet.http.get("/weight_update_journal").json()["entry"]["session"] and not is_resolved(fleet)
        assert not fleet.http.get("/weight_update_journal").json()["unresolved"]
        for worker in fleet.workers:
            del worker.answers[verb]
    assert fleet.post(WRITE).status_code == fleet.post("/finish_weight_update").status_code == 200
    assert is_resolved(fleet)


def test_an_update_that_only_one_worker_is_too_full_for_is_unresolved(fleet):
    done, full = fleet.workers
    done.answers[ONE_CALL], full.answers[ONE_CALL] = becomes(done, "2"), unable("overloaded")
    assert fleet.post(ONE_CALL).status_code == 502
    assert fleet.http.get("/weight_update_journal").json()["unresolved"] and fleet.stats()["num_routable"] == 0


def test_a_session_that_one_worker_is_too_full_to_begin_is_given_up_by_the_others(fleet):
    begins, full = fleet.workers
    full.answers[BEGIN] = unable("overloaded")
    answer = fleet.post(BEGIN)
    assert answer.status_code == 502 and answer.json()["retryable"] and "given the session up" in answer.text
    assert begins.asked("/lockstep/abort_weight_update") and is_resolved(fleet)
    del full.answers[BEGIN]
    assert fleet.post(BEGIN).status_code == fleet.post(END).status_code == 200


@pytest.mark.parametrize("code", ["draining", "engine_stopped", "rank_failure"])
def test_a_worker_that_ends_in_the_middle_of_an_update_is_left_out_of_it(fleet, code):
    left, ending = fleet.workers

    def ends(body: dict) -> tuple[int, object]:
        ending.is_draining = True
        return unable(code)

    left.answers[ONE_CALL], ending.answers[ONE_CALL] = becomes(left, "2"), ends
    answer = fleet.post(ONE_CALL)
    assert answer.status_code == 200 and answer.json()["weight_version"] == "2", answer.text
    assert [lost["worker"] for lost in answer.json()["lost_workers"]] == [ending.url]
    assert is_resolved(fleet) and fleet.report(left)["routable"] and not fleet.report(ending)["routable"]
    ending.is_draining = False  # it changed its mind, and has the old weights
    wait_until(lambda: "version" in fleet.report(ending)["held"], "it is held")


def test_a_worker_that_ends_where_a_session_begins_has_no_part_of_it(fleet):
    left, ending = fleet.workers

    def ends(body: dict) -> tuple[int, object]:
        ending.is_draining = True
        return unable("draining")

    ending.answers[BEGIN] = ends
    assert fleet.post(BEGIN).status_code == 200 and not left.asked("/lockstep/abort_weight_update")
    left.answers[END] = becomes(left, "2")
    ending.is_draining = False
    wait_until(lambda: fleet.report(ending)["status"] == "alive", "it changed its mind")
    assert fleet.post(WRITE).status_code == fleet.post(END).status_code == 200
    assert is_resolved(fleet) and not ending.asked(WRITE) and fleet.report(left)["routable"]
    assert "'2'" in fleet.report(ending)["held"]["version"]


def test_an_update_that_keeps_the_version_without_a_worker_that_ends_needs_an_operator(fleet):
    """Its old weights could not be told from the new ones, should it not end."""
    left, ending = fleet.workers
    left.answers[ONE_CALL], ending.answers[ONE_CALL] = becomes(left, "1"), unable("draining")
    assert fleet.post(ONE_CALL).status_code == 502
    assert fleet.http.get("/weight_update_journal").json()["unresolved"]


def test_an_answer_503_says_that_nothing_was_done_only_by_a_word_that_is_known():
    def result(status: int, body: object) -> Result:
        return Result(Worker("http://w:1", "a"), status, body)

    for body in (None, "busy", [1], {"error": "overloaded"}, {"error": {"code": ["overloaded"]}}, {"error": {}}):
        assert not result(503, body).did_nothing and not result(503, body).is_ending
    for word in ("overloaded", "draining", "engine_stopped"):
        for body in ({"code": word}, {"error": {"code": word}}, {"error": {"type": word}}):
            assert result(503, body).did_nothing and not result(500, body).did_nothing
            assert result(503, body).is_ending == (word != "overloaded") and not result(503, body).is_refusal
    status, body = refuse("no")
    assert result(status, body).did_nothing and not result(status, body).is_ending
