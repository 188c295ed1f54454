"""Drafts from the caller: `draft_token_ids`, an output that the request may repeat."""

from __future__ import annotations

from ..sequences.request import Request
from .proposer import NO_PROPOSAL, Proposal
from .token_history import LENGTHS, TokenHistory, vote


class CallersDraft:
    """A source that follows the given output while the output does, and finds its place in it again afterwards."""

    name = "caller"

    def __init__(self) -> None:
        self._num_equal: dict[Request, int] = {}  # first tokens of the output that are the given ones
        self._given: dict[Request, TokenHistory] = {}  # of outputs that have left theirs

    def propose(self, request: Request, most: int) -> Proposal:
        given, sequence = request.earlier or request.options.draft_token_ids, request.sequence
        if not given:
            return NO_PROPOSAL
        first, num = sequence.num_prompt_tokens, sequence.num_output_tokens
        equal = self._num_equal.get(request, 0)
        while equal < min(num, len(given)) and sequence.token_ids[first + equal] == given[equal]:
            equal += 1
        self._num_equal[request] = equal
        if equal == num:
            rest = given[num : num + most]
            return Proposal(rest, LENGTHS[0]) if rest else NO_PROPOSAL
        if request not in self._given:
            self._given[request] = TokenHistory(given)
        ending = TokenHistory(sequence.token_ids[max(sequence.num_tokens - LENGTHS[0], first) :]).last(LENGTHS[0])
        return vote((self._given[request],), ending, most)

    def on_tokens(self, request: Request, num_cut: int) -> None:
        if num_cut:
            self._num_equal.pop(request, None)

    def on_end(self, request: Request) -> None:
        self._num_equal.pop(request, None)
        self._given.pop(request, None)
