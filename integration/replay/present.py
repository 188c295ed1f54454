"""The weights that an engine has now, as the only ones that a replay may use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ...rollout.engine import Engine


class HasWeights(Protocol):
    """A service, as far as the weights of its engine are read."""

    engine: Engine

    def present_digest(self) -> str:
        """Compute the digest of the weights as they are now, and set it where they had none."""
        ...


class PresentWeights:
    """The present weights of a service. Their digest is computed from the bytes, not taken from the last commit."""

    def __init__(self, service: HasWeights) -> None:
        """Compute the digest. An engine whose weights had none has it afterwards; raises ValueError where the weights
        are not those that were committed, SessionError where they are being written."""
        self._digest = service.present_digest()
        committed = service.engine.weight_digest
        if committed is not None and committed != self._digest:
            raise ValueError(
                f"the weights have digest {self._digest}, but {committed} was committed: they were written since"
            )

    @property
    def digest(self) -> str:
        """The digest of the present weights."""
        return self._digest

    def has(self, digest: str) -> bool:
        """See `WeightSource.has`."""
        return digest == self._digest

    def versions(self, digest: str) -> Collection[str]:
        """See `WeightSource.versions`. The same weights may have had other versions: none is known."""
        return ()

    def hint(self, digest: str) -> str:
        """See `WeightSource.hint`."""
        return f"; the engine's are {self._digest}"

    def switch(self, digest: str) -> None:
        """See `WeightSource.switch`: there is nothing to do."""
