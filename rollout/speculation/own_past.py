"""Drafts from the sequence's own tokens: what followed the newest earlier place that ends like it."""

from __future__ import annotations

from ..sequences.request import Request
from .proposer import Proposal
from .token_history import LENGTHS, TokenHistory, vote


class OwnPast:
    """A source that knows the prompt and the output of each sequence."""

    name = "past"

    def __init__(self) -> None:
        self._histories: dict[Request, TokenHistory] = {}

    def history(self, request: Request) -> TokenHistory:
        """Return the tokens of a live request, prompt and output."""
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = TokenHistory()
        sequence = request.sequence
        if len(history) < sequence.num_tokens:
            history.extend(sequence.token_ids[len(history) : sequence.jump_start])  # a jump may yet be undone
        return history

    def propose(self, request: Request, most: int) -> Proposal:
        history = self.history(request)
        return vote((history,), history.last(LENGTHS[0]), most)

    def on_tokens(self, request: Request, num_cut: int) -> None:
        if num_cut and (history := self._histories.get(request)) is not None:
            history.cut(max(len(history) - num_cut, 0))  # it may lag behind the output

    def on_end(self, request: Request) -> None:
        self._histories.pop(request, None)
