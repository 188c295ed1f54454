"""Workers that come while the fleet is paused or its memory is released get no requests before it goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.tests.support.fake_workers import WAIT_S, FakeWorker, Fleet, SlowAnswer, wait_until

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class Pausable(FakeWorker):
    """A worker that reports its pauses, unless it `is_mute`, as servers of others are."""

    def __init__(self, is_mute: bool = False) -> None:
        self.is_mute = is_mute
        super().__init__()

    def start(self, port: int = 0) -> None:
        self.is_paused = False  # another process
        self.answers |= dict.fromkeys((PAUSE, "/pause", "/sleep"), self._pauses(True))
        self.answers |= dict.fromkeys((CONTINUE, "/resume"), self._pauses(False))
        super().start(port)

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        return (404, None) if path == "/ready" and self.is_mute else super().answer(path, body)

    def _pauses(self, is_paused: bool) -> Callable[[dict], tuple[int, object]]:
        def answer(body: dict) -> tuple[int, object]:
            self.is_paused = is_paused
            return 200, {"success": True}

        return answer


@pytest.fixture
def fleet(make_fleet) -> Fleet:
    return make_fleet([Pausable(), Pausable()])


def kill(fleet: Fleet, worker: FakeWorker) -> None:
    worker.stop()
    wait_until(lambda: fleet.report(worker)["status"] == "dead", "it is dead")


def restart(fleet: Fleet, worker: FakeWorker) -> None:
    kill(fleet, worker)
    worker.start(worker.port)
    wait_until(lambda: fleet.report(worker)["status"] == "alive", "it is back")


def is_held(fleet: Fleet, worker: FakeWorker) -> bool:
    return "pause" in fleet.report(worker)["held"]


def probed(fleet: Fleet, worker: FakeWorker) -> None:
    num = len(worker.asked("/ready"))
    wait_until(lambda: fleet.stats() and len(worker.asked("/ready")) > num + 2, "it is probed")


@pytest.mark.parametrize("is_mute", [False, True])
@pytest.mark.parametrize(("pause", "go_on"), [(PAUSE, CONTINUE), ("/pause", "/resume"), ("/sleep", "/wake_up")])
def test_a_worker_that_returns_while_the_fleet_is_paused_waits_until_it_goes_on(make_fleet, pause, go_on, is_mute):
    fleet = make_fleet([Pausable(is_mute), Pausable(is_mute)])
    paused, returned = fleet.workers
    for worker in fleet.workers:
        worker.answers["/wake_up"] = worker.answers[CONTINUE]
    assert fleet.post(pause).status_code == 200
    restart(fleet, returned)
    probed(fleet, returned)
    assert is_held(fleet, returned) and f"paused by {pause[1:]}" in fleet.report(returned)["held"]["pause"]
    assert not fleet.report(returned)["routable"] and not is_held(fleet, paused)
    assert fleet.http.get("/readiness").status_code == 503
    assert fleet.post(go_on).status_code == 200
    assert fleet.report(returned)["routable"]
    wait_until(lambda: not fleet.report(paused)["paused"], "it goes on")
    assert fleet.http.get("/readiness").status_code == 200


def test_a_worker_that_is_added_while_the_fleet_is_paused_waits_until_it_goes_on(fleet):
    new = Pausable()
    try:
        assert fleet.post(PAUSE).status_code == 200
        assert fleet.post("/workers", {"url": new.url}).status_code == 202
        wait_until(lambda: is_held(fleet, new), "it is held")
        assert fleet.post(CONTINUE).status_code == 200
        assert fleet.report(new)["routable"] and new.asked(CONTINUE)
    finally:
        new.stop()


def test_a_worker_that_returns_while_the_pause_begins_waits_too(make_fleet):
    slow, workers = SlowAnswer(), [Pausable(), Pausable()]
    workers[0].answers[PAUSE] = slow
    fleet = make_fleet(workers)
    pausing, returned = fleet.workers
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fleet.post, PAUSE)
        assert slow.entered.wait(WAIT_S)
        wait_until(lambda: returned.asked(PAUSE), "both are asked")
        restart(fleet, returned)
        pausing.is_paused = True
        slow.leave.set()
        assert answer.result(WAIT_S).status_code == 200
    probed(fleet, returned)
    assert is_held(fleet, returned)


def test_a_pause_that_no_worker_took_holds_none(make_fleet):
    slow, workers = SlowAnswer(), [Pausable(), Pausable()]
    workers[0].answers[PAUSE] = lambda body: (500, slow(body)[1])
    workers[1].answers[PAUSE] = 500, {"success": False}
    fleet = make_fleet(workers)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fleet.post, PAUSE)
        assert slow.entered.wait(WAIT_S)
        restart(fleet, workers[1])
        slow.leave.set()
        assert answer.result(WAIT_S).status_code == 502
    assert fleet.report(workers[1])["routable"]


def test_the_fleet_goes_on_where_a_paused_worker_does_by_itself(fleet):
    """As where the time of its pause is over, or a client continues it directly."""
    paused, returned = fleet.workers
    assert fleet.post(PAUSE, {"ttl": 5}).status_code == 200
    restart(fleet, returned)
    assert is_held(fleet, returned)
    paused.is_paused = False
    wait_until(lambda: fleet.report(returned)["routable"], "it serves")


def test_a_client_that_ends_a_pause_which_is_not_its_own_leaves_the_fleet_paused(fleet):
    paused, returned = fleet.workers
    assert fleet.post(PAUSE, {"client": "a"}).status_code == 200
    restart(fleet, returned)
    for worker in fleet.workers:
        worker.answers[CONTINUE] = 200, {"success": True, "was_paused": False}
    assert fleet.post(CONTINUE, {"client": "b"}).status_code == 200
    assert is_held(fleet, returned) and fleet.report(paused)["paused"]


def test_a_pause_is_over_with_the_processes_that_had_it(fleet):
    first, second = fleet.workers
    assert fleet.post(PAUSE).status_code == 200
    restart(fleet, second)
    kill(fleet, first)
    probed(fleet, second)
    assert is_held(fleet, second), "the other one may come back as it was"
    first.start(first.port)
    wait_until(lambda: fleet.stats()["num_routable"] == 2, "both serve")


def test_a_pause_is_over_where_the_workers_that_had_it_are_removed(fleet):
    first, second = fleet.workers
    assert fleet.post(PAUSE).status_code == 200
    restart(fleet, second)
    assert is_held(fleet, second)
    fleet.http.delete(f"/workers/{fleet.report(first)['id']}").raise_for_status()
    assert fleet.report(second)["routable"]


def test_an_operator_enables_a_worker_that_waits_for_the_end_of_a_pause(fleet):
    assert fleet.post(PAUSE).status_code == 200
    restart(fleet, fleet.workers[1])
    assert fleet.post(f"/workers/{fleet.report(fleet.workers[1])['id']}/enable").json()["routable"]


@pytest.mark.parametrize(("release", "parts", "resume"), [
    (RELEASE, [{}], RESUME),
    (RELEASE, [{"tags": ["weights"]}, {"tags": ["kv_cache"]}], RESUME),
    ("/release_kv_cache_memory", [{"tags": ["kv_cache"]}], RESUME),
    ("/release_kv_cache_memory", [{}], "/wake_up"),
])  # fmt: skip
def test_a_worker_that_returns_while_memory_is_released_waits_until_all_of_it_is_back(fleet, release, parts, resume):
    kept, returned = fleet.workers
    assert fleet.post(release).status_code == 200
    restart(fleet, returned)
    probed(fleet, kept)
    assert is_held(fleet, returned) and fleet.report(kept)["routable"]
    assert fleet.post(CONTINUE).status_code == 200 and is_held(fleet, returned)
    for part in parts:
        assert is_held(fleet, returned)
        assert fleet.post(resume, part).status_code == 200
    assert fleet.report(returned)["routable"]


def test_a_fleet_sleeps_until_the_last_part_of_its_memory_is_back(make_fleet):
    fleet = make_fleet([Pausable(is_mute=True), Pausable(is_mute=True)])
    _, returned = fleet.workers
    for part in ("weights", "kv_cache"):
        assert fleet.post("/sleep?level=2").status_code == 200
        restart(fleet, returned)
        assert fleet.post("/resume").status_code == 200 and is_held(fleet, returned)
        assert fleet.post(f"/wake_up?tags={part}").status_code == 200 and is_held(fleet, returned)
        for worker in fleet.workers:
            worker.answers["/wake_up"] = 200, {"status": "awake"}  # it has released no more than this
        assert fleet.post(f"/wake_up?tags={part}").status_code == 200 and fleet.report(returned)["routable"]
        for worker in fleet.workers:
            del worker.answers["/wake_up"]
    assert fleet.post("/sleep?level=0").status_code == 200
    restart(fleet, returned)
    assert is_held(fleet, returned) and fleet.post("/resume").status_code == 200
    assert fleet.report(returned)["routable"]
