"""Administrative verbs to all live workers: one change at a time, no new requests meanwhile, and a journal of updates.

Each change holds its targets back on its own account and lets them go afterwards, so that a worker that an operator has
disabled stays disabled. The rules are those of SGLang-Omni's router; beyond them the order of every change, also
continue, is one, a group's ranks are dealt out, and a worker that is paused is known to be.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx

from ..http.bodies import MAX_TIMEOUT_S
from ..http.errors import HttpError
from .broadcast import Result, broadcast, summarise, with_value
from .config import RouterConfig
from .groups import DEFAULT_GROUP, Groups
from .health import HealthChecks
from .journal import JournalEntry, JournalUnwritable, TargetRecord, UpdateJournal
from .proxy import Call, why_none
from .workers import Hold, Worker, WorkerRegistry

logger = logging.getLogger(__name__)

_MOMENT_S = 1.0  # for whoever does not wait for a change under way


@dataclass(frozen=True)
class Rule:
    """How a verb is broadcast."""

    is_change: bool = False  # waits for the change before it
    holds: bool = False  # its targets get no requests meanwhile
    journal: str = ""  # of an update: "opens" or "closes" a session, "writes", or "mends" what went wrong
    one_version: bool = False  # 409 where the weight versions differ


_UPDATE = Rule(is_change=True, holds=True, journal="writes")
_CHANGE = Rule(is_change=True, holds=True)
_READ = Rule()
_VERSION = Rule(one_version=True)
# By the last part of the path, so that /lockstep/VERB follows the same rule. What is not here is not broadcast.
RULES: dict[str, Rule] = {
    "pause_generation": _CHANGE,
    "continue_generation": Rule(is_change=True),
    "update_weights_from_disk": _UPDATE,
    "update_weights_from_distributed": _UPDATE,
    "update_weights_from_tensor": _UPDATE,
    "update_weights_from_ipc": _UPDATE,
    "update_weight_version": _UPDATE,
    "post_process_weights": _UPDATE,
    "verify_weight_update": _UPDATE,
    "begin_weight_update": replace(_UPDATE, journal="opens"),
    "end_weight_update": replace(_UPDATE, journal="closes"),
    "abort_weight_update": replace(_UPDATE, journal="mends"),
    "revert_weight_update": replace(_UPDATE, journal="mends"),
    "release_weight_undo": Rule(is_change=True),
    "init_weights_update_group": _CHANGE,
    "destroy_weights_update_group": _CHANGE,
    "release_memory_occupation": _CHANGE,
    "resume_memory_occupation": _CHANGE,
    "pull_weights": Rule(is_change=True),
    "weights_checker": _READ,  # but see `rule_for`
    "flush_cache": _READ,
    "abort_request": _READ,
    "finish_digest": _READ,
    "state": _READ,
    "server_info": _READ,
    "get_server_info": _READ,
    "get_weights_by_name": _READ,
    "start_profile": _READ,
    "stop_profile": _READ,
    "pin_blocks": _READ,
    "unpin_blocks": _READ,
    "pin_prefix": _READ,
    "unpin_prefix": _READ,
    "evict_descendants": _READ,
    "cache_tree": _READ,
    "model_info": _VERSION,
    "get_model_info": _VERSION,
    "get_weight_version": _VERSION,
}


def rule_for(verb: str, values: Mapping[str, object]) -> Rule:
    """A checker that overwrites the weights is a change."""
    if verb == "weights_checker" and values.get("action") == "reset_tensors":
        return _CHANGE
    return RULES[verb]


class Admin:
    """Broadcasts, one change at a time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        health: HealthChecks,
        journal: UpdateJournal,
        client: httpx.AsyncClient,
        config: RouterConfig,
    ) -> None:
        self._registry = registry
        self._health = health
        self._client = client
        self._config = config
        self._groups = Groups()
        self._lock = asyncio.Lock()
        self._running: tuple[str, float] | None = None  # the change under way, and when it began
        self.journal = journal

    async def run(
        self, verb: str, call: Call, values: Mapping[str, object], has_left: Callable[[], Awaitable[bool]]
    ) -> tuple[int, dict[str, object]]:
        """Broadcast a verb of RULES; status and body for all workers together. Raises HttpError where none is asked.

        A change that waits for the one before it never runs once its client `has_left` or its `timeout_s` is over.
        """
        rule = rule_for(verb, values)
        if not rule.is_change:
            results = await self._broadcast(self._targets(), call, values)
            return _one_version(results) if rule.one_version else summarise(results)
        async with self.changing(verb, min(self._config.lock_limit_s, _timeout_s(values) or math.inf)):
            if await has_left():
                raise HttpError(408, f"the client of {verb} left before it began", code="client_left")
            targets = self._targets()
            if rule.journal:
                return summarise(await self._update(verb, rule, call, values, targets))
            return summarise(await self._change(verb, rule, call, values, targets))

    @asynccontextmanager
    async def changing(self, what: str, limit_s: float = 0.0) -> AsyncIterator[None]:
        """Be the one change under way. Raises HttpError: 503 after waiting `limit_s`, 409 at once without one."""
        if limit_s <= 0 and self._lock.locked():
            raise HttpError(409, f"{self._busy()}: try again after it", code="update_in_progress", extra=self._age())
        try:
            async with asyncio.timeout(max(limit_s, _MOMENT_S)):
                await self._lock.acquire()
        except TimeoutError:
            raise HttpError(
                503, f"the admin update lock was not free within {limit_s:g} s: {self._busy()}",
                code="admin_update_lock", headers={"Retry-After": "5"}, extra=self._age(),
            ) from None  # fmt: skip
        self._running = (what, time.monotonic())
        try:
            yield
        finally:
            self._running = None
            self._lock.release()

    async def resolve(self, enable: bool) -> dict[str, object]:
        """An operator says that the update in the journal is dealt with. Raises HttpError 409 and 503."""
        async with self.changing("weight_update_journal/resolve"):
            entry = self.journal.entry
            if entry is None:
                return {"success": True, "message": "nothing was unresolved", "weight_versions": self._versions()}
            await self._clear_journal()
            for worker in self._registry:
                if not enable and entry.concerns(worker.url):
                    self._registry.set_disabled(worker, True)
            await self._read_versions(self._registry.live())
            versions = self._versions()
            is_mixed = len(set(versions.values())) > 1
            told = f"{entry.verb} of {entry.age_s:.0f} s ago is resolved"
            told += "; the weight versions are mixed" if is_mixed else ""
            return {"success": True, "message": told, "mixed_state": is_mixed, "weight_versions": versions}

    def apply_journal(self, worker: Worker) -> None:
        """Hold a worker back that an unresolved update concerns."""
        entry = self.journal.entry
        if entry is not None and entry.failure is not None and entry.concerns(worker.url):
            self._registry.hold(worker, Hold.JOURNAL, f"{entry.verb} is unresolved: {entry.failure}")

    # -- one change -------------------------------------------------------------------------------------------------

    async def _change(
        self, verb: str, rule: Rule, call: Call, values: Mapping[str, object], targets: Sequence[Worker]
    ) -> list[Result]:
        """Broadcast while the targets get no requests, and note what the workers are afterwards."""
        group = str(values.get("group_name") or DEFAULT_GROUP)
        bodies = None
        if verb == "init_weights_update_group":
            offsets = self._groups.plan(group, values, targets)
            bodies = {worker_id: with_value(values, "rank_offset", offset) for worker_id, offset in offsets.items()}
        elif verb == "update_weights_from_distributed":
            self._groups.check(group, targets)
        async with self._held(verb if rule.holds else None, targets):
            results = await self._broadcast(targets, call, values, bodies)
            done = [result.worker for result in results if result.success]
            if verb in ("pause_generation", "continue_generation"):
                for worker in done:
                    worker.paused = verb == "pause_generation"
            elif verb == "init_weights_update_group":
                self._after_init(group, results)
            elif verb == "destroy_weights_update_group" and all(r.success or r.is_refusal for r in results):
                self._groups.forget(group)
        return results

    def _after_init(self, group: str, results: Sequence[Result]) -> None:
        if all(result.success for result in results):
            self._groups.record(group, [result.worker for result in results])
        for result in results:
            if not result.success:
                how = result.message or f"it answered {result.status}"
                why = f"it did not join the group {group!r}: {how}. Enable it when it is well"
                self._registry.hold(result.worker, Hold.GROUP, why)

    @asynccontextmanager
    async def _held(self, verb: str | None, targets: Sequence[Worker]) -> AsyncIterator[None]:
        for worker in targets if verb else ():
            self._registry.hold(worker, Hold.BROADCAST, f"{verb} is under way")
        try:
            yield
        finally:
            for worker in targets:
                self._registry.unhold(worker, Hold.BROADCAST)

    # -- updates ----------------------------------------------------------------------------------------------------

    async def _update(
        self, verb: str, rule: Rule, call: Call, values: Mapping[str, object], targets: Sequence[Worker]
    ) -> list[Result]:
        """A change that is in the journal from before anybody is held back until it has landed everywhere."""
        if self.journal.is_unresolved and rule.journal != "mends":
            assert self.journal.entry is not None
            raise HttpError(
                409,
                f"an update is unresolved: {self.journal.entry.verb}: {self.journal.entry.failure}. See the weights of "
                'all workers right, then POST /weight_update_journal/resolve {"acknowledge": true}',
                code="journal_unresolved", extra={"journal": self.journal.report()},
            )  # fmt: skip
        if verb == "update_weights_from_distributed":
            self._groups.check(str(values.get("group_name") or DEFAULT_GROUP), targets)
        known = self.journal.entry
        if known is None:
            await self._write_journal(_entry(verb, targets))
        is_settled = False
        try:
            results = await self._change(verb, rule, call, values, targets)
            await self._settle(verb, rule, results, known)
            is_settled = True
        finally:
            if not is_settled and self.journal.entry is not None and not self.journal.is_unresolved:
                self._keep_journal(f"{verb} was broken off")
        return results

    async def _settle(self, verb: str, rule: Rule, results: Sequence[Result], known: JournalEntry | None) -> None:
        """What the journal says after an update. known: its entry before it."""
        targets = [result.worker for result in results]
        if all(result.success for result in results):
            await self._read_versions(targets)
            are_alike = len({worker.weight_version for worker in targets}) == 1
            if rule.journal == "opens":
                await self._write_journal(_entry(verb, targets, session=True))
            elif known is None or rule.journal == "closes" or (rule.journal == "mends" and are_alike):
                await self._clear_journal()
            self._registry.check_versions(self._config.allow_mixed_versions)
            return
        if all(result.is_refusal for result in results) and await self._are_unchanged(targets):
            if known is None:  # nobody did anything
                await self._clear_journal()
            return
        if not self.journal.is_unresolved:
            failed = "; ".join(f"{r.worker.url}: {r.message or r.status}" for r in results if not r.success)
            self._keep_journal(f"{verb} failed: {failed}")

    async def _are_unchanged(self, workers: Sequence[Worker]) -> bool:
        """Whether every worker says that it has the version it had before the update."""
        assert self.journal.entry is not None
        before = {target.url: target.weight_version for target in self.journal.entry.targets}
        if not await self._read_versions(workers):
            return False
        return all(before.get(worker.url, worker.weight_version) == worker.weight_version for worker in workers)

    async def _read_versions(self, workers: Sequence[Worker]) -> bool:
        """Ask again; False where one did not answer."""
        answers = await asyncio.gather(*map(self._health.read_version, workers), return_exceptions=True)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, httpx.HTTPError):
                worker.suspect(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        return not any(isinstance(answer, BaseException) for answer in answers)

    async def _write_journal(self, entry: JournalEntry) -> None:
        try:
            await asyncio.to_thread(self.journal.write, entry)
        except JournalUnwritable as error:
            raise HttpError(503, f"no update without a journal: {error}", code="journal_unwritable") from error

    async def _clear_journal(self) -> None:
        try:
            await asyncio.to_thread(self.journal.clear)
        except JournalUnwritable as error:
            raise HttpError(503, str(error), code="journal_unwritable") from error
        for worker in self._registry:
            self._registry.unhold(worker, Hold.JOURNAL)

    def _keep_journal(self, failure: str) -> None:
        logger.error("a weight update is unresolved: %s", failure)
        self.journal.keep(failure)
        for worker in self._registry:
            self.apply_journal(worker)

    # -- small things -----------------------------------------------------------------------------------------------

    def _targets(self) -> list[Worker]:
        if not (live := self._registry.live()):
            raise HttpError(503, f"no live upstream workers: {why_none(self._registry)}", code="no_workers")
        return live

    async def _broadcast(
        self,
        targets: Sequence[Worker],
        call: Call,
        values: Mapping[str, object],
        bodies: Mapping[str, bytes] | None = None,
    ) -> list[Result]:
        # The workers keep the call's own deadline; ours is for those that do not answer at all.
        limit_s = max(_timeout_s(values) or 0.0, self._config.admin_timeout_s)
        return await broadcast(self._client, targets, call, limit_s, bodies)

    def _versions(self) -> dict[str, str | None]:
        return {worker.url: worker.weight_version for worker in self._registry.live()}

    def _busy(self) -> str:
        if self._running is None:
            return "another change is about to begin"
        verb, since = self._running
        return f"{verb} has been under way for {time.monotonic() - since:.1f} s"

    def _age(self) -> dict[str, object]:
        return {} if self._running is None else {"age_s": round(time.monotonic() - self._running[1], 3)}


def _timeout_s(values: Mapping[str, object]) -> float | None:
    """A call's own deadline, None where it has none that makes sense: the workers say so."""
    given = values.get("timeout_s")
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number and 0 < given <= MAX_TIMEOUT_S else None


def _entry(verb: str, targets: Sequence[Worker], session: bool = False) -> JournalEntry:
    records = tuple(TargetRecord(worker.url, worker.disabled, worker.weight_version) for worker in targets)
    return JournalEntry(verb, time.time(), records, session)


def _one_version(results: Sequence[Result]) -> tuple[int, dict[str, object]]:
    """As `summarise`; a 409 that lists them where the weight versions differ."""
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
