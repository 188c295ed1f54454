"""Workers that are killed in the middle of an update: the others have the old weights or the new ones, and go on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lockstep.tests.integration.router import test_engines
from lockstep.tests.integration.router.test_engines import engines, folders, http, router, settings  # noqa: F401
from lockstep.tests.support.fake_workers import FakeWorker, Fleet, refuse, wait_until

pytestmark = pytest.mark.slow

ONE_CALL = "/update_weights_from_disk"
SESSION = ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update")


def killed(worker: FakeWorker) -> Callable[[dict], tuple[int, object]]:
    """Make an answer that never comes, since the worker's process ends."""

    def end(body: dict) -> tuple[int, object]:
        worker.stop()
        raise ConnectionAbortedError

    return end


def becomes(worker: FakeWorker, version: str, **info: object) -> Callable[[dict], tuple[int, object]]:
    def update(body: dict) -> tuple[int, object]:
        worker.version, worker.info = version, {**worker.info, **info}
        return 200, {"success": True, "weight_version": version}

    return update


def come_back(fleet: Fleet, worker: FakeWorker, version: str, **info: object) -> None:
    """Start a killed worker again, with its first weights, and wait until the router has seen it."""
    worker.version, worker.answers = version, {}
    worker.info = {**worker.info, **info}
    worker.start(worker.port)
    wait_until(lambda: fleet.report(worker)["status"] == "alive", "it is back")


def is_resolved(fleet: Fleet) -> bool:
    return fleet.http.get("/weight_update_journal").json() == {"unresolved": False, "entry": None}


def test_a_worker_that_is_killed_in_an_update_of_one_call_leaves_the_others_with_the_new_weights(fleet):
    left, gone = fleet.workers
    left.answers[ONE_CALL], gone.answers[ONE_CALL] = becomes(left, "2"), killed(gone)
    answer = fleet.post(ONE_CALL)
    assert answer.status_code == 200 and answer.json()["weight_version"] == "2", answer.text
    [lost] = answer.json()["lost_workers"]
    assert lost["worker"] == gone.url and not lost["success"] and lost["error"]
    assert is_resolved(fleet) and not fleet.journal.exists()
    assert fleet.report(left)["routable"] and fleet.post("/generate", {"text": "a"}).json()["text"] == left.url
    come_back(fleet, gone, "1")
    assert "'2'" in fleet.report(gone)["held"]["version"]
    gone.answers[ONE_CALL] = becomes(gone, "3")
    left.answers[ONE_CALL] = becomes(left, "3")
    assert "lost_workers" not in fleet.post(ONE_CALL).json()
    assert fleet.report(gone)["routable"]


def test_a_session_goes_on_without_a_killed_worker_and_asks_its_next_process_for_nothing(fleet):
    left, gone = fleet.workers
    begin, write, end = SESSION
    assert fleet.post(begin).status_code == 200
    gone.answers[write] = killed(gone)
    assert [lost["worker"] for lost in fleet.post(write).json()["lost_workers"]] == [gone.url]
    gone.calls.clear()
    come_back(fleet, gone, "1")  # with the version of before, so that it serves until the update has ended
    assert fleet.report(gone)["routable"]
    assert fleet.post(write).status_code == 200
    left.answers[end] = becomes(left, "2")
    assert fleet.post(end).status_code == 200
    assert not any(gone.asked(verb) for verb in SESSION) and is_resolved(fleet)
    assert fleet.report(left)["routable"] and not fleet.report(gone)["routable"]
    assert "'2'" in fleet.report(gone)["held"]["version"]


def test_a_worker_that_joins_in_the_middle_of_a_session_has_no_part_of_it(make_fleet):
    fleet, new = make_fleet(1), FakeWorker()
    try:
        [worker] = fleet.workers
        assert fleet.post(SESSION[0]).status_code == 200
        assert fleet.post("/workers", {"url": new.url}).status_code == 202
        wait_until(lambda: fleet.report(new)["routable"], "it is there")
        worker.answers[SESSION[2]] = becomes(worker, "2")
        assert fleet.post(SESSION[1]).status_code == fleet.post(SESSION[2]).status_code == 200
        assert not any(new.asked(verb) for verb in SESSION) and not fleet.report(new)["routable"]
    finally:
        new.stop()


