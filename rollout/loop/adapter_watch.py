"""Notice adapters that were switched, merged or scaled between two steps: KV and digest are then of other weights.

Such a change is no commit: no bytes were written, and PEFT does not report it. So each step looks at the state first.
"""

from __future__ import annotations

import logging

from ..model.adapters.layers import State
from .code_watch import drop_kv
from .loop import Loop
from .parts import Parts

logger = logging.getLogger(__name__)


class AdapterWatch:
    """The state of a module's adapters at the last step. The caller holds the engine's lock."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self._parts, self._loop = parts, loop
        self._state: State = parts.model.adapters.state()
        self._digests: dict[State, str] = {}  # of the committed weights, by the states in which they were computed

    def has_merged(self) -> bool:
        """Return whether adapters were merged, or separated again, since the last look: that writes weights."""
        adapters = self._parts.model.adapters
        return bool(adapters) and _are_merged_otherwise(self._state, adapters.state())

    def look(self) -> bool:
        """Start a KV epoch if the adapters' state has changed; returns whether it has. Running sequences compute their
        KV again.

        The weight version stays, since it is the caller's label. The digest is that of the committed weights in this
        state, or None where it was not computed.
        """
        adapters = self._parts.model.adapters
        if not adapters or (state := adapters.state()) == self._state:
            return False
        logger.info("the adapters were switched: their KV starts anew")
        drop_kv(self._parts, self._loop)
        self._forget_records()
        if _are_merged_otherwise(self._state, state):
            self._digests.clear()  # merged weights are other bytes, and separated ones may be rounded
        self._state = state
        self._parts.sequences.weight_digest = self._digests.get(state)
        return True

    def committed(self, digest: str | None) -> None:
        """Take the present state as that of a commit, which has its KV epoch."""
        state = self._parts.model.adapters.state()
        if state != self._state:
            self._forget_records()
        self._state, self._digests = state, {}
        self.digested(digest)

    def digested(self, digest: str | None) -> None:
        """Keep the digest of the committed weights in the present state; None: it is not known, in any state."""
        if digest is None:
            self._digests.clear()
        else:
            self._digests[self._parts.model.adapters.state()] = digest

    def _forget_records(self) -> None:
        # A recorded decode step replays the layers that were active when it was recorded.
        self._parts.runner.release_memory()


def _are_merged_otherwise(before: State, now: State) -> bool:
    return any(old[2] != new[2] for old, new in zip(before, now, strict=True))
