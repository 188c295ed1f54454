"""The journal's entries for the workers' weights: before an update, after it, and after a failed one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from ...http.edge.errors import HttpError
from ..config import RouterConfig
from ..fleet.health import HealthChecks
from ..fleet.served import ServedFile
from ..fleet.worker import Hold, Worker
from ..fleet.workers import WorkerRegistry
from ..wire import WorkerFailed
from .broadcast import Result
from .journal import JournalEntry, JournalUnwritable, TargetRecord, UpdateJournal
from .rules import RULES, Rule

logger = logging.getLogger(__name__)

_WHOLE = RULES["update_weights_from_disk"]
_AGAIN = "Send update_weights_from_disk again: where all workers have one digest then, it is resolved. Or: "


class Updates:
    """The journal's part of a change. The caller holds the lock of changes."""

    def __init__(
        self,
        registry: WorkerRegistry,
        health: HealthChecks,
        journal: UpdateJournal,
        served: ServedFile,
        config: RouterConfig,
    ) -> None:
        self._registry, self._health, self._config = registry, health, config
        self.journal, self._served = journal, served
        # By worker id: its life when the update began; None: it was left out since. Empty: it is another router's.
        self._began: dict[str, tuple[int, int] | None] = {}
        self.client: str | None = None  # the name of the client whose session is open; None: it has none
        self._is_over = False  # every worker has answered the unresolved update, so no part of it runs any more
        self._has_lost_session = False  # one ended with its workers, and its next call is to be told

    async def open(self, verb: str, rule: Rule, targets: Sequence[Worker]) -> JournalEntry | None:
        """Write the update to the journal, before any worker is held. Returns the entry before it. Raises HttpError 409
        if an update is unresolved, 503 where the journal cannot be written."""
        if self.journal.is_unresolved and rule.journal != "mends" and not self._settles(rule, targets):
            assert self.journal.entry is not None
            raise HttpError(
                409,
                f"an update is unresolved: {self.journal.entry.verb}: {self.journal.entry.failure}. "
                f"{_AGAIN if self._settles(_WHOLE, targets) else ''}First POST "
                '/weight_update_journal/resolve {"acknowledge": true, "enable": false}, which disables its workers; '
                "then update all weights, and enable the workers",
                code="journal_unresolved", extra={"journal": self.journal.report()},
            )  # fmt: skip
        known, entry = self.journal.entry, _entry(verb, targets)
        if known is None or (self.journal.is_unresolved and rule.journal != "mends"):
            await self._write(entry if known is None else known.and_of(entry.targets))
            self.begin_at(targets)
        if rule.journal != "mends":
            self._is_over = False  # until the workers have answered
        return known

    def begin_at(self, workers: Sequence[Worker]) -> None:
        """Note the processes that have the update from its beginning."""
        self._began = {worker.id: worker.life for worker in workers}

    def _settles(self, rule: Rule, targets: Sequence[Worker]) -> bool:
        """Return whether this call may settle the unresolved update: one that replaces all weights, while no part of
        the other can still arrive, at workers that report digests, by which all are compared afterwards."""
        return rule.is_whole and self._is_over and all(worker.guarantee is not None for worker in targets)

    def partakes(self, worker: Worker) -> bool:
        """Return whether a worker's process has the update in progress from its beginning. True without an update."""
        return not self._began or self._began.get(worker.id) == worker.life

    @property
    def is_lost(self) -> bool:
        """Whether the journal's entry is of an update that failed or was cut off, and each of its workers has been seen
        to be another process since, or was removed: none has a part of it, as where a new job has the same
        addresses."""
        entry = self.journal.entry
        if entry is None or entry.failure is None or not entry.targets:
            return False
        workers = {worker.url: worker for worker in self._registry}
        return all(self._has_gone(target, workers.get(target.url)) for target in entry.targets)

    def _has_gone(self, target: TargetRecord, worker: Worker | None) -> bool:
        if worker is None:
            return True
        if None not in (target.process, worker.process):
            return target.process != worker.process
        return worker.is_alive and not self.partakes(worker)  # it reports none, and came back after its death

    async def end_lost(self) -> None:
        """Clear the entry of an update that is lost with its processes. Raises HttpError 503."""
        if self.is_lost:
            assert self.journal.entry is not None
            is_session = self.journal.entry.session
            await self._end()
            self._has_lost_session = is_session

    async def _end(self) -> None:
        logger.error("the update ended with its workers, all of which have other processes now")
        await self._clear()

    async def partakers(self, verb: str, rule: Rule, workers: Sequence[Worker]) -> list[Worker]:
        """Choose the workers for a call of an update. A process that began in the middle of it has no part of it; only
        taking it back, or replacing all weights after a failed one, is asked of all. Where none is left, the update is
        over: a call that begins another one goes on with all, a further one of a session raises HttpError 409. A
        session that these let begin is of the others too, see `has_begun_anew`."""
        if self.journal.is_unresolved and self._settles(rule, workers):
            return list(workers)
        partaking = [worker for worker in workers if self.partakes(worker)]
        is_over = self._has_lost_session and self.journal.entry is None
        if self.is_lost or not partaking:
            await self._end()
            is_over = True
        self._has_lost_session = False
        if is_over and not (rule.is_whole or rule.journal in ("opens", "mends")):
            message = f"{verb}: every worker of the update ended in the middle of it, which is over: begin again"
            raise HttpError(409, message, code="update_lost")
        return list(workers) if is_over or rule.journal == "mends" else partaking

    async def has_begun_anew(self, rule: Rule, results: Sequence[Result], known: JournalEntry | None) -> bool:
        """Return whether a call that all its workers have done was no part of the session in progress, which has ended
        at them then: it has begun another session, or brought them other weights at once."""
        if known is None or known.failure is not None or not all(result.success for result in results):
            return False
        if rule.journal == "opens" or (known.session and all(_is_explicit(result) is False for result in results)):
            return True
        if not (rule.is_whole and known.session):
            return False
        targets = [result.worker for result in results]
        await self.read_versions(targets)
        return all(map(self.has_committed, targets))

    async def break_off(self, verb: str) -> None:
        """Mark the update as unresolved, because its result is not known."""
        if self.journal.entry is not None and not self.journal.is_unresolved:
            await self._keep(f"{verb} was broken off")

    def has_committed(self, worker: Worker) -> bool:
        """Return whether a worker's version, as last read, differs from the version before the unresolved update."""
        entry = self.journal.entry
        before = {target.url: target.weight_version for target in entry.targets} if entry is not None else {}
        return before.get(worker.url, worker.weight_version) != worker.weight_version

    async def settle(
        self, verb: str, rule: Rule, results: Sequence[Result], known: JournalEntry | None
    ) -> list[Result]:
        """Write, clear or keep the journal's entry by the results of an update. known: the entry before the update.
        Returns the results of workers that died in the middle of it, if all others have it: the update goes on, or has
        ended, without them. When they return, they get no requests unless they have the same weights. Raises HttpError
        502 where all have done it and have different weights."""
        lost = await self._lost(results)
        left = [result for result in results if result not in lost]
        targets = [result.worker for result in left]
        if rule.is_whole or not self.journal.is_unresolved:
            self._is_over = all(result.status is not None for result in left)
        if left and all(result.success for result in left):
            await self._refuse_torn_session(verb, left)
            await self.read_versions(targets)
            goes_on = rule.journal == "opens" or (known is not None and rule.journal == "writes" and not rule.is_whole)
            if not goes_on:
                await self._refuse_other_digests(verb, left)
            if goes_on or self._can_be_told_apart(targets):
                await self._succeed(verb, rule, targets, known)
                return lost
        elif await self._are_as_before(left):
            is_over = rule.ends_if_refused and all(result.is_refusal for result in left)
            if known is None or is_over:  # no worker did anything, or the session is over everywhere
                await self._clear()
            return []
        if not self.journal.is_unresolved:
            failed = [f"{r.worker.url}: {r.message or r.status}" for r in results if not r.success]
            failed += [] if failed else ["a worker died that may return with other weights under the same version"]
            await self._keep(f"{verb} failed: {'; '.join(failed)}")
        else:
            self._hold_all()  # also those that had no part of the update that failed first
        return []

    async def _succeed(self, verb: str, rule: Rule, targets: Sequence[Worker], known: JournalEntry | None) -> None:
        """Note that these workers, and of the update's workers no other one that is left, have made a step of it."""
        are_alike = len({worker.weight_version for worker in targets}) == 1
        if rule.journal == "opens":
            await self._write(_entry(verb, targets, session=True))
        elif (
            known is None
            or rule.journal == "closes"
            or (rule.journal == "mends" and are_alike)
            or (rule.is_whole and self.journal.is_unresolved and are_alike and None not in _digests(targets))
        ):
            await self._clear()
        if are_alike and self.journal.entry is None:
            self._registry.accept_update(targets, self._config.allow_mixed_versions)
            await self._served.written()  # before the trainer hears that the fleet has the new weights
        self._registry.check_versions(self._config.allow_mixed_versions)

    async def note_commits(self, workers: Sequence[Worker]) -> None:
        """Read the weights of workers that generate again, which commit what was written without a session then: before
        one of them is compared with another one as it was."""
        before = {worker.id: worker.weights for worker in workers}
        await self.read_versions(workers)
        have_changed = any(worker.weights != before[worker.id] for worker in workers)
        if have_changed and self.journal.entry is None and len(_digests(workers) - {None}) < 2:
            self._registry.accept_update(workers, self._config.allow_mixed_versions)
            await self._served.written()

    async def _refuse_other_digests(self, verb: str, results: Sequence[Result]) -> None:
        """Keep the entry of an update after which the workers' digests differ, as where one of them read an older file.
        Raises HttpError 502."""
        if self._config.allow_mixed_versions or len(_digests([result.worker for result in results]) - {None}) < 2:
            return
        named = "; ".join(f"{result.worker.url}: {result.worker.weight_digest}" for result in results)
        message = f"{verb} brought the workers different weights, by their digests: {named}"
        await self._refuse_done(message, "mixed_weights", results)

    async def _refuse_torn_session(self, verb: str, results: Sequence[Result]) -> None:
        """Keep the entry of an update that some workers did in an open session and others, which have given it up,
        outside of it. Raises HttpError 502."""
        within, outside = ([r.worker.url for r in results if _is_explicit(r) is said] for said in (True, False))
        if within and outside:
            message = f"{verb} is in the open session at {', '.join(within)}, which is given up at {', '.join(outside)}"
            await self._refuse_done(message, "torn_session", results)

    async def _refuse_done(self, message: str, code: str, results: Sequence[Result]) -> None:
        self._is_over = True
        await self._keep(message)
        extra = {"results": [result.report() for result in results], "retryable": True}
        raise HttpError(502, message, code=code, extra=extra)

    async def _lost(self, results: Sequence[Result]) -> list[Result]:
        """Return the failures of workers whose process ended in the middle of the update, or answered that it ends. A
        worker that did not answer is probed, since its process may have ended."""
        silent = [result.worker for result in results if result.status is None and result.worker.is_alive]
        await asyncio.gather(*map(self._health.check, silent))
        ending = [result.worker for result in results if result.is_ending]
        for worker in ending:
            if worker.is_alive:
                self._registry.mark_draining(worker)
            if worker.id in self._began:
                self._began[worker.id] = None
        return [r for r in results if not r.success and (r.worker in ending or not self.partakes(r.worker))]

    def _can_be_told_apart(self, left: Sequence[Worker]) -> bool:
        """Return whether the workers that the update has lost will be seen to have other weights than the rest, should
        they return with others: by their digest, or by a version that the update has changed."""
        now = {worker.weight_version for worker in left}
        lost = (worker for worker in self._registry if worker.id in self._began and not self.partakes(worker))
        return all(worker.guarantee is not None or worker.weight_version not in now for worker in lost)

    async def _are_as_before(self, results: Sequence[Result]) -> bool:
        """Read the versions. Returns whether every worker has answered that it did not run the update and that it has
        its version from before it, and the workers that died will be seen to have others if they do. A worker that
        named a version before must name it again."""
        workers = [result.worker for result in results]
        if not all(result.did_nothing for result in results):
            return False
        assert self.journal.entry is not None
        before = {target.url: target.weight_version for target in self.journal.entry.targets}
        read = await self.read_versions(workers)
        if not all(one.id in read and (before.get(one.url) is None or read[one.id] is not None) for one in workers):
            return False
        are_unchanged = all(before.get(one.url, one.weight_version) == one.weight_version for one in workers)
        return are_unchanged and self._can_be_told_apart(workers)

    async def read_versions(self, workers: Sequence[Worker]) -> dict[str, str | None]:
        """Read the workers' versions again. Returns those of the workers that answered by their ids, with None for one
        that reports none."""
        answers = await asyncio.gather(*map(self._health.read_version, workers), return_exceptions=True)
        read: dict[str, str | None] = {}
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, WorkerFailed):
                worker.suspect(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                read[worker.id] = answer
        return read

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
        self._began, self._is_over, self.client = {}, False, None
        for worker in self._registry:
            self._registry.unhold(worker, Hold.JOURNAL)

    async def _keep(self, failure: str) -> None:
        """Keep the entry of an update that some workers may not have, until an operator resolves it."""
        logger.error("a weight update is unresolved: %s", failure)
        # The workers are held before the disk is waited for, because requests go on meanwhile.
        self.journal.fail(failure)
        self._hold_all()
        await asyncio.shield(asyncio.to_thread(self.journal.save))

    async def resolve(self, force: bool = False) -> tuple[JournalEntry | None, dict[str, str | None]]:
        """Clear the entry for an operator. Returns the cleared entry, and the present versions by URL. force: also of
        an update in progress. Raises HttpError 409 for one without it, 503."""
        entry = self.journal.entry
        if entry is not None and self.journal.is_open and not force:
            raise HttpError(
                409,
                f"nothing is unresolved: {entry.verb} of {entry.age_s:.0f} s ago is in progress. POST "
                '/abort_weight_update takes it back; {"force": true} forgets it, whatever the workers have of it',
                code="update_in_progress", extra={"journal": self.journal.report()},
            )  # fmt: skip
        if entry is not None:
            await self._clear()
            await self.read_versions(self._registry.live())
        return entry, {worker.url: worker.weight_version for worker in self._registry.live()}

    def _hold_all(self) -> None:
        for worker in self._registry:
            self.hold_back(worker)

    def hold_back(self, worker: Worker) -> None:
        """Hold a worker back if an unresolved update concerns it."""
        entry = self.journal.entry
        if entry is not None and entry.failure is not None and entry.concerns(worker.url):
            self._registry.hold(worker, Hold.JOURNAL, f"{entry.verb} is unresolved: {entry.failure}")


def _entry(verb: str, targets: Sequence[Worker], session: bool = False) -> JournalEntry:
    records = tuple(
        TargetRecord(worker.url, worker.disabled, worker.weight_version, worker.process) for worker in targets
    )
    return JournalEntry(verb, time.time(), records, session)


def _is_explicit(result: Result) -> bool | None:
    """Return whether an update was written in a session that its client has begun, as Lockstep's workers report; None:
    it is not reported."""
    report = result.body.get("report") if isinstance(result.body, dict) else None
    explicit = report.get("explicit") if isinstance(report, dict) else None
    return explicit if isinstance(explicit, bool) else None


def _digests(workers: Sequence[Worker]) -> set[str | None]:
    return {worker.weight_digest for worker in workers}
