"""Weights that were written without a commit: found when a phase begins, by torch's version counters and by samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from ..model.given_module import listed
from .code_watch import drop_kv
from .loop import Loop
from .parts import Parts
from .weight_samples import weight_samples

logger = logging.getLogger(__name__)

_Mark = tuple[int, int, int, bytes]  # identity, version counter and address of a tensor, and a sample of it


class WeightWatch:
    """Watch the parameters of the hosted module between its phases. The caller holds the engine's lock."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self._parts, self._loop = parts, loop
        self._phase = 0  # number of the phase that was looked at
        self._seen: dict[str, _Mark] | None = None
        # Whether weights of these names have the bytes of the committed digest; called under the engine's lock.
        self.have_digest: Callable[[Sequence[str]], bool] = lambda names: False

    def accept(self) -> None:
        """Take the weights as they are: they were committed, or put back as they were."""
        self._seen = None if self._seen is None else self._marks()

    def committed(self) -> None:
        """Take the weights as they are, whose digest tokens are going to bear: also before the first phase."""
        self._seen = self._marks()

    def digested(self) -> None:
        """Note that the weights have got a digest, which was computed after their commit."""
        if self._seen is None:
            self.committed()

    def look(self) -> bool:
        """Compare once in a phase, from the first one with steps on."""
        if self._parts.model.phase.num_begun == self._phase:
            return False
        self._phase = self._parts.model.phase.num_begun
        self._seen = self._marks() if self._seen is None else self._seen
        return self.compare()

    def changed(self, but: Collection[str] = ()) -> list[str]:
        """Return the names of tensors that were written or moved since the last commit or look, but these."""
        return [] if self._seen is None else self._changed(self._seen, self._marks(), but)

    @staticmethod
    def _changed(before: Mapping[str, _Mark], now: Mapping[str, _Mark], but: Collection[str]) -> list[str]:
        return sorted(name for name, mark in now.items() if before.get(name) != mark and name not in but)

    def compare(self, but: Collection[str] = ()) -> bool:
        """Start a KV epoch if a parameter was written since the last commit; returns whether one was. Running sequences
        compute their KV again. Those of the names `but` are taken as they are.

        The weight version stays, since it is the caller's label, but without a digest. Writes that torch does not
        count, such as `parameter.data.copy_(tensor)` or a kernel's, are found where they change an element of the
        samples. Where counters or addresses alone are others, as after an offload, `have_digest` decides.
        """
        before = self._seen
        if before is None:
            return False
        now = self._marks()
        changed = self._changed(before, now, but)
        if not changed:
            self._seen = now
            return False
        has_same_samples = now.keys() == before.keys() and all(now[name][-1] == before[name][-1] for name in changed)
        if has_same_samples and self.have_digest(changed):
            logger.info("%s: moved or written since the last commit, and of the same digest", listed(changed))
            self._seen = now
            return False
        sequences = self._parts.sequences
        logger.warning(
            "weights were written or moved since version %r was committed (%s): cached KV is dropped, and tokens "
            "have no weight digest until the next commit. Commit each change: service.optimizer_step() and "
            "service.commit_in_place(), or engine.weights.commit_weights()",
            *(sequences.weight_version, listed(changed)),
        )  # fmt: skip
        drop_kv(self._parts, self._loop)
        sequences.weight_digest = None
        self._seen = now  # last: an interrupt before this leaves the change to be found again
        return True

    def _marks(self) -> dict[str, _Mark]:
        """Mark the parameters, and the buffers that checkpoints hold: others are computed from the configuration."""
        tensors = list(self._parts.model.stored_tensors())
        samples = weight_samples(tensors)
        return {
            name: (id(tensor), 0 if tensor.is_inference() else tensor._version, tensor.data_ptr(), samples[name])
            for name, tensor in tensors
        }
