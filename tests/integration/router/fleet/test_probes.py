"""Probes of workers: what is a failed one, what is enough to call a worker dead, and what its reports prove."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from lockstep.integration.router.calls import WorkerCall
from lockstep.integration.router.changes.broadcast import Result
from lockstep.integration.router.changes.journal import UpdateJournal
from lockstep.integration.router.changes.rules import RULES
from lockstep.integration.router.changes.updates import Updates
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.fleet.health import HealthChecks
from lockstep.integration.router.fleet.served import ServedFile
from lockstep.integration.router.fleet.worker import Health, Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry
from lockstep.integration.router.wire import Answer, NobodyListens, NotReached, Wire, WorkerFailed
from lockstep.tests.support.forked_ranks import free_port

VERB = "update_weights_from_disk"
CALL = WorkerCall("GET", "/health", "", (), b"")


class Reports:
    """A wire to one worker that answers from a table, and fails where the table has an error."""

    def __init__(self) -> None:
        self.table: dict[str, tuple[int, object] | WorkerFailed] = {
            "/health": (200, None), "/ready": (200, None), "/get_weight_version": (200, {"weight_version": "1"}),
            "/model_info": (404, None), "/server_info": (200, {"startup_time": 1.0}),
        }  # fmt: skip

    async def fetch(self, url: str, call: WorkerCall, max_bytes: int, limit_s: float) -> Answer:
        said = self.table[call.path]
        if isinstance(said, WorkerFailed):
            raise said
        return Answer(said[0], json.dumps(said[1]).encode())


class Probed:
    """One worker that has been found alive, and what probes it."""

    def __init__(self) -> None:
        self.registry, self.reports = WorkerRegistry(), Reports()
        self.worker, _ = self.registry.add("http://w:1")
        self.config = RouterConfig(dead_after=3)
        self.health = HealthChecks(self.registry, self.reports, self.config, lambda worker: None)  # type: ignore[arg-type]

    async def check(self, num: int = 1) -> Worker:
        for _ in range(num):
            await self.health.check(self.worker)
        return self.worker


def probed(run: Callable[[Probed], Coroutine[Any, Any, None]]) -> None:
    async def begin() -> None:
        one = Probed()
        assert (await one.check()).health is Health.ALIVE
        await run(one)

    asyncio.run(begin())


# -- connections that are not made -----------------------------------------------------------------------------------


def test_a_connection_that_is_not_made_in_time_is_one_failed_probe_and_a_refused_one_is_enough():
    async def run(one: Probed) -> None:
        one.reports.table["/health"] = NotReached("no connection within 5 s")
        worker = await one.check(2)
        assert worker.is_alive and worker.num_failed_probes == 2 and "no connection" in (worker.last_error or "")
        assert (await one.check()).health is Health.DEAD and worker.num_deaths == 1 and worker.is_gone
        one.reports.table["/health"] = (200, None)
        assert (await one.check()).is_alive and worker.num_failed_probes == 0
        one.reports.table["/health"] = NobodyListens("no connection")
        assert (await one.check()).health is Health.DEAD and worker.num_deaths == 2 and worker.is_gone

    probed(run)


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectTimeout("late"),
        httpx.ConnectError("[Errno 24] Too many open files"),
        httpx.ConnectError("[Errno -2] Name or service not known"),
    ],
)
def test_only_a_refused_connection_says_that_nobody_listens(monkeypatch, error):
    async def run() -> None:
        wire = Wire(ssl.create_default_context(), 5.0, 0)
        with pytest.raises(NobodyListens):
            await wire.fetch(f"http://127.0.0.1:{free_port()}", CALL, 100, 5.0)

        async def fail(*given: object) -> httpx.Response:
            raise error

        monkeypatch.setattr(wire._transport, "handle_async_request", fail)
        with pytest.raises(NotReached) as raised:
            await wire.fetch("http://127.0.0.1:1", CALL, 100, 5.0)
        assert not isinstance(raised.value, NobodyListens)
        await wire.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("numbers", "is_refused"),
    [(("ECONNREFUSED", "ENETUNREACH"), True), (("ECONNREFUSED", "ETIMEDOUT"), False), (("EMFILE",), False)],
)
def test_of_several_addresses_of_a_worker_every_one_with_a_way_to_it_must_refuse(monkeypatch, numbers, is_refused):
    async def run() -> None:
        wire = Wire(ssl.create_default_context(), 5.0, 0)

        async def fail(*given: object) -> httpx.Response:
            each = [OSError(getattr(errno, number), os.strerror(getattr(errno, number))) for number in numbers]
            raise httpx.ConnectError("All connection attempts failed") from ExceptionGroup("all", each)

        monkeypatch.setattr(wire._transport, "handle_async_request", fail)
        with pytest.raises(NotReached) as raised:
            await wire.fetch("http://w:1", CALL, 100, 5.0)
        assert isinstance(raised.value, NobodyListens) is is_refused
        await wire.close()

    asyncio.run(run())


# -- probes at the same time -----------------------------------------------------------------------------------------


def failing_later(one: Probed) -> tuple[asyncio.Event, list[str]]:
    """Let all calls to the worker fail when the event is set. Returns it, and the paths that were asked for."""
    fail, asked = asyncio.Event(), []

    async def fetch(url: str, call: WorkerCall, max_bytes: int, limit_s: float) -> Answer:
        asked.append(call.path)
        await fail.wait()
        raise WorkerFailed("it hangs")

    one.reports.fetch = fetch  # type: ignore[method-assign]
    return fail, asked


async def all_wait() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_probe_that_many_wait_for_is_one_failed_probe():
    async def run(one: Probed) -> None:
        fail, asked = failing_later(one)
        checks = [asyncio.create_task(one.health.check(one.worker)) for _ in range(5)]
        await all_wait()
        checks[0].cancel()  # the others have the result all the same
        await all_wait()
        fail.set()
        await asyncio.gather(*checks[1:])
        assert one.worker.is_alive and one.worker.num_failed_probes == 1 and asked == ["/health"]

    probed(run)


def test_a_worker_that_failed_since_its_probe_began_is_probed_once_more_for_all_that_ask():
    async def run(one: Probed) -> None:
        fail, asked = failing_later(one)
        first = asyncio.create_task(one.health.check(one.worker))
        await all_wait()
        one.worker.suspect("a call failed")
        later = [asyncio.create_task(one.health.check(one.worker)) for _ in range(5)]
        await all_wait()
        assert asked == ["/health"]
        fail.set()
        await asyncio.gather(first, *later)
        assert one.worker.num_failed_probes == 2 and asked == ["/health"] * 2

    probed(run)


def test_a_worker_that_is_removed_while_it_is_probed_keeps_nobody_waiting():
    async def run(one: Probed) -> None:
        failing_later(one)
        one.health.watch(one.worker)
        asking = asyncio.create_task(one.health.check(one.worker))
        await all_wait()
        one.health.forget(one.worker)
        one.registry.remove(one.worker)
        async with asyncio.timeout(20.0):
            await asking
        assert not one.worker.num_failed_probes
        await one.health.close()

    probed(run)


# -- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [(503, {"error": "busy"}), (404, None), (429, None)])
def test_a_worker_that_does_not_say_once_which_process_it_is_stays_alive(said):
    async def run(one: Probed) -> None:
        known = one.reports.table["/server_info"]
        one.worker.suspect("a call failed")
        one.reports.table["/server_info"] = said
        assert (await one.check()).is_alive and one.worker.num_failed_probes == 1 and one.worker.is_suspect
        one.reports.table["/server_info"] = known
        assert (await one.check()).is_alive and not one.worker.num_deaths and not one.worker.is_suspect
        one.worker.suspect("a call failed")
        one.reports.table["/server_info"] = (200, {"startup_time": 2.0})
        assert (await one.check()).num_deaths == 1 and "another process" in (one.worker.last_error or "")

    probed(run)


@pytest.mark.parametrize("said", [(404, None), (401, None), (501, None)])
def test_a_worker_without_these_reports_is_alive(said):
    async def run() -> None:
        one = Probed()
        for path in ("/get_weight_version", "/model_info", "/server_info"):
            one.reports.table[path] = said
        assert (await one.check()).is_alive
        one.worker.suspect("a call failed")
        assert (await one.check()).is_alive and not one.worker.num_deaths and one.worker.weight_version is None

    asyncio.run(run())


def test_a_version_that_a_worker_cannot_name_is_a_failed_probe_where_no_other_path_names_it():
    async def run(one: Probed) -> None:
        one.reports.table["/get_weight_version"] = (500, None)
        with pytest.raises(WorkerFailed, match="/get_weight_version: it answered 500"):
            await one.health.read_version(one.worker)
        one.reports.table["/model_info"] = (200, {"weight_version": "2"})
        assert await one.health.read_version(one.worker) == "2"

    probed(run)


@pytest.mark.parametrize(
    "said", [(500, None), (401, None), (200, {}), WorkerFailed("gone"), (200, {"weight_version": "2"})]
)
def test_an_update_that_all_refused_is_unresolved_unless_each_worker_names_its_version_again(tmp_path, said):
    async def run(one: Probed) -> None:
        served = ServedFile(tmp_path / "served.json")
        updates = Updates(one.registry, one.health, journal, served, one.config)
        rule, refused = RULES[VERB], [Result(one.worker, 400, {"success": False})]
        known = await updates.open(VERB, rule, [one.worker])
        one.reports.table["/get_weight_version"] = one.reports.table["/model_info"] = said
        await updates.settle(VERB, rule, refused, known)
        assert journal.is_unresolved and "journal" in one.worker.report()["held"]  # type: ignore[operator]
        await updates.resolve()
        one.reports.table["/get_weight_version"] = (200, {"weight_version": one.worker.weight_version})
        known = await updates.open(VERB, rule, [one.worker])
        await updates.settle(VERB, rule, refused, known)
        assert journal.entry is None and one.worker.can_take_requests

    journal = UpdateJournal(tmp_path / "journal.json")
    probed(run)
    journal.close()
