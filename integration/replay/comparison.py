"""The comparison of a claim with the answer that its request gives again, where the engine itself has drawn it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...rollout.completion import Completion
from ...rollout.proving.claim import Claim, Drawn, Verdict, unproven


def compared(claim: Claim, answer: Completion) -> Verdict:
    """Compare a claim with what its request gives now."""
    num = min(len(claim.token_ids), len(answer.token_ids))
    ids, bits = np.array(answer.token_ids[:num], np.int64), np.array(answer.logprobs[:num], np.float32).view(np.uint32)
    other = np.flatnonzero((ids != claim.token_ids[:num]) | (bits != claim.logprob_bits[:num]))
    position = int(other[0]) if len(other) else num
    if position == len(claim.token_ids):
        claimed, found = (claim.grammar or {}).get("jumps"), (answer.receipt or {}).get("grammar", {}).get("jumps")
        if (
            claimed is not None
            and found is not None
            and (number := _other_jump(claimed, found, is_whole=len(answer.token_ids) == position)) is not None
        ):
            was_claimed = claimed[number] if number < len(claimed) else "none"
            return Verdict("differs", f"jumps: number {number} is claimed as {was_claimed}, and is another one")
        if claim.ends_with_grammar and len(answer.token_ids) > num:
            return Verdict("differs", "end", num - 1, num_tokens=num)
        return Verdict("equal", num_tokens=num)
    if why := _cut_here(answer, position):
        return unproven(why)
    claimed_bits = claim.logprob_bits[position : position + 1]
    was = Drawn(int(claim.token_ids[position]), float(claimed_bits.view(np.float32)[0]), int(claimed_bits[0]))
    came = None
    if position < num:
        came = Drawn(int(ids[position]), answer.logprobs[position], int(bits[position]))
    what = "logprob" if came is not None and came.token_id == was.token_id else "token"
    return Verdict("differs", what, position, was, came, position)


def _cut_here(answer: Completion, position: int) -> str:
    """Return why a renewed answer ended before the end of its claim, or before this position that differs, where that
    is this engine's memory, context or limit on the time of a grammar; else ""."""
    reason, num = answer.finish_reason, len(answer.token_ids)
    if reason is None or reason.type == "stop":
        return ""
    # The last token of a grammar that took too long was drawn without it.
    if position < (num - 1 if reason.type == "abort" else num):
        return ""
    why = reason.message or "the context (max_model_len) of the engine that replays it ends there"
    return f"it could be drawn again up to output position {position} alone: {why}"


def _other_jump(claimed: list[Any], found: list[Any], *, is_whole: bool) -> int | None:
    """Return the first jump that is claimed otherwise than it came; None: there is none. is_whole: the answer came to
    the end of the claim and no further, so that it has no jumps which the claim could lack."""
    came = found if is_whole else found[: len(claimed)]
    if claimed == came:
        return None
    return next(i for i in range(max(len(claimed), len(came))) if claimed[i : i + 1] != came[i : i + 1])
