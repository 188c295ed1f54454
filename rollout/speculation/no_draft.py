"""The reasons why a sequence has no draft in a step, as `state()` counts them."""

from __future__ import annotations

from enum import StrEnum


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
