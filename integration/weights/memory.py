"""The memory verbs of a service: an engine's KV pool and weights are freed for others to use, and allocated again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...rollout.engine import Engine
from ...rollout.errors import LockstepError
from ...rollout.model.adapters.folder import AdapterFolder
from ...weight_sync.errors import DigestMismatch, SessionError, WeightSyncError
from ..service_config import ServiceConfig, known_tags
from .all_ranks import Replica, on_all_ranks
from .sessions import WeightSessions
from .verbs import WeightVerbs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryReport:
    """The size of the memory behind one tag, before and after a change."""

    bytes_before: int
    bytes_after: int


class MemoryVerbs(WeightVerbs):
    """The methods of a service that free and allocate memory. The subclass sets the fields."""

    engine: Engine
    config: ServiceConfig
    sessions: WeightSessions
    replica: Replica
    _adapter: tuple[str, str] | None  # name and folder of the one that is loaded

    @on_all_ranks
    def release_memory_occupation(self, tags: Iterable[str] | None = None) -> dict[str, MemoryReport]:
        """Free the memory behind each tag, all tags by default. Memory that is free already, or the trainer's, is left
        as it is.

        Raises ValueError for an unknown tag, NotIdle while sequences hold blocks, and SessionError for weights that an
        open session writes; then nothing was released. Bytes are those of all ranks.
        """
        free = {"kv_cache": self.engine.weights.release_kv, "weights": self.sessions.release_weights}
        if not self.replica.is_alone:  # only the controller knows the running sequences
            self.replica.require_idle("release_memory_occupation")
        known = known_tags(tags)
        if "weights" in known and self.engine.model.owned and self.sessions.state()["state"] == "open":
            raise SessionError("release_memory_occupation: a weight-update session is open: end it or give it up first")
        # The pool first: running sequences are noticed before the weights are released.
        return self._memory_reports(known, free)

    def resume_memory_occupation(self, tags: Iterable[str] | None = None) -> dict[str, MemoryReport]:
        """Allocate released memory again. Memory that was not released is left as it is.

        Weights have undefined values afterwards: nothing is sampled before an update has written all of them. Resuming
        the KV pool, with the weights or after them, commits an implicit weight-update session. Where there is none,
        weights that came from a folder are read from it again, under their version (`ServiceConfig.reload_on_resume`),
        and an adapter that was loaded from one.
        """
        known = known_tags(tags)
        reports = self.allocate_memory(known)
        if "kv_cache" in known and self.engine.model.holds_weights and self.sessions.loss is not None:
            if self.config.reload_on_resume and (lost := self.sessions.released) is not None:
                self._reload(lost.folder, lost.version, lost.digest)
            if (loss := self.sessions.loss) is not None:
                logger.warning("all memory is allocated again, but %s", loss)
        return reports

    @on_all_ranks
    def allocate_memory(self, tags: Sequence[str]) -> dict[str, MemoryReport]:
        """Allocate released memory again, weights with undefined values."""

        def resume_kv() -> None:
            self.sessions.commit_implicit()
            self.engine.weights.resume_kv()

        return self._memory_reports(tags, {"kv_cache": resume_kv, "weights": self.sessions.resume_weights})

    def _reload(self, folder: str, version: str, digest: str | None) -> None:
        """Read the weights from their folder again. Where it does not hold them any more they stay undefined, and a
        warning says why."""
        self.begin_weight_update(weight_version=version)
        try:
            self.update_weights_from_disk(folder)
            if self._adapter is not None:
                resident = (name for name, _ in self.engine.weights.resident_tensors())
                self.update_weights_from_named_tensors(AdapterFolder.read(self._adapter[1]).by_names_of(resident))
            if digest is not None and self.model_digest() != digest:
                raise DigestMismatch([folder], "it has other weights than those that were released")
            self.end_weight_update()
        except (OSError, ValueError, LockstepError, WeightSyncError) as error:
            self.abort_weight_update("its folder could not be read again")
            logger.warning("the weights of version %s could not be read from %s again: %s", version, folder, error)
        else:
            self.release_weight_undo()

    def _memory_reports(
        self, tags: Sequence[str], change: Mapping[str, Callable[[], object]]
    ) -> dict[str, MemoryReport]:
        """Run the change of each tag on this rank. Returns the bytes of all ranks before and after."""
        own = {}
        for tag in tags:
            before = self._bytes(tag)
            if tag in change:
                self.replica.peers.together(f"memory of {tag}", change[tag])
            own[tag] = (before, self._bytes(tag))
        ranks = self.replica.gather(own)
        return {tag: MemoryReport(*(sum(r[tag][i] for r in ranks) for i in (0, 1))) for tag in tags}

    def _bytes(self, tag: str) -> int:
        if tag == "kv_cache":
            return self.engine.kv_bytes
        return self.engine.model.weight_bytes if tag == "weights" else 0