def test_an_update_that_the_others_refuse_since_a_worker_died_is_taken_back(make_fleet):
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet = make_fleet([FakeWorker(**named), FakeWorker(**named)])
    left, gone = fleet.workers
    left.answers[ONE_CALL], gone.answers[ONE_CALL] = refuse("a member has left the group"), killed(gone)
    answer = fleet.post(ONE_CALL)
    assert answer.status_code == 502 and gone.url in answer.json()["message"] and "left the group" in answer.text
    assert is_resolved(fleet) and fleet.report(left)["routable"]


def test_a_session_that_failed_is_taken_back_though_the_process_of_a_worker_is_new(fleet):
    left, gone = fleet.workers
    begin, write, _ = SESSION
    assert fleet.post(begin).status_code == 200
    left.answers[write], gone.answers[write] = (500, {"success": False}), killed(gone)
    assert fleet.post(write).status_code == 502
    assert fleet.http.get("/weight_update_journal").json()["unresolved"] and not fleet.report(left)["routable"]
    come_back(fleet, gone, "default")
    gone.answers["/abort_weight_update"] = refuse("no session is open", "SessionError")
    assert fleet.post("/abort_weight_update").status_code == 200
    assert is_resolved(fleet) and fleet.report(left)["routable"] and "version" in fleet.report(gone)["held"]


def test_an_update_whose_workers_have_all_ended_is_over(fleet):
    begin, write, end = SESSION
    assert fleet.post(begin).status_code == 200
    for worker in fleet.workers:
        worker.answers[write] = killed(worker)
    assert fleet.post(write).status_code == 502
    for worker in fleet.workers:
        come_back(fleet, worker, "1")
        worker.calls.clear()
    late = fleet.post(write)
    assert late.status_code == 409 and late.json()["error"]["type"] == "update_lost" and is_resolved(fleet)
    assert not any(worker.asked(write) for worker in fleet.workers)
    assert fleet.post(begin).status_code == fleet.post(end).status_code == 200


def test_a_lost_worker_that_could_return_unseen_with_other_weights_needs_an_operator(fleet):
    """The update keeps the version's name, and the worker reports no digest: old and new weights look alike."""
    left, gone = fleet.workers
    left.answers[ONE_CALL], gone.answers[ONE_CALL] = becomes(left, "1"), killed(gone)
    assert fleet.post(ONE_CALL).status_code == 502
    assert fleet.http.get("/weight_update_journal").json()["unresolved"] and not fleet.report(left)["routable"]


def test_a_session_that_ends_with_the_version_of_a_lost_worker_needs_an_operator_too(fleet):
    gone = fleet.workers[1]
    begin, write, end = SESSION
    assert fleet.post(begin).status_code == 200
    gone.answers[write] = killed(gone)
    assert fleet.post(write).status_code == fleet.post(end).status_code == 200
    unresolved = fleet.http.get("/weight_update_journal").json()
    assert unresolved["unresolved"] and "under the same version" in unresolved["entry"]["failure"]


def test_a_worker_that_only_fails_still_needs_an_operator(fleet):
    left, bad = fleet.workers
    left.answers[ONE_CALL], bad.answers[ONE_CALL] = becomes(left, "2"), (500, {"success": False})
    assert fleet.post(ONE_CALL).status_code == 502
    assert fleet.http.get("/weight_update_journal").json()["unresolved"]


def test_a_call_that_replaces_all_weights_settles_an_update_that_a_busy_worker_refused(make_fleet):
    """A worker with running requests refuses an update from disk, an idle one has it: the trainer sends it again."""
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet = make_fleet([FakeWorker(**named), FakeWorker(**named)])
    idle, busy = fleet.workers
    idle.answers[ONE_CALL] = becomes(idle, "2", weight_digest="d2")
    busy.answers[ONE_CALL] = refuse("1 requests are running", "NotIdle")
    assert fleet.post(ONE_CALL).status_code == 502 and not is_resolved(fleet)
    other = fleet.post("/update_weights_from_tensor")  # which may be a part of the weights
    assert other.status_code == 409 and "Send update_weights_from_disk again" in other.json()["message"]
    busy.answers[ONE_CALL] = becomes(busy, "2", weight_digest="other")
    mixed = fleet.post(ONE_CALL)  # one of them reads an older file
    assert mixed.status_code == 502 and mixed.json()["error"]["type"] == "mixed_weights" and "other" in mixed.text
    assert not is_resolved(fleet) and not fleet.report(idle)["routable"]
    busy.answers[ONE_CALL] = becomes(busy, "2", weight_digest="d2")
    assert fleet.post(ONE_CALL).status_code == 200 and is_resolved(fleet)
    assert fleet.report(idle)["routable"] and fleet.report(busy)["routable"]


