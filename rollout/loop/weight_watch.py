"""Weights that were written without a commit: found by torch's version counters when a phase begins."""

from __future__ import annotations

import logging

from .loop import Loop
from .parts import Parts

logger = logging.getLogger(__name__)

_MOST_NAMES = 3  # of a warning


class WeightWatch:
    """Watch the parameters of the hosted module between its phases. The caller holds the engine's lock."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self._parts, self._loop = parts, loop
        self._phase = 0  # number of the phase that was looked at
        self._seen: dict[str, tuple[int, int]] | None = None  # identity and version counter of each parameter

    def accept(self) -> None:
        """Take the weights as they are: they were committed, or put back as they were."""
        self._seen = None if self._seen is None else self._counters()

    def look(self) -> bool:
        """Compare once in a phase, from the first one with steps on."""
        if self._parts.model.phase.num_begun == self._phase:
            return False
        self._phase = self._parts.model.phase.num_begun
        self._seen = self._counters() if self._seen is None else self._seen
        return self.compare()

    def compare(self) -> bool:
        """Start a KV epoch if a parameter was written since the last commit; returns whether one was. Running sequences
        compute their KV again.

        The weight version stays, since it is the caller's label, but without a digest. Writes that torch does not
        count, such as those to `parameter.data`, are not found.
        """
        before = self._seen
        if before is None:
            return False
        self._seen = now = self._counters()
        written = sorted(name for name, count in now.items() if before.get(name) != count)
        if not written:
            return False
        sequences = self._parts.sequences
        more = f" and {len(written) - _MOST_NAMES} more" if len(written) > _MOST_NAMES else ""
        logger.warning(
            "weights were written since version %r was committed (%s%s): cached KV is dropped, and tokens have no "
            "weight digest until the next commit. Commit each change: service.optimizer_step() and "
            "service.commit_in_place(), or engine.weights.commit_weights()",
            *(sequences.weight_version, ", ".join(written[:_MOST_NAMES]), more),
        )  # fmt: skip
        self._loop.drain()
        for request in reversed(self._parts.scheduler.running()):
            self._loop.retract(request)
        self._parts.ledger.start_epoch()
        self._parts.scheduler.forget_under_way()
        sequences.weight_digest = None
        return True

    def _counters(self) -> dict[str, tuple[int, int]]:
        parameters = self._parts.model.module.named_parameters()
        return {name: (id(p), 0 if p.is_inference() else p._version) for name, p in parameters}
