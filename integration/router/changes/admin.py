"""Administrative verbs to all live workers: one change at a time, no new requests meanwhile, and a journal of updates.

Each change sets its own hold on its targets and lifts it afterwards, so a worker that an operator has disabled stays
disabled. The rules are the rules of SGLang-Omni's router, with three additions: all changes, also `continue`, have one
order; the router assigns the ranks of a group; and it knows which workers are paused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from ...http.edge.bodies import MAX_TIMEOUT_S
from ...http.edge.errors import HttpError
from ..calls import WorkerCall
from ..config import RouterConfig
from ..counters import RouterCounters
from ..fleet.aborted import Abort
from ..fleet.groups import Groups, group_of
from ..fleet.health import HealthChecks
from ..fleet.held import draining
from ..fleet.roster import Roster, RosterUnwritable
from ..fleet.worker import Hold, Worker
from ..fleet.workers import WorkerRegistry, why_none
from ..wire import Wire
from .broadcast import Result, broadcast, encoded, merge, summarise, with_value
from .pausing import note_pause
from .rules import RULES, Rule, aborted_by, rule_for
from .taking_back import TakingBack, client_of
from .updates import Updates

logger = logging.getLogger(__name__)

# Verbs that leave out draining workers: updates and groups, which the end of a worker would break off for the others,
# and reports of what all workers have in common after them.
_OF_LASTING_WORKERS = {"init_weights_update_group", "init_weight_transfer_engine", "state"} | {
    verb for verb, rule in RULES.items() if rule.one_version or rule.journal in ("opens", "writes", "closes")
}
# Changes of the workers themselves. They take moments, and many come at once where engines start.
WORKER_CHANGES = ("adding a worker", "removing a worker", "enabling a worker", "disabling a worker")
_SHORT_S = 5.0  # for a change with a limit of 0 behind those, or where the lock was free a moment before


class Admin:
    """The administration of all workers, one change at a time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        health: HealthChecks,
        updates: Updates,
        roster: Roster,
        wire: Wire,
        config: RouterConfig,
        counters: RouterCounters,
    ) -> None:
        self.updates, self.roster = updates, roster
        self._registry, self._health = registry, health
        self._wire, self._config, self._counters = wire, config, counters
        # Awaited before the workers hear of an abort; returns the number of waiting requests that it has ended.
        self.on_abort: Callable[[Abort], Awaitable[int]] | None = None
        self.is_draining = False  # the router ends: no update may begin
        self._groups = Groups()
        self._taking_back = TakingBack(updates, self._broadcast)
        self._lock = asyncio.Lock()
        self._running: tuple[str, float] | None = None  # the current change, and its start
        self._beginning: str | None = None  # the name of the client whose session begins now

    async def run(
        self, verb: str, call: WorkerCall, values: Mapping[str, object], has_left: Callable[[], Awaitable[bool]]
    ) -> tuple[int, bytes]:
        """Broadcast a verb of RULES. Returns one status and body, as JSON, for all workers. Raises HttpError where no
        worker was asked.

        A change that waits for the one before it does not run if its client `has_left` or its `timeout_s` is over.
        """
        started, status = time.monotonic(), 500
        try:
            status, body = await self._run(verb, call, values, has_left)
        except HttpError as error:
            status = error.status
            raise
        finally:
            self._counters.add_broadcast(verb, status, time.monotonic() - started)
        return status, body

    async def _run(
        self, verb: str, call: WorkerCall, values: Mapping[str, object], has_left: Callable[[], Awaitable[bool]]
    ) -> tuple[int, bytes]:
        rule = rule_for(verb, values)
        abort = aborted_by(call, values)
        if not rule.is_change:
            num_aborted = await self._abort_held(abort)
            try:
                targets = await self._targets(verb)
            except HttpError as error:
                if not num_aborted:
                    raise
                message = f"{num_aborted} requests that waited at the router are aborted; {error.message}"
                return 200, json.dumps({"success": True, "message": message, "aborted": num_aborted}).encode()
            results = await self._broadcast(targets, call, values)
            if verb == "state":
                return await encoded(results, _with_members)
            if rule.merge is not None:
                return await encoded(results, partial(merge, name=rule.merge[0], function=rule.merge[1]))
            return await encoded(results, _one_version if rule.one_version else summarise)
        async with self.changing(verb, min(self._config.lock_limit_s, _timeout_s(values) or math.inf)):
            if await has_left():
                raise HttpError(408, f"the client of {verb} left before it began", code="client_left")
            targets = await self._targets(verb)
            if rule.journal:
                if self.is_draining and self.updates.journal.entry is None:
                    raise draining()
                return await self._update(verb, rule, call, values, targets)
            await self._abort_held(abort)  # a pause may abort
            return await encoded(await self._change(verb, rule, call, values, targets), summarise)

    async def _abort_held(self, abort: Abort | None) -> int:
        return 0 if abort is None or self.on_abort is None else await self.on_abort(abort)

    @asynccontextmanager
    async def changing(self, what: str, limit_s: float = 0.0) -> AsyncIterator[None]:
        """Hold the lock of changes. Raises HttpError: 503 after a wait of `limit_s`. Where that is 0, 409 at once if a
        long change is under way; workers that come and go side by side wait for each other."""
        is_short = self._running is None or self._running[0] in WORKER_CHANGES
        busy = HttpError(409, f"{self._busy()}: try again after it", code="update_in_progress", extra=self._age())
        if limit_s <= 0 and self._lock.locked() and not is_short:
            raise busy
        try:
            async with asyncio.timeout(limit_s if limit_s > 0 else _SHORT_S):
                await self._lock.acquire()
        except TimeoutError:
            if limit_s <= 0:
                raise busy from None
            raise HttpError(
                503, f"the admin update lock was not free within {limit_s:g} s: {self._busy()}",
                code="admin_update_lock", headers={"Retry-After": "5"}, extra=self._age(),
            ) from None  # fmt: skip
        self._running, self._registry.is_changing = (what, time.monotonic()), True
        try:
            yield
        finally:
            self._running, self._registry.is_changing = None, False
            self._registry.has_open_update = self.updates.journal.is_open
            self._lock.release()
            self._registry.notify()  # a request may have waited for its end

    async def resolve(self, enable: bool, force: bool = False) -> dict[str, object]:
        """Clear the journal's update for an operator that has repaired the workers. force: also one in progress, which
        is a 409 otherwise. Raises HttpError 409 and 503."""
        async with self.changing("weight_update_journal/resolve"):
            entry, versions = await self.updates.resolve(force)
            if entry is None:
                return {"success": True, "message": "nothing was unresolved", "weight_versions": versions}
            if not enable:
                await self.set_disabled([w for w in self._registry if entry.concerns(w.url)], True)
            is_mixed = len(set(versions.values())) > 1
            told = f"{entry.verb} of {entry.age_s:.0f} s ago is resolved"
            told += "; the weight versions are mixed" if is_mixed else ""
            return {"success": True, "message": told, "mixed_state": is_mixed, "weight_versions": versions}

    async def workers_of_updates(self) -> list[Worker]:
        """Return the workers that an update goes to. Raises HttpError 503 without any."""
        return await self._targets("begin_weight_update")

    async def client_left(self, client: str, call: WorkerCall) -> None:
        """Take back the session that a client has begun and not ended, whose connection has closed, at all workers:
        also at those that have committed it already. call: that of its connection, with its key."""
        if client not in (self.updates.client, self._beginning):
            return
        try:
            async with self.changing("abort_weight_update", self._config.lock_limit_s):
                if self.updates.client == client and self.updates.journal.is_open:
                    logger.error("%s is gone: its update is taken back", client)
                    verb, values = "abort_weight_update", {"client": client, "why": f"its client {client} is gone"}
                    call = replace(call, path=f"/lockstep/{verb}", body=json.dumps(values).encode())
                    await self._update(verb, RULES[verb], call, values, await self._targets(verb))
        except HttpError as error:  # each worker takes its own part back, when its connection closes
            logger.error("%s is gone, and the router could not take its update back: %s", client, error.message)

    async def end_lost_update(self) -> None:
        """Clear the entry of a failed update whose workers are all other processes now, or removed. Does nothing where
        a change is under way, or the disk refuses: the next probe tries again."""
        if self.updates.is_lost and not self._lock.locked():
            with suppress(HttpError):
                async with self.changing("the end of a lost update"):
                    await self.updates.end_lost()

    async def set_disabled(self, workers: Sequence[Worker], disabled: bool) -> None:
        """Disable or enable workers for an operator, whose change holds the lock. Raises HttpError 503 where the roster
        cannot be written."""
        await self.write_down(lambda: self.roster.set_disabled([worker.url for worker in workers], disabled))
        for worker in workers:
            self._registry.set_disabled(worker, disabled)

    async def write_down(self, change: Callable[[], None]) -> None:
        """Run a method of the roster. Raises HttpError 503 where the roster cannot be written."""
        try:
            await asyncio.to_thread(change)
        except RosterUnwritable as error:
            raise HttpError(503, f"the workers stay as they are: {error}", code="roster_unwritable") from error

    # -- one change -------------------------------------------------------------------------------------------------

    async def _change(
        self, verb: str, rule: Rule, call: WorkerCall, values: Mapping[str, object], targets: Sequence[Worker]
    ) -> list[Result]:
        """Broadcast a verb while the targets get no requests, and update the workers' states by the results."""
        group, bodies = group_of(verb, values), None
        if verb == "init_weights_update_group":
            offsets = self._groups.plan(group, values, targets)
            bodies = {worker_id: with_value(values, "rank_offset", offset) for worker_id, offset in offsets.items()}
        elif verb == "init_weight_transfer_engine":
            self._groups.forget(group)  # at the workers a new one replaces it
            bodies = self._groups.of_vllm(group, values, targets)
        if rule.pauses or rule.releases:
            self._registry.pauses.ask(targets)
        async with self._held(verb if rule.holds else None, targets):
            results = await self._broadcast(targets, call, values, bodies)
            done = [result.worker for result in results if result.success]
            note_pause(self._registry.pauses, verb, rule, call, values, results)
            if rule.pauses is False:
                await self.updates.note_commits(done)
            elif verb == "init_weights_update_group":
                self._after_init(group, results)
            elif verb == "init_weight_transfer_engine" and len(done) == len(results):
                self._groups.record(group, done)
            elif verb in ("destroy_weights_update_group", "shutdown_weight_transfer_engine") and all(
                r.success or r.is_refusal for r in results
            ):
                self._groups.forget(group)
                for worker in self._registry:
                    self._registry.end_group(worker, group)
        return results

    def _after_init(self, group: str, results: Sequence[Result]) -> None:
        joined = [result.worker for result in results if result.success]
        if len(joined) == len(results):
            self._groups.record(group, joined)
        for worker in joined:
            self._registry.end_group(worker)
        for result in results if joined else ():  # where none joined, a later init may
            if not result.success:
                how = result.message or f"it answered {result.status}"
                why = f"it did not join the group {group!r}: {how}. Init or destroy the group, or enable it when well"
                self._registry.miss_group(result.worker, group, why)

    @asynccontextmanager
    async def _held(self, verb: str | None, targets: Sequence[Worker]) -> AsyncIterator[None]:
        for worker in targets if verb else ():
            self._registry.hold(worker, Hold.BROADCAST, f"{verb} is under way")
        try:
            yield
        finally:
            for worker in targets:
                self._registry.unhold(worker, Hold.BROADCAST)
            self._registry.pauses.answered()
            self._registry.check_pause()

    async def _update(
        self, verb: str, rule: Rule, call: WorkerCall, values: Mapping[str, object], targets: Sequence[Worker]
    ) -> tuple[int, bytes]:
        """Run a change with a journal entry, written before any worker is held and kept until all workers have it.
        Returns the status and the body; `lost_workers` of a 200 has the workers that died meanwhile."""
        live, targets = targets, await self.updates.partakers(verb, rule, targets)
        if verb in ("update_weights_from_distributed", "update_weights"):
            self._groups.check(group_of(verb, values), targets)
        known = await self.updates.open(verb, rule, targets)
        self._beginning = client_of(values) if rule.journal == "opens" else None
        is_settled = False
        try:
            results = await self._change(verb, rule, call, values, targets)
            if await self.updates.has_begun_anew(rule, results, known):
                known = None
                self.updates.begin_at(live)  # it is an update of the others, too
                others = [worker for worker in live if worker not in targets]
                results += await self._change(verb, rule, call, values, others)
            if rule.journal == "opens":
                results = await self._taking_back.give_up_begun(call, values, results)
            if rule.journal == "mends":  # a process that began in the middle of the update has nothing to take back
                results = [result for result in results if self.updates.partakes(result.worker)] or results
            if verb == "abort_weight_update":
                results = await self._taking_back.revert_committed(call, values, results)
            lost = await self.updates.settle(verb, rule, results, known)
            is_settled = True
            if rule.journal == "opens" and not all(result.did_nothing for result in results):
                self.updates.client = self._beginning  # where all refuse it, an open session stays its client's
        finally:
            self._beginning = None
            if not is_settled:
                await self.updates.break_off(verb)

        def combine(results: Sequence[Result]) -> tuple[int, dict[str, object]]:
            status, body = summarise([result for result in results if result not in lost])
            return status, body | {"lost_workers": [result.report() for result in lost]} if lost else body

        return await encoded(results, combine)

    # -- small things -----------------------------------------------------------------------------------------------

    async def _targets(self, verb: str) -> list[Worker]:
        """Return the live workers, for some verbs without the draining ones. A suspect worker is probed first, because
        a call to a dead worker is no success."""
        await asyncio.gather(*(self._health.check(worker) for worker in self._registry.live() if worker.is_suspect))
        live = self._registry.live()
        if verb in _OF_LASTING_WORKERS:
            live = [worker for worker in live if not worker.is_draining]
        if not live:
            raise HttpError(503, f"no live upstream workers: {why_none(self._registry)}", code="no_workers")
        return live

    async def _broadcast(
        self,
        targets: Sequence[Worker],
        call: WorkerCall,
        values: Mapping[str, object],
        bodies: Mapping[str, bytes] | None = None,
    ) -> list[Result]:
        # The workers keep the call's own deadline; this one is for workers that do not answer.
        limit_s = max(_timeout_s(values) or 0.0, self._config.admin_timeout_s)
        return await broadcast(self._wire, targets, call, limit_s, self._config.max_admin_answer_bytes, bodies)

    def _busy(self) -> str:
        if self._running is None:
            return "another change is about to begin"
        verb, since = self._running
        return f"{verb} has been under way for {time.monotonic() - since:.1f} s"

    def _age(self) -> dict[str, object]:
        return {} if self._running is None else {"age_s": round(time.monotonic() - self._running[1], 3)}