def test_a_call_that_replaces_all_weights_settles_an_update_also_at_a_worker_that_was_restarted_since(make_fleet):
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet, new = make_fleet([FakeWorker(**named), FakeWorker(**named)]), FakeWorker(**named)
    try:
        done, restarted = fleet.workers
        done.answers[ONE_CALL] = becomes(done, "2", weight_digest="d2")
        restarted.answers[ONE_CALL] = refuse("1 requests are running", "NotIdle")
        assert fleet.post(ONE_CALL).status_code == 502 and not is_resolved(fleet)
        restarted.stop()
        wait_until(lambda: fleet.report(restarted)["status"] == "dead", "it is dead")
        come_back(fleet, restarted, "1")
        fleet.post("/workers", {"url": new.url})
        wait_until(lambda: fleet.report(new)["status"] == "alive", "it is there")
        restarted.answers[ONE_CALL] = new.answers[ONE_CALL] = refuse("1 requests are running", "NotIdle")
        assert fleet.post(ONE_CALL).status_code == 502 and not is_resolved(fleet)
        assert "journal" in fleet.report(new)["held"] and "journal" in fleet.report(restarted)["held"]
        for worker in (restarted, new):
            worker.answers[ONE_CALL] = becomes(worker, "2", weight_digest="d2")
        settled = fleet.post(ONE_CALL)
        assert settled.status_code == 200 and is_resolved(fleet) and "lost_workers" not in settled.json()
        assert {result["worker"] for result in settled.json()["results"]} == {done.url, restarted.url, new.url}
        assert all(fleet.report(worker)["routable"] for worker in (done, restarted, new))
    finally:
        new.stop()


def test_a_call_that_settles_and_is_not_answered_may_still_arrive_too(make_fleet):
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet = make_fleet([FakeWorker(**named), FakeWorker(**named)])
    done, mute = fleet.workers
    done.answers[ONE_CALL] = becomes(done, "2", weight_digest="d2")
    mute.answers[ONE_CALL] = refuse("1 requests are running", "NotIdle")
    assert fleet.post(ONE_CALL).status_code == 502

    def end(body: dict) -> tuple[int, object]:
        raise ConnectionAbortedError  # it lives, and may have begun

    mute.answers[ONE_CALL] = end
    assert fleet.post(ONE_CALL).status_code == 502
    assert fleet.post(ONE_CALL).status_code == 409 and not is_resolved(fleet)


@pytest.mark.parametrize("verb", [SESSION[0], ONE_CALL])
def test_an_update_that_begins_after_one_whose_workers_have_all_ended_goes_on_at_once(make_fleet, verb):
    fleet = make_fleet(1)
    [worker] = fleet.workers
    assert fleet.post(SESSION[0]).status_code == 200
    worker.stop()
    wait_until(lambda: fleet.report(worker)["status"] == "dead", "it is dead")
    come_back(fleet, worker, "1")
    worker.calls.clear()
    answer = fleet.post(verb)
    assert answer.status_code == 200 and len(worker.asked(verb)) == 1, answer.text
    assert fleet.http.get("/weight_update_journal").json()["unresolved"] is False
    if verb == SESSION[0]:
        assert fleet.post(SESSION[2]).status_code == 200
    assert is_resolved(fleet)


