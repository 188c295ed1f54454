"""An environment of two turns: a sentence of a given length, and then the same, shorter.

`configs/smollm2_two_turns.toml` names it. The rows are those of sentences.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sentences import one_sentence

SHORTER = "Now say it again in one sentence of at most {largest} words."


async def say_and_shorten(row: Mapping[str, Any], session: Any) -> Any:
    """Ask for a sentence, and for a shorter one. Returns the episode with the mean reward of both.

    The second answer is rewarded as the first, for at least three words and at most three quarters of the first band's
    least number.
    """
    first = await session.turn(row["prompt"])
    largest = row["least"] * 3 // 4
    second = await session.turn(SHORTER.format(largest=largest))
    said = one_sentence(row, first.text)
    shortened = one_sentence({**row, "least": 3, "largest": largest}, second.text)
    return session.episode(
        {
            "said": said["in_band"] / 2,
            "shortened": shortened["in_band"] / 2,
            "success": said["success"] * shortened["success"],
        }
    )


say_and_shorten.is_repeatable = True  # so that rollout.ahead may begin episodes before their step
