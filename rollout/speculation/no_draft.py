"""The reasons why a sequence has no draft in a step, as `state()` counts them."""

from __future__ import annotations

from enum import StrEnum

from ..sequences.request import Request


class NoDraft(StrEnum):
    """One reason. The first that holds counts."""

    PREFILL = "prefill"  # known tokens are left to process after this step
    JUMP = "jump"  # a jump of its grammar runs or waits for its rows: its tokens come several a step already
    REFUSED = "refused"  # the request asked for none
    LAST_TOKEN = "last_token"  # max_new_tokens or the context leave room for one token at most
    MEASURING = "measuring"  # steps of this size were not measured lately, so what drafts cost is not known
    RESTING = "resting"  # the sources rest, since drafts did not pay lately
    NO_ROWS = "no_rows"  # the step is full
    NO_PROPOSAL = "no_proposal"  # no source knew what may come next
    TOO_COSTLY = "too_costly"  # its rows would take more time than the steps that they may save
    GRAMMAR = "grammar"  # the grammar forbids the first proposed token
    NO_BLOCKS = "no_blocks"  # no block of KV, or slot of states, is free beyond those that sequences need


class Reasons:
    """Count why sequences had no drafts, and know it for each in the newest step.

    A step of hundreds notes what they have in common once, and not in each of them.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(NoDraft, 0)  # sequences in steps
        self._common: NoDraft | None = None
        self._own: dict[Request, NoDraft | None] = {}

    def begin(self, why: NoDraft, num_sequences: int) -> None:
        """Begin a step in which so many have no draft for one reason; the others are noted by `note`."""
        self._common, self._own = why, {}
        self.counts[why] += num_sequences

    def note(self, request: Request, why: NoDraft | None) -> None:
        """Note why a sequence of this step has no draft; None: it has one."""
        self._own[request] = why
        if why is not None:
            self.counts[why] += 1

    def of(self, request: Request) -> NoDraft | None:
        """Return why a running sequence had no draft in the newest step; None: it had one, or there was no step."""
        return self._own.get(request, self._common)
