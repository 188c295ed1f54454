"""Aborted answers of the mode `text`, which may end with draws that the next jump would have replaced.

A request that is run again has no abort, and goes on: its later jumps tell which draws they removed.

    claim, aborted    | a | b | c |
    run again         | a | d | e | ...     jumps: at 1, removed (b, c), inserted (d, e)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...rollout.completion import Completion
from ...rollout.proving.claim import Claim
from ...rollout.receipt import float_bits

Jump = tuple[int, Sequence[int], Sequence[int]]  # output tokens before it, draws removed, tokens inserted


def first_replaced(claim: Claim, answer: Completion) -> int | None:
    """Return the number of output tokens before the first draw that the next jump would have replaced, where the claim
    is an aborted answer that `answer`, which went on, may have been at the abort; else None.

    It is one that had the claimed jumps, then drew the claimed tokens, and whose later jumps replaced some of them. The
    log-probabilities of the replaced ones are not known from it, those of the tokens before are equal.
    """
    if claim.finish["type"] != "abort" or not claim.grammar or claim.grammar.get("mode") != "text":
        return None
    claimed = claim.grammar.get("jumps") or []
    found = (answer.receipt or {}).get("grammar", {}).get("jumps") or []
    later = found[len(claimed) :]
    if found[: len(claimed)] != claimed or not later:
        return None
    num_stay = min(len(claim.token_ids), *(at for at, _, _ in later))
    bits = np.array(float_bits(answer.logprobs[:num_stay]), np.uint32)
    if not np.array_equal(bits, claim.logprob_bits[:num_stay]):
        return None
    if before_jumps(answer.token_ids, later)[: len(claim.token_ids)] != claim.token_ids.tolist():
        return None
    return num_stay


def before_jumps(token_ids: Sequence[int], jumps: Sequence[Jump]) -> list[int]:
    """Return the output as it was just before the first of its last jumps."""
    tokens = list(token_ids)
    for at, removed, _ in reversed(jumps):
        tokens[at:] = removed
    return tokens
