"""The interface of a source of drafts, and the proposals that it makes.

A draft is accepted where it is the token that would have been drawn, so a proposer can be wrong, slow to learn or
random: it changes how many steps an output takes, and no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..sequences.request import Request
from ..sequences.step import Confidence


class Proposal(NamedTuple):
    """Tokens that may come next in a sequence, the first of which follows its last known token."""

    token_ids: Sequence[int]
    confidence: Confidence = 0  # the class of the proposal, or the vote for each token


NO_PROPOSAL = Proposal(())


class Proposer(Protocol):
    """The interface of a source of drafts. The loop's thread calls it, between steps, with live requests."""

    @property
    def name(self) -> str:
        """The name of the source in settings, metrics and reports."""
        ...

    def propose(self, request: Request, most: int) -> Proposal:
        """Return at most `most` tokens, or NO_PROPOSAL. `request.sequence` has all tokens so far.

        Tokens beyond `most`, and those from the first one on that is no id of the vocabulary, are refused: they get no
        row, and the source's `num_refused` counts them. A source that `engine.drafts.add_source` added is asked no more
        after an error. An error of any other ends the step as a failed forward does: its sequences wait again, and the
        caller of the step gets it.
        """
        ...

    def on_tokens(self, request: Request, num_cut: int) -> None:
        """Hear that a jump has replaced the last `num_cut` tokens of the request's output by others.

        Tokens that only follow are not told: `request.sequence` has them at the next proposal.
        """
        ...

    def on_end(self, request: Request) -> None:
        """Hear that the request has ended, with its final tokens. Called once, for every request."""
        ...