@pytest.mark.parametrize("begin", [SESSION[0], "/start_weight_update"])
def test_a_session_that_a_new_trainer_begins_includes_workers_that_were_restarted_or_added_since(make_fleet, begin):
    """The trainer before it has died, and the workers have given its session up."""
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet, new = make_fleet([FakeWorker(**named), FakeWorker(**named)]), FakeWorker(**named)
    try:
        left, restarted = fleet.workers
        assert fleet.post(begin).status_code == 200
        restarted.stop()
        wait_until(lambda: fleet.report(restarted)["status"] == "dead", "it is dead")
        come_back(fleet, restarted, "1")
        fleet.post("/workers", {"url": new.url})
        wait_until(lambda: fleet.report(new)["status"] == "alive", "it is there")
        left.answers[begin] = refuse("a weight-update session is already open", "SessionError")
        assert fleet.post(begin).status_code == 400 and not new.asked(begin)  # it is not given up yet
        assert not fleet.http.get("/weight_update_journal").json()["unresolved"]
        del left.answers[begin]
        began = fleet.post(begin)
        assert began.status_code == 200 and len(began.json()["results"]) == 3
        all_three = (left, restarted, new)
        for worker in all_three:
            worker.answers[SESSION[2]] = becomes(worker, "2", weight_digest="d2")
        assert fleet.post(SESSION[1]).status_code == fleet.post(SESSION[2]).status_code == 200
        assert all(worker.asked(verb) for worker in all_three for verb in SESSION[1:])
        assert is_resolved(fleet) and all(fleet.report(worker)["routable"] for worker in all_three)
    finally:
        new.stop()


@pytest.mark.parametrize("begin", [SESSION[0], "/start_weight_update"])
def test_a_session_that_only_some_workers_begin_is_given_up_by_them_and_nothing_is_unresolved(make_fleet, begin):
    """At the others that of a trainer that has died is still open: they give it up a moment later."""
    fleet, abort = make_fleet(2), "/lockstep/abort_weight_update"
    begins, refuses = fleet.workers
    for is_open in (False, True):  # in the journal, from the trainer that has died
        if is_open:
            assert fleet.post(begin).status_code == 200
        refuses.answers[begin] = refuse("a weight-update session is already open", "SessionError")
        refused = fleet.post(begin)
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "SessionError"
        assert refuses.url in refused.json()["error"]["message"] and "given the session up" in refused.text
        assert len(begins.asked(abort)) == 1 + is_open and not refuses.asked(abort)
        assert is_resolved(fleet) is not is_open and fleet.stats()["num_routable"] == 2
        del refuses.answers[begin]
    assert fleet.post(begin).status_code == fleet.post(SESSION[2]).status_code == 200
    assert is_resolved(fleet)
    begins.answers[abort] = refuse("it hangs", "EngineFailed")
    refuses.answers[begin] = refuse("a weight-update session is already open", "SessionError")
    assert fleet.post(begin).status_code == 502 and not is_resolved(fleet), "it is not known to be given up"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_call_that_replaces_all_weights_after_a_trainer_has_died_reaches_all_and_ends_its_session(
    make_fleet, is_restarted
):  # fmt: skip
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet = make_fleet([FakeWorker(**named), FakeWorker(**named)])
    other = fleet.workers[1]
    assert fleet.post(SESSION[0]).status_code == 200
    assert fleet.post(ONE_CALL).status_code == 200 and not is_resolved(fleet), "it is a part of the open session"
    if is_restarted:
        other.stop()
        wait_until(lambda: fleet.report(other)["status"] == "dead", "it is dead")
        come_back(fleet, other, "1")
    for worker in fleet.workers:  # they have given the session up
        worker.answers[ONE_CALL] = becomes(worker, "2", weight_digest="d2")
    answer = fleet.post(ONE_CALL)
    assert answer.status_code == 200 and len(answer.json()["results"]) == 2
    assert is_resolved(fleet) and all(fleet.report(worker)["routable"] for worker in fleet.workers)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_update_outside_of_the_session_of_a_dead_trainer_reaches_all_and_ends_it(make_fleet, is_restarted):
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet, verb = make_fleet([FakeWorker(**named), FakeWorker(**named)]), SESSION[1]
    other = fleet.workers[1]

    def writes(explicit: bool) -> tuple[int, object]:
        return 200, {"success": True, "report": {"explicit": explicit}}

    for worker in fleet.workers:
        worker.answers[verb] = writes(True)
    assert fleet.post(SESSION[0]).status_code == 200
    assert fleet.post(verb).status_code == 200 and not is_resolved(fleet), "it is a part of the open session"
    if is_restarted:
        other.stop()
        wait_until(lambda: fleet.report(other)["status"] == "dead", "it is dead")
        come_back(fleet, other, "1")
    for worker in fleet.workers:  # they have given the session up
        worker.answers[verb] = writes(False)
    answer = fleet.post(verb)
    assert answer.status_code == 200 and len(answer.json()["results"]) == 2
    assert is_resolved(fleet) and all(fleet.report(worker)["routable"] for worker in fleet.workers)


