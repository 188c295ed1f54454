"""Tasks of reasoning-gym, with further attempts after a wrong answer.

A row is an entry of one of its datasets as it stands: `question`, `answer` and `metadata`, of which `source_dataset`
names the scorer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...rewards import ready
from ..episode import Episode
from ..session import NoRoom, Session
from .packages import refuse_without

ASK = "Give the answer at the end, between <answer> and </answer>."
AGAIN = "That is not right. Try again."


async def solve(
    row: Mapping[str, Any], session: Session, *, attempts: int = 2, decay: float = 0.5, ask: str = ASK,
    again: str = AGAIN, limit_s: float = 5.0,
) -> Episode:  # fmt: skip
    """Ask the row's question, and ask again after an answer that is not wholly right, while the context has room.

    attempts: number of answers at most. The reward is the largest of the dataset's own scores, of which the second
    answer's is multiplied by `decay`, the third's by its square, and so on. A success is a score of 1 in any attempt.
    ask: stands behind the question; again: the message after a wrong answer. Answers are scored as by the ready reward
    of this name, in a process of its own, for at most `limit_s` seconds each. Raises ValueError for a row that names no
    dataset.
    """
    refuse_without("reasoning_gym", "rewards")
    if "question" not in row:
        raise ValueError("the environment reasoning_gym needs rows with question, answer and metadata.source_dataset")
    if attempts < 1:
        raise ValueError(f"the environment reasoning_gym needs attempts of at least 1, not {attempts}")
    score = partial(ready.reasoning_gym, limit_s=limit_s)
    best = last = 0.0
    for attempt in range(attempts):
        try:
            turn = await session.turn(f"{row['question']}\n{ask}" if attempt == 0 else again)
        except NoRoom:
            if not session.turns:
                raise
            break
        last = await asyncio.to_thread(score, row, turn.text)  # others' turns go on meanwhile
        best = max(best, last * decay**attempt)
        if last >= 1.0:
            break
    return session.episode({"score": best, "success": float(last >= 1.0)})


solve.is_repeatable = True  # type: ignore[attr-defined]
