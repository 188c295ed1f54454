"""Sources that a user adds: their failure ends no step."""

from __future__ import annotations

import logging

from ..sequences.request import Request
from .proposer import NO_PROPOSAL, Proposal, Proposer

logger = logging.getLogger(__name__)


class AddedSource:
    """A source around a user's proposer. After an error, or a proposal that is none, it proposes nothing more."""

    def __init__(self, proposer: Proposer) -> None:
        """Check the proposer's name. Raises ValueError for one that is no name."""
        self._proposer = proposer
        self.name: str = proposer.name
        if not isinstance(self.name, str) or not self.name.isprintable() or not self.name.strip():
            raise ValueError(f"the name of a source of drafts must be a printable text, not {self.name!r}")
        self.failure: str | None = None  # why it is not asked any more

    def propose(self, request: Request, most: int) -> Proposal:
        """See `Proposer.propose`."""
        if self.failure is not None:
            return NO_PROPOSAL
        try:
            token_ids, confidence = self._proposer.propose(request, most)
            token_ids = tuple(token_ids)
        except Exception as error:  # noqa: BLE001 - a user's code: its error must not end requests that need no draft
            return self._fail(f"propose raised {type(error).__name__}: {error}")
        if type(confidence) is not int:
            return self._fail(f"the confidence must be an integer, not {confidence!r}")
        return Proposal(token_ids, confidence)

    def on_tokens(self, request: Request, num_cut: int) -> None:
        """See `Proposer.on_tokens`."""
        if self.failure is None:
            try:
                self._proposer.on_tokens(request, num_cut)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(f"on_tokens raised {type(error).__name__}: {error}")

    def on_end(self, request: Request) -> None:
        """See `Proposer.on_end`."""
        if self.failure is None:
            try:
                self._proposer.on_end(request)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(f"on_end raised {type(error).__name__}: {error}")

    def _fail(self, why: str) -> Proposal:
        self.failure = why
        logger.error("the source of drafts %r is asked no more, the engine goes on: %s", self.name, why)
        return NO_PROPOSAL
