"""The journal's entries for the workers' weights: before an update, after it, and after a failed one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ...http.edge.errors import HttpError
from ..config import RouterConfig
from ..fleet.health import HealthChecks
from ..fleet.workers import Hold, Worker, WorkerRegistry
from ..wire import WorkerFailed
from .broadcast import Result
from .journal import JournalEntry, JournalUnwritable, TargetRecord, UpdateJournal
from .rules import Rule

logger = logging.getLogger(__name__)


class Updates:
    """The journal's part of a change. The caller holds the lock of changes."""

    def __init__(
        self, registry: WorkerRegistry, health: HealthChecks, journal: UpdateJournal, config: RouterConfig
    ) -> None:
        self._registry, self._health, self._config = registry, health, config
        self.journal = journal

    async def open(self, verb: str, rule: Rule, targets: Sequence[Worker]) -> JournalEntry | None:
        """Write the update to the journal, before any worker is held. Returns the entry before it. Raises HttpError 409
        if an update is unresolved, 503 where the journal cannot be written."""
        if self.journal.is_unresolved and rule.journal != "mends":
            assert self.journal.entry is not None
            raise HttpError(
                409,
                f"an update is unresolved: {self.journal.entry.verb}: {self.journal.entry.failure}. First POST "
                '/weight_update_journal/resolve {"acknowledge": true, "enable": false}, which disables its workers; '
                "then update all weights, and enable the workers",
                code="journal_unresolved", extra={"journal": self.journal.report()},
            )  # fmt: skip
        known = self.journal.entry
        if known is None:
            await self._write(_entry(verb, targets))
        return known

    async def break_off(self, verb: str) -> None:
        """Mark the update as unresolved, because its result is not known."""
        if self.journal.entry is not None and not self.journal.is_unresolved:
            await self._keep(f"{verb} was broken off")

    def has_committed(self, worker: Worker) -> bool:
        """Return whether a worker's version, as last read, differs from the version before the unresolved update."""
        entry = self.journal.entry
        before = {target.url: target.weight_version for target in entry.targets} if entry is not None else {}
        return before.get(worker.url, worker.weight_version) != worker.weight_version

    async def settle(self, verb: str, rule: Rule, results: Sequence[Result], known: JournalEntry | None) -> None:
        """Write, clear or keep the journal's entry by the results of an update. known: the entry before the update."""
        targets = [result.worker for result in results]
        if all(result.success for result in results):
            await self.read_versions(targets)
            are_alike = len({worker.weight_version for worker in targets}) == 1
            if rule.journal == "opens":
                await self._write(_entry(verb, targets, session=True))
            elif known is None or rule.journal == "closes" or (rule.journal == "mends" and are_alike):
                await self._clear()
            if are_alike and self.journal.entry is None:
                self._registry.accept(targets[0].weight_version)
            self._registry.check_versions(self._config.allow_mixed_versions)
            return
        if all(result.is_refusal for result in results) and await self._are_unchanged(targets):
            if known is None or rule.ends_if_refused:  # no worker did anything, or the session is over everywhere
                await self._clear()
            return
        if not self.journal.is_unresolved:
            failed = "; ".join(f"{r.worker.url}: {r.message or r.status}" for r in results if not r.success)
            await self._keep(f"{verb} failed: {failed}")

    async def _are_unchanged(self, workers: Sequence[Worker]) -> bool:
        """Read the versions. Returns whether every worker answered that it has its version from before the update."""
        assert self.journal.entry is not None
        before = {target.url: target.weight_version for target in self.journal.entry.targets}
        if not await self.read_versions(workers):
            return False
        return all(before.get(worker.url, worker.weight_version) == worker.weight_version for worker in workers)

    async def read_versions(self, workers: Sequence[Worker]) -> bool:
        """Read the workers' versions again. Returns False where a worker did not answer."""
        answers = await asyncio.gather(*map(self._health.read_version, workers), return_exceptions=True)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, WorkerFailed):
                worker.suspect(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        return not any(isinstance(answer, BaseException) for answer in answers)

    async def _write(self, entry: JournalEntry) -> None:
        try:
            await asyncio.to_thread(self.journal.write, entry)
        except JournalUnwritable as error:
            raise HttpError(503, f"no update without a journal: {error}", code="journal_unwritable") from error

    async def _clear(self) -> None:
        try:
            await asyncio.to_thread(self.journal.clear)
        except JournalUnwritable as error:
            raise HttpError(503, str(error), code="journal_unwritable") from error
        for worker in self._registry:
            self._registry.unhold(worker, Hold.JOURNAL)

    async def _keep(self, failure: str) -> None:
        """Keep the entry of an update that some workers may not have, until an operator resolves it."""
        logger.error("a weight update is unresolved: %s", failure)
        # The workers are held before the disk is waited for, because requests go on meanwhile.
        self.journal.fail(failure)
        for worker in self._registry:
            self.hold_back(worker)
        await asyncio.shield(asyncio.to_thread(self.journal.save))

    async def resolve(self) -> tuple[JournalEntry | None, dict[str, str | None]]:
        """Clear the entry for an operator. Returns the cleared entry, and the present versions by URL. Raises HttpError
        503."""
        entry = self.journal.entry
        if entry is not None:
            await self._clear()
            await self.read_versions(self._registry.live())
        return entry, {worker.url: worker.weight_version for worker in self._registry.live()}

    def hold_back(self, worker: Worker) -> None:
        """Hold a worker back if an unresolved update concerns it."""
        entry = self.journal.entry
        if entry is not None and entry.failure is not None and entry.concerns(worker.url):
            self._registry.hold(worker, Hold.JOURNAL, f"{entry.verb} is unresolved: {entry.failure}")


def _entry(verb: str, targets: Sequence[Worker], session: bool = False) -> JournalEntry:
    records = tuple(TargetRecord(worker.url, worker.disabled, worker.weight_version) for worker in targets)
    return JournalEntry(verb, time.time(), records, session)