def _timeout_s(values: Mapping[str, object]) -> float | None:
    """Return a call's own deadline, or None without a valid one. The workers refuse an invalid one."""
    given = values.get("timeout_s")
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return float(given) if 0 < given <= MAX_TIMEOUT_S else None


def _one_version(results: Sequence[Result]) -> tuple[int, dict[str, object]]:
    """Summarise results as `summarise`. Raises HttpError 409 with the versions where the weight versions differ."""
    versions = {
        result.worker.url: result.body["weight_version"]
        for result in results
        if isinstance(result.body, dict) and "weight_version" in result.body
    }
    if len(set(map(str, versions.values()))) <= 1:
        return summarise(results)
    listed = ", ".join(f"{url}: {version!r}" for url, version in versions.items())
    extra = {
        "mixed_state": True, "weight_versions": versions, "results": [result.report() for result in results],
    }  # fmt: skip
    raise HttpError(409, f"the workers have different weight versions: {listed}", code="mixed_versions", extra=extra)


def _with_members(results: Sequence[Result]) -> tuple[int, dict[str, object]]:
    """Summarise results, with the members of a group in the order of their ranks, see `Groups.plan`. Their entries
    change with their processes."""
    status, body = summarise(results)
    members = [
        {"worker": worker.url, "num_ranks": worker.num_ranks, "num_deaths": worker.num_deaths,
         "registration": worker.registration, "process": worker.process}
        for worker in (result.worker for result in results)
    ]  # fmt: skip
    return status, body | {"members": members}
