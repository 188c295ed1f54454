"""The weights that a fleet last served, which a router remembers while its workers, or the router itself, return."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import stat
import time
from pathlib import Path

import pytest

from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.fleet.health import HealthChecks
from lockstep.integration.router.fleet.served import Served, ServedFile, Weights
from lockstep.integration.router.fleet.worker import Health, Hold, Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry
from lockstep.integration.router.wire import Answer, WorkerFailed
from lockstep.tests.support.fake_workers import FakeWorker, Fleet, wait_until
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.full_disks import no_file_above

GUARANTEE = {"invariant": True}


def started(*versions: str, served: Served | None = None) -> tuple[WorkerRegistry, list[Worker]]:
    """Make a registry of workers that came alive in turn with these versions."""
    registry = WorkerRegistry()
    registry.served = served or Served()
    workers = [registry.add(f"http://w:{port}")[0] for port in range(1, len(versions) + 1)]
    for worker, version in zip(workers, versions, strict=True):
        come(registry, worker, version)
    return registry, workers


def come(registry: WorkerRegistry, worker: Worker, version: str, digest: str | None = None) -> None:
    worker.weight_version, worker.weight_digest = version, digest
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


# -- the digest -----------------------------------------------------------------------------------------------------


def test_a_worker_with_the_version_of_the_others_and_another_digest_gets_no_requests():
    """A trainer that names no version updates weights under the version "default", which first weights have too."""
    registry, (serving, returned) = started("default", "default")
    serving.weight_digest = "d1"
    registry.mark_dead(returned, "a test")
    come(registry, returned, "default", "d0")
    assert "(digest d0)" in returned.holds[Hold.VERSION] and "(digest d1)" in returned.holds[Hold.VERSION]
    registry.set_disabled(returned, False)
    assert not returned.can_take_requests  # an operator cannot accept them beside a worker that serves others
    returned.weight_digest = "d1"
    registry.check_versions(allow_mixed=False)
    assert returned.can_take_requests


def test_a_worker_that_returns_alone_with_another_digest_gets_no_requests_until_it_is_updated():
    registry, [worker] = started("default")
    worker.weight_digest = "d1"
    registry.check_versions(allow_mixed=False)
    registry.mark_dead(worker, "a test")
    come(registry, worker, "default", "d0")
    assert "last served 'default' (digest d1)" in worker.holds[Hold.VERSION]
    worker.weight_digest = "d2"  # a trainer updated it
    registry.check_versions(allow_mixed=False)
    assert worker.can_take_requests and registry.served.weights == Weights("default", "d2")


def test_a_worker_that_will_name_its_digest_waits_until_it_can_be_compared():
    registry, (serving, returned) = started("1", "1")
    serving.weight_digest, returned.guarantee = "d1", GUARANTEE
    registry.mark_dead(returned, "a test")
    come(registry, returned, "1")
    assert "is not known yet" in returned.holds[Hold.VERSION]
    returned.weight_digest = "d1"
    registry.check_versions(allow_mixed=False)
    assert returned.can_take_requests


def test_a_worker_that_reports_no_digest_is_compared_by_its_version():
    registry, (serving, returned) = started("1", "1")
    serving.weight_digest = "d1"
    registry.mark_dead(returned, "a test")
    come(registry, returned, "1")
    assert returned.can_take_requests


def test_a_digest_that_is_unknown_for_a_moment_is_not_forgotten():
    registry, [worker] = started("1")
    worker.weight_digest = "d1"
    registry.check_versions(allow_mixed=False)
    worker.forget_weights()
    registry.check_versions(allow_mixed=False)
    assert registry.served.weights == Weights("1", "d1")
    worker.weight_version = "2"
    registry.check_versions(allow_mixed=False)
    assert registry.served.weights == Weights("2")


def test_a_process_that_served_is_taken_back_with_the_weights_of_an_update_that_the_router_missed():
    served = Served(Weights("21", "d21"), {"http://w:1": 1.5, "http://w:2": 2.5})
    registry, _ = started(served=served)
    updated, restarted = (registry.add(f"http://w:{port}")[0] for port in (1, 2))
    updated.startup_time, restarted.startup_time = 1.5, 9.5
    come(registry, restarted, "default", "d0")
    come(registry, updated, "22", "d22")
    registry.check_versions(allow_mixed=False)
    assert updated.can_take_requests and not restarted.can_take_requests
    assert registry.served == Served(Weights("22", "d22"), {"http://w:1": 1.5})


# -- the file --------------------------------------------------------------------------------------------------------


def keep(file: ServedFile, *served: Served) -> None:
    async def run() -> None:
        for one in served:
            file.keep(one)
        await file.written()

    asyncio.run(run())


def test_the_file_has_what_was_served_last_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "served.json"
    last = Served(Weights("2", "d2"), {"http://w:1": 1764210000.123456, "http://w:2": "boot"})
    keep(ServedFile(path), Served(Weights("1")), last)
    assert ServedFile(path).first == last and stat.S_IMODE(path.stat().st_mode) == 0o600
    keep(ServedFile(path), Served())
    assert ServedFile(path).first == Served()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_keeps_what_was_served_before_and_is_logged_once(tmp_path, caplog):
    path = tmp_path / "served.json"
    file, first, second = ServedFile(path), Served(Weights("1")), Served(Weights("2"))
    keep(file, first)
    with no_file_above(20):
        keep(file, second)
        keep(file, second)
    assert ServedFile(path).first == first
    assert caplog.text.count("cannot be written") == 1
    keep(file, second)  # there is room again
    assert ServedFile(path).first == second


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weights": 3, "processes": {}}', '{"weights": {"version": 1, "digest": null}, "processes": {}}',
     '{"weights": null, "processes": [1]}', '{"weights": null, "processes": {"u": {}}}', "[" * 100_000, "\udcff"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_with_the_remedy(tmp_path, text):
    path = tmp_path / "served.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="delete it"):
        ServedFile(path)


def test_the_file_stands_beside_the_journal_and_is_none_without_a_journal_of_its_own(tmp_path):
    from lockstep.integration.http.edge.config import HttpConfig

    free = HttpConfig(port=0)
    assert RouterConfig((), free).served_path is None
    assert RouterConfig((), free, journal=tmp_path / "j.json").served_path == tmp_path / "j.json.served.json"
    keep(ServedFile(None), Served(Weights("1")))


# -- a whole router --------------------------------------------------------------------------------------------------


def again(fleet: Fleet) -> Fleet:
    """Start the router of a fleet anew, with the same files and workers."""
    fleet.http.close()
    fleet.router.close()
    return Fleet(fleet.journal.parent, fleet.workers)


def test_a_restarted_router_gives_no_requests_to_a_worker_that_lost_its_weights(make_fleet):
    first = make_fleet([FakeWorker("21", weight_digest="d21"), FakeWorker("21", weight_digest="d21")])
    wait_until(lambda: first.http.get("/workers").json()["served"] == {"weight_version": "21", "weight_digest": "d21"},
               "both digests are known")  # fmt: skip
    lost, kept = first.workers
    lost.version, lost.info = "default", {"startup_time": time.time(), "weight_digest": "d0"}
    fleet = again(first)
    try:
        assert fleet.report(kept)["routable"] and "'21' (digest d21)" in fleet.report(lost)["held"]["version"]
    finally:
        fleet.router.close()


def test_a_router_remembers_an_update_before_it_answers_the_trainer(make_fleet):
    fleet = make_fleet(1, health_interval_s=60.0)
    [worker] = fleet.workers
    worker.answers["/update_weights_from_disk"] = lambda body: (setattr(worker, "version", "2"), (200, {}))[1]
    assert fleet.post("/update_weights_from_disk").status_code == 200
    kept = json.loads(Path(f"{fleet.journal}.served.json").read_text())
    assert kept["weights"]["version"] == "2" and list(kept["processes"]) == [worker.url]


def test_a_fleet_without_workers_remembers_nothing(make_fleet):
    fleet = make_fleet(1)
    [worker] = fleet.workers
    fleet.http.delete(f"/workers/{fleet.report(worker)['id']}").raise_for_status()
    fleet.router.close()
    assert ServedFile(Path(f"{fleet.journal}.served.json")).first == Served()


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
def test_a_router_that_is_killed_holds_a_worker_that_lost_its_weights_meanwhile(tmp_path):
    from lockstep.tests.integration.router.test_engines import Process, workers

    worker, journal = FakeWorker("21"), tmp_path / "journal.json"
    router = Process("route", "--port", str(free_port()), "--journal", str(journal), "--worker", worker.url)
    try:
        url = router.ready()
        kept = Path(f"{journal}.served.json")
        wait_until(lambda: workers(url) and kept.exists(), "the version is kept")
        router.signal(signal.SIGKILL)
        router.kill()
        worker.version, worker.info = "default", {"startup_time": time.time()}
        router.start()
        router.ready()
        wait_until(lambda: workers(url)[worker.url]["is_healthy"], "it is alive")
        assert "last served '21'" in workers(url)[worker.url]["held"]["version"]
    finally:
        router.kill()
        worker.stop()


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


def cut_off(fleet: Fleet) -> None:
    """Leave an update in the journal as a router that is killed in the middle of it."""
    fleet.http.close()
    fleet.router.close()
    records = [{"url": w.url, "disabled": False, "weight_version": "1", "process": w.info["startup_time"]}
               for w in fleet.workers]  # fmt: skip
    values = {"verb": "update_weights_from_disk", "started_at": time.time(), "session": False, "failure": None}
    fleet.journal.write_text(json.dumps({**values, "targets": records}))


def test_an_update_in_the_journal_is_over_once_all_of_its_workers_are_other_processes(make_fleet):
    """A new job has the addresses of the former one, whose router was killed in the middle of an update."""
    first = make_fleet(2)
    cut_off(first)
    one, other = first.workers
    one.info = {**one.info, "startup_time": time.time() + 1}
    fleet = Fleet(first.journal.parent, first.workers)
    try:
        assert all("journal" in fleet.report(worker)["held"] for worker in (one, other)), "one process has it still"
        assert fleet.post("/update_weights_from_disk").status_code == 409
        restart(fleet, other, "1")
        wait_until(lambda: all("journal" not in fleet.report(worker)["held"] for worker in (one, other)), "it is over")
        assert fleet.http.get("/weight_update_journal").json() == {"unresolved": False, "entry": None}
        assert fleet.post("/update_weights_from_disk").status_code == 200
    finally:
        fleet.router.close()


def test_a_router_starts_although_workers_of_the_one_before_are_gone_and_serves_with_the_rest(make_fleet):
    first = make_fleet(2)
    first.http.close()
    first.router.close()
    gone, left = first.workers
    gone.stop()
    fleet = Fleet(first.journal.parent, first.workers, wait=False, queue_timeout_s=5.0)
    try:
        wait_until(lambda: fleet.stats()["num_healthy"] == 1, "the other one is alive")
        assert fleet.post("/generate", {"text": "a"}).json()["text"] == left.url
        assert fleet.post("/update_weights_from_disk").status_code == 200
    finally:
        fleet.router.close()
        gone.start(gone.port)


# -- probes ----------------------------------------------------------------------------------------------------------


class OneAnswer:
    """A wire to a worker that answers every call with the same object."""

    def __init__(self, **values: object) -> None:
        self.values = values

    async def fetch(self, *_: object) -> Answer:
        return Answer(200, json.dumps(self.values).encode())


def read_version(registry: WorkerRegistry, worker: Worker, wire: OneAnswer) -> None:
    probes = HealthChecks(registry, wire, RouterConfig(), lambda worker: None)
    asyncio.run(probes.read_version(worker))


def test_a_digest_that_a_probe_reads_wakes_the_streams_that_wait_for_it():
    registry, [worker] = started("1")
    woken: list[str | None] = []
    registry.on_change.append(lambda: woken.append(worker.weight_digest))
    read_version(registry, worker, OneAnswer(weight_version="1", weight_digest="d1"))
    assert woken == ["d1"]
    read_version(registry, worker, OneAnswer(weight_version="1", weight_digest="d1"))
    assert woken == ["d1"]


@pytest.mark.parametrize(
    ("version", "says"), [("v" * 5000, "5000 characters"), ("v\ud800", r"'v\\ud800' has half of a surrogate pair")]
)
def test_a_version_that_no_disk_or_answer_would_hold_is_a_failed_probe(version, says):
    """Of half a character `GET /workers` was an error for the whole fleet."""
    registry, [worker] = started("1")
    with pytest.raises(WorkerFailed, match=says):
        read_version(registry, worker, OneAnswer(weight_version=version))
    assert worker.weight_version == "1"
