"""Updates that keep the version's name: only digests tell the weights apart, and they may come later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.integration.router.fleet.served import ServedFile, Weights
from lockstep.integration.router.fleet.worker import Hold, Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry, needs_operator
from lockstep.tests.integration.router.test_lost_workers import SESSION, becomes, come_back, killed
from lockstep.tests.integration.router.test_served_version import GUARANTEE, come, keep, started
from lockstep.tests.support.fake_workers import FakeWorker, wait_until


def named(num: int, digest: str = "d0") -> tuple[WorkerRegistry, list[Worker]]:
    """Make a registry of workers that serve, and report this digest."""
    registry, workers = started(*["default"] * num)
    for start, worker in enumerate(workers):
        worker.guarantee, worker.weight_digest, worker.startup_time = GUARANTEE, digest, 100.0 + start
    registry.check_versions(allow_mixed=False)
    assert registry.served.weights == Weights("default", digest)
    return registry, workers


def probe(registry: WorkerRegistry, allow_mixed: bool = False) -> None:
    """Check the versions as after one probe of each worker."""
    for _ in registry:
        registry.check_versions(allow_mixed)


def update(registry: WorkerRegistry, *workers: Worker, digest: str | None = None) -> None:
    """End an update of these workers as the administration does."""
    for worker in workers:
        worker.weight_digest = digest
    registry.accept_update(workers, allow_mixed=False)
    probe(registry)


def test_a_worker_that_has_no_part_of_an_update_waits_for_the_digest_of_the_others():
    registry, (updated, restarted) = named(2)
    registry.mark_dead(restarted, "a test")
    restarted.startup_time = 500.0
    come(registry, restarted, "default", "d0")  # in the middle of the update, so that it serves
    assert restarted.can_take_requests
    update(registry, updated)
    assert registry.served.weights == Weights("default") and updated.can_take_requests
    assert "is not known yet" in restarted.holds[Hold.VERSION] and not needs_operator(registry)
    updated.weight_digest = "d1"
    probe(registry)
    assert registry.served.weights == Weights("default", "d1") and updated.can_take_requests
    assert "(digest d0), the others 'default' (digest d1)" in restarted.holds[Hold.VERSION]
    restarted.weight_digest = "d1"
    probe(registry)
    assert restarted.can_take_requests


def test_a_worker_that_has_no_part_of_an_update_and_no_digest_yet_waits_for_its_own():
    registry, (updated, restarted) = named(2)
    restarted.startup_time, restarted.weight_digest = 500.0, None
    update(registry, updated, digest="d1")
    assert updated.can_take_requests and "is not known yet" in restarted.holds[Hold.VERSION]
    restarted.weight_digest = "d0"
    probe(registry)
    assert "the others 'default' (digest d1)" in restarted.holds[Hold.VERSION]


def test_a_worker_that_returns_before_an_update_has_its_digest_waits_too():
    registry, (updated, restarted) = named(2)
    update(registry, updated, restarted)
    registry.mark_dead(restarted, "a test")
    restarted.startup_time = 500.0
    come(registry, restarted, "default", "d0")
    assert "is not known yet" in restarted.holds[Hold.VERSION]
    registry.set_disabled(restarted, False)
    assert not restarted.can_take_requests and updated.can_take_requests  # an operator cannot compare them either
    updated.weight_digest = "d0"  # an update without a change
    probe(registry)
    assert restarted.can_take_requests


def test_a_restarted_router_knows_that_the_digest_of_an_update_was_not_known(tmp_path):
    path = tmp_path / "served.json"
    registry, (updated, _) = named(2)
    update(registry, updated)
    keep(ServedFile(path), registry.served)
    assert ServedFile(path).first == registry.served
    again, _ = started(served=ServedFile(path).first)
    first, second = (again.add(f"http://w:{port}")[0] for port in (1, 2))
    for worker, start in ((second, 500.0), (first, 100.0)):
        worker.guarantee, worker.startup_time = GUARANTEE, start
        come(again, worker, "default", "d0" if worker is second else None)
    assert first.can_take_requests and Hold.VERSION in second.holds
    first.weight_digest = "d1"
    probe(again)
    assert again.served.weights == Weights("default", "d1") and not second.can_take_requests


def test_where_no_updated_worker_is_left_to_report_the_digest_an_operator_decides():
    registry, (updated, restarted) = named(2)
    restarted.startup_time = 500.0
    update(registry, updated)
    registry.mark_dead(updated, "a test")
    probe(registry)
    assert not restarted.can_take_requests and not needs_operator(registry)  # the other process may live
    updated.startup_time = 600.0
    come(registry, updated, "default", "d0")
    assert not updated.can_take_requests and needs_operator(registry)
    assert "enable the worker" in restarted.holds[Hold.VERSION]
    registry.set_disabled(restarted, False)
    probe(registry)
    assert restarted.can_take_requests and updated.can_take_requests  # which has the same


def test_updated_workers_whose_digests_differ_once_they_are_known_serve_none():
    registry, (first, second) = named(2)
    update(registry, first, second)
    first.weight_digest = "d1"
    probe(registry)
    assert first.can_take_requests and second.can_take_requests
    assert registry.served.weights == Weights("default")  # the other may have read another file
    second.weight_digest = "d2"
    probe(registry)
    assert not first.can_take_requests and not second.can_take_requests and needs_operator(registry)
    assert "(digest d1)" in second.holds[Hold.VERSION] and "update the weights" in second.holds[Hold.VERSION]
    probe(registry)
    assert Hold.VERSION in first.holds and Hold.VERSION in second.holds
    update(registry, first, second, digest="d3")
    assert first.can_take_requests and second.can_take_requests
    assert registry.served.weights == Weights("default", "d3")


def test_an_operator_chooses_between_workers_whose_digests_differ():
    registry, (first, second) = named(2)
    update(registry, first, second)
    first.weight_digest, second.weight_digest = "d1", "d2"
    probe(registry)
    registry.set_disabled(second, False)
    probe(registry)
    assert second.can_take_requests and not first.can_take_requests
    assert registry.served.weights == Weights("default", "d2")


def test_a_worker_that_serves_and_turns_out_to_have_other_weights_is_held():
    registry, (kept, other, third) = named(3)
    other.weight_digest = "d9"
    probe(registry)
    assert kept.can_take_requests and third.can_take_requests and Hold.VERSION in other.holds
    assert registry.served.weights == Weights("default", "d0")
    probe(registry, allow_mixed=True)
    assert other.can_take_requests


@pytest.mark.parametrize("allow_mixed", [False, True])
def test_a_trainer_that_updates_workers_of_one_version_directly_is_followed(allow_mixed):
    registry, workers = named(3)
    for worker in workers:
        worker.weight_digest = "d1"
        probe(registry, allow_mixed)
        assert any(one.can_take_requests for one in workers)
    assert all(one.can_take_requests for one in workers) and registry.served.weights == Weights("default", "d1")


def test_the_digest_of_one_worker_is_not_taken_for_that_of_another_that_is_not_known():
    registry, (trained, old) = named(2, "d1")
    registry.mark_dead(old, "a test")
    trained.weight_digest = None  # for a moment
    come(registry, old, "default", "d0")
    assert not old.can_take_requests and registry.served.weights == Weights("default", "d1")
    trained.weight_digest = "d1"
    probe(registry)
    assert trained.can_take_requests and not old.can_take_requests


@pytest.mark.slow
def test_a_restarted_worker_does_not_serve_beside_an_update_of_the_same_name(make_fleet):
    about = {"weight_digest": "d0", "guarantee": GUARANTEE}
    fleet = make_fleet([FakeWorker(**about), FakeWorker(**about)])
    left, gone = fleet.workers
    begin, write, end = SESSION
    assert fleet.post(begin).status_code == 200
    gone.answers[write] = killed(gone)
    assert [lost["worker"] for lost in fleet.post(write).json()["lost_workers"]] == [gone.url]
    come_back(fleet, gone, "1")
    left.answers[end] = becomes(left, "1", weight_digest=None)  # a part of the weights, named later
    assert fleet.post(end).status_code == 200
    assert fleet.report(left)["routable"] and not fleet.report(gone)["routable"]
    kept = json.loads(Path(f"{fleet.journal}.served.json").read_text())
    assert kept["weights"] == {"version": "1", "digest": None} and list(kept["processes"]) == [left.url]
    left.info = {**left.info, "weight_digest": "d1"}
    wait_until(lambda: "digest d1" in fleet.report(gone)["held"]["version"], "it is compared")
    served = fleet.http.get("/workers").json()["served"]
    assert served == {"weight_version": "1", "weight_digest": "d1"} and fleet.report(left)["routable"]
