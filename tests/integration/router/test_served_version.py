"""The weight version that a fleet last served, which a router remembers while its workers die and return."""

from __future__ import annotations

import logging

import pytest

from lockstep.integration.router.fleet.workers import Health, Hold, Worker, WorkerRegistry
from lockstep.tests.support.fake_workers import FakeWorker, Fleet, wait_until


def started(*versions: str) -> tuple[WorkerRegistry, list[Worker]]:
    """Make a registry of workers that came alive in turn with these versions."""
    registry = WorkerRegistry()
    workers = [registry.add(f"http://w:{port}")[0] for port in range(1, len(versions) + 1)]
    for worker, version in zip(workers, versions, strict=True):
        come(registry, worker, version)
    return registry, workers


def come(registry: WorkerRegistry, worker: Worker, version: str) -> None:
    worker.weight_version = version
    registry.check_versions(allow_mixed=False, returned=worker)
    registry.mark_alive(worker)


def test_a_restarted_worker_does_not_take_over_from_a_stopped_one_with_the_trained_weights():
    registry, (stopped, restarted) = started("21", "21")
    for worker in (stopped, restarted):
        registry.mark_dead(worker, "a test")
    come(registry, restarted, "default")
    assert "'default'" in restarted.holds[Hold.VERSION] and "'21'" in restarted.holds[Hold.VERSION]
    come(registry, stopped, "21")
    registry.check_versions(allow_mixed=False)
    assert stopped.can_take_requests and not restarted.can_take_requests


def test_workers_that_are_all_restarted_serve_when_a_trainer_has_updated_all_of_them(caplog):
    registry, (first, second) = started("21", "21")
    for worker in (first, second):
        registry.mark_dead(worker, "a test")
    for worker in (first, second):
        come(registry, worker, "default")
    first.weight_version = "22"
    registry.check_versions(allow_mixed=False)
    assert not first.can_take_requests and not second.can_take_requests
    second.weight_version = "22"
    with caplog.at_level(logging.WARNING):
        registry.check_versions(allow_mixed=False)
    assert first.can_take_requests and second.can_take_requests and registry.served_version == "22"
    assert "now serves weight version '22' instead of '21'" in caplog.text


def test_a_fresh_fleet_serves_and_follows_a_trainer_that_updates_its_workers_directly():
    registry, workers = started("default", "default")
    for worker in workers:
        worker.weight_version = "1"
        registry.check_versions(allow_mixed=False)
    assert all(worker.can_take_requests for worker in workers) and registry.served_version == "1"


def test_an_operator_cannot_accept_a_version_beside_a_worker_that_serves_another_one():
    registry, (serving, returned) = started("21", "default")
    registry.set_disabled(returned, False)
    assert not returned.can_take_requests and registry.served_version == "21"
    assert serving.health is Health.ALIVE


def restart(fleet: Fleet, worker: FakeWorker, version: str) -> None:
    port = worker.port
    worker.stop()
    wait_until(lambda: fleet.report(worker)["status"] == "dead", "it is dead")
    worker.version = version
    worker.start(port)


@pytest.mark.slow
def test_the_only_live_worker_waits_for_an_update_if_it_lost_its_weights(make_fleet):
    fleet = make_fleet(1, queue_timeout_s=0.2)
    [worker] = fleet.workers
    restart(fleet, worker, "default")
    wait_until(lambda: "version" in fleet.report(worker)["held"], "it is held")
    answer = fleet.post("/generate", {"text": "a"})
    assert answer.status_code == 503 and "last served '1'" in answer.json()["message"]
    worker.answers["/update_weights_from_disk"] = lambda body: (setattr(worker, "version", "2"), (200, {}))[1]
    assert fleet.post("/update_weights_from_disk").status_code == 200
    assert fleet.report(worker)["routable"]


@pytest.mark.slow
def test_an_operator_accepts_the_version_of_a_worker_by_enabling_it(make_fleet):
    fleet = make_fleet(1)
    [worker] = fleet.workers
    restart(fleet, worker, "default")
    wait_until(lambda: "version" in fleet.report(worker)["held"], "it is held")
    assert fleet.post(f"/workers/{fleet.report(worker)['id']}/enable").json()["routable"]


@pytest.mark.slow
def test_an_unresolved_update_after_a_restart_is_settled_as_its_refusal_says(fleet):
    """The refused update names the calls: resolve with the workers disabled, update all weights, enable."""
    good, restarted = fleet.workers
    good.answers["/update_weights_from_disk"] = lambda body: (setattr(good, "version", "2"), (200, {}))[1]
    restarted.answers["/update_weights_from_disk"] = (500, {"success": False})
    assert fleet.post("/update_weights_from_disk").status_code == 502
    restart(fleet, restarted, "default")
    wait_until(lambda: fleet.report(restarted)["status"] == "alive", "it is back")
    refused = fleet.post("/update_weights_from_disk")
    assert refused.status_code == 409 and '"enable": false' in refused.json()["message"]
    assert ".." not in refused.json()["message"]
    resolved = fleet.post("/weight_update_journal/resolve", {"acknowledge": True, "enable": False})
    assert resolved.json()["mixed_state"]
    for worker in fleet.workers:
        worker.answers["/update_weights_from_disk"] = lambda _, one=worker: (setattr(one, "version", "3"), (200, {}))[1]
    assert fleet.post("/update_weights_from_disk").status_code == 200
    for worker in fleet.workers:
        assert fleet.post(f"/workers/{fleet.report(worker)['id']}/enable").json()["routable"]
