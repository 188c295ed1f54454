"""Comparisons of the workers' weights with each other, and with those that the fleet served. They change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .served import Served, Weights
from .worker import Health, Hold, Worker

_REMEDIES = "update the weights, or enable the worker to accept its own"


@dataclass(frozen=True)
class Comparison:
    """The live workers, and the weights that they serve or served last."""

    live: Sequence[Worker]
    served: Served
    file: Path | None = None  # from which a restarted router reads `served`

    def agreed(self, without: Worker | None = None) -> list[Weights]:
        """List the weights of the live workers that are not held for theirs. A digest that is not known for a moment,
        as after a call that failed, is that of the weights served."""
        return [
            self._served_now(worker) or worker.weights for worker in self.live
            if worker is not without and Hold.VERSION not in worker.holds and worker.weights is not None
        ]  # fmt: skip

    def why_other(self, worker: Worker) -> str | None:
        """Return the reason to hold a worker for its weights; None: there is none."""
        its, served = worker.weights, self.served
        if its is None:
            return None
        if self.waits_for_digest(worker):
            return self._why_it_waits(its)
        if rest := self.agreed(without=worker):
            return self._why_not_as(rest, worker, its)
        if self._is_undecided(its.version):
            listed = ", ".join(sorted(str(one.weights) for one in self.live if one.weight_version == its.version))
            return (
                f"it has weight version {its}, workers of this version have different weights ({listed}), and which "
                "are right is not known: update the weights, or enable the worker if it has the right ones"
            )
        if served.weights is None:
            return None
        if worker.process is not None and worker.process == served.processes.get(worker.url):
            return None  # it served them: where it has others, a trainer has updated it since
        if not its.are_other(served.weights):
            return _why_unnamed(worker, [served.weights])
        # None serves. Workers that a trainer has updated directly since they returned serve when all have the same.
        is_updated = worker.weights_at_return is not None and its.are_other(worker.weights_at_return)
        if is_updated and not any(one.weights is None or its.are_other(one.weights) for one in self.live):
            return None
        again = f"; to forget {self.file}, start the router with --forget-served" if self.file is not None else ""
        return f"it has weight version {its}, and the fleet last served {served.weights}: {_REMEDIES}{again}"

    def waits_for_digest(self, worker: Worker) -> bool:
        """Return whether a worker may have other weights than an update has brought under the same version: the update
        was not at its process, and the digest that would tell is not known yet."""
        is_like = self.served.weights is not None and worker.weight_version == self.served.weights.version
        reports = worker.guarantee is not None or worker.weight_digest is not None
        return self.served.digest_is_due and is_like and reports and not self.served.is_by(worker.url, worker.process)

    def serves_other(self, worker: Worker) -> bool:
        """Return whether another worker serves other weights than this one has, or may have served others."""
        its, rest = worker.weights, self.agreed(without=worker)
        is_other = its is None or any(its.are_other(one) for one in rest)
        return is_other or (self.waits_for_digest(worker) and self._has_updated())

    def strays(self) -> list[Worker]:
        """List the workers to hold because workers of one version serve with different digests: those that have not the
        digest served, or all where none has it, since it is not known then which weights are right."""
        serving = [worker for worker in self.live if Hold.VERSION not in worker.holds and not worker.is_draining]
        strays = []
        for version in {worker.weight_version for worker in serving}:
            alike = [worker for worker in serving if worker.weight_version == version]
            if version is not None and len(_digests(alike)) > 1:
                right = self._right_digest(version)
                is_known = right in _digests(alike)
                strays += [one for one in alike if not (is_known and one.weight_digest in (right, None))]
        return strays

    def awaits_update(self, worker: Worker) -> bool:
        """Return whether a worker is well, and held for its weights alone, which no probe will find to be right."""
        its, served = worker.weights, self.served.weights
        if worker.health is not Health.ALIVE or worker.holds.keys() != {Hold.VERSION} or its is None or served is None:
            return False
        never_named = self.waits_for_digest(worker) and not self._has_updated()
        return its.are_other(served) or self._is_undecided(its.version) or never_named

    def _why_not_as(self, rest: Sequence[Weights], worker: Worker, its: Weights) -> str | None:
        """Return the reason to hold a worker beside the rest: none has its version, or one has it with other
        weights."""
        alike = [one for one in rest if one.version == its.version]
        if not alike or any(its.are_other(one) for one in alike):
            return f"it has weight version {its}, the others {', '.join(sorted(set(map(str, rest))))}"
        return _why_unnamed(worker, alike)

    def _why_it_waits(self, its: Weights) -> str:
        if self._has_updated():
            return (
                f"an update brought weight version {self.served.weights} to the others, and its digest is not known "
                f"yet, to compare it with {its}"
            )
        return (
            f"it has weight version {its}, and an update brought {self.served.weights} to workers that ended before "
            f"their digest was known: {_REMEDIES}"
        )

    def _has_updated(self) -> bool:
        """Return whether a process that has the weights served is alive."""
        return any(self.served.is_by(worker.url, worker.process) for worker in self.live)

    def _is_undecided(self, version: str) -> bool:
        """Return whether live workers of one version have different digests, of which none is the one served."""
        digests = _digests([one for one in self.live if one.weight_version == version and not one.is_draining])
        return len(digests) > 1 and self._right_digest(version) not in digests

    def _right_digest(self, version: str) -> str | None:
        served = self.served.weights
        return served.digest if served is not None and served.version == version else None

    def _served_now(self, worker: Worker) -> Weights | None:
        """Return the weights served, where a worker has their version and reports no digest at this moment."""
        is_unnamed = worker.guarantee is not None and worker.weight_digest is None
        is_like = self.served.weights is not None and self.served.weights.version == worker.weight_version
        return self.served.weights if is_unnamed and is_like else None


def served_by(workers: Sequence[Worker], before: Served, is_update: bool = False) -> Served | None:
    """Return what workers serve, if all have one version. before: what was served until now. Their digest counts when
    all that report one have it. Until then it is the digest before, or not known after an update."""
    named = [worker for worker in workers if worker.weight_version is not None]
    versions = {worker.weight_version for worker in named}
    if len(versions) != 1:
        return None
    [version] = versions
    assert version is not None
    digests, processes = _digests(named), {worker.url: worker.process for worker in named}
    are_unnamed = any(worker.guarantee is not None and worker.weight_digest is None for worker in named)
    if digests and not are_unnamed:
        return Served(Weights(version, digests.pop() if len(digests) == 1 else None), processes)
    if is_update:
        return Served(Weights(version), processes, digest_is_due=are_unnamed)
    if before.weights is None or before.weights.version != version:
        return Served(Weights(version), processes)
    if before.digest_is_due:
        processes = {**before.processes, **processes}
    return Served(before.weights, processes, before.digest_is_due)


def _digests(workers: Sequence[Worker]) -> set[str]:
    return {worker.weight_digest for worker in workers if worker.weight_digest is not None}


def _why_unnamed(worker: Worker, like: Sequence[Weights]) -> str | None:
    """Return the reason to wait for the digest of a worker that will report one: equal versions are not enough."""
    if worker.guarantee is None or worker.weight_digest is not None or any(one.digest is None for one in like):
        return None
    return f"the digest of its weights {worker.weights} is not known yet, to compare it with {like[0]}"