def test_an_update_that_is_in_a_session_at_one_worker_only_is_unresolved_until_all_weights_are_replaced(make_fleet):
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet, verb = make_fleet([FakeWorker(**named), FakeWorker(**named)]), SESSION[1]
    assert fleet.post(SESSION[0]).status_code == 200
    for worker, explicit in zip(fleet.workers, (True, False), strict=True):  # one has given it up a moment before
        worker.answers[verb] = 200, {"success": True, "report": {"explicit": explicit}}
    torn = fleet.post(verb)
    assert torn.status_code == 502 and torn.json()["error"]["type"] == "torn_session"
    assert all(worker.url in torn.json()["error"]["message"] for worker in fleet.workers)
    assert not is_resolved(fleet) and fleet.stats()["num_routable"] == 0
    for worker in fleet.workers:
        worker.answers[ONE_CALL] = becomes(worker, "2", weight_digest="d2")
    assert fleet.post(ONE_CALL).status_code == 200
    assert is_resolved(fleet) and fleet.stats()["num_routable"] == 2


def test_workers_that_have_different_weights_after_an_update_of_one_version_serve_none(make_fleet):
    fleet = make_fleet(2)
    for worker, digest in zip(fleet.workers, ("a", "b"), strict=True):
        worker.answers[SESSION[2]] = becomes(worker, "2", weight_digest=digest)
    assert fleet.post(SESSION[0]).status_code == 200
    mixed = fleet.post(SESSION[2])
    assert mixed.status_code == 502 and mixed.json()["error"]["type"] == "mixed_weights"
    assert not is_resolved(fleet) and fleet.stats()["num_routable"] == 0


def test_an_update_that_may_still_arrive_is_not_settled_by_another(make_fleet):
    named = {"weight_digest": "d1", "guarantee": {"invariant": True}}
    fleet = make_fleet([FakeWorker(**named), FakeWorker(**named)])
    first, mute = fleet.workers
    first.answers[ONE_CALL] = becomes(first, "2", weight_digest="d2")

    def end(body: dict) -> tuple[int, object]:
        raise ConnectionAbortedError  # it lives, and may have begun

    mute.answers[ONE_CALL] = end
    assert fleet.post(ONE_CALL).status_code == 502 and not is_resolved(fleet)
    mute.answers[ONE_CALL] = becomes(mute, "2", weight_digest="d2")
    assert fleet.post(ONE_CALL).status_code == 409 and not is_resolved(fleet)


def test_an_engine_that_is_killed_in_an_update_does_not_stop_the_other(engines, router, http, folders):  # noqa: F811
    left, gone = engines
    assert test_engines.update_all(http, router.url, folders[0], "before").status_code == 200
    gone.signal(signal.SIGSTOP)  # so that it is in the middle of the update when it is killed
    body = {"model_path": str(folders[1]), "weight_version": "after"}
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(http.post, f"{router.url}{ONE_CALL}", json=body)
        test_engines.wait_until(
            lambda: http.get(f"{left.url}/get_weight_version").json()["weight_version"] == "after", "it has the update"
        )
        gone.kill()
        answer = updating.result(test_engines.WAIT_S)
    try:
        assert answer.status_code == 200 and answer.json()["weight_version"] == "after", answer.text
        assert [lost["worker"] for lost in answer.json()["lost_workers"]] == [gone.url]
        assert test_engines.num_routable(router.url) == 1
        got = http.post(f"{router.url}/generate", json=test_engines.request(0)).json()["meta_info"]
        assert got["weight_version"] == "after"
    finally:
        gone.start()
        gone.ready()
    test_engines.wait_until(lambda: "version" in test_engines.workers(router.url)[gone.url]["held"], "it is held")
    assert test_engines.update_all(http, router.url, folders[1], "later").status_code == 200
    assert test_engines.num_routable(router.url) == 2
    assert not httpx.get(f"{router.url}/weight_update_journal").json()["unresolved"]
    assert len({json.dumps(http.post(f"{one.url}/generate", json=test_engines.request(1)).json()["output_ids"])
                for one in engines}) == 1  # fmt: skip
