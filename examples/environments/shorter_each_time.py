"""An environment of verifiers: the model says something, and twice again in fewer words.

verifiers finds it by the name of this module, which must be importable: `PYTHONPATH=examples/environments`.
"""

from __future__ import annotations

import itertools
from typing import Any

import verifiers as vf
from datasets import Dataset

SUBJECTS = ("a cat", "the sea", "a train", "winter", "bread", "a garden", "the moon", "a bridge")


def load_environment(num_rows: int = 64) -> vf.Environment:
    """Return the environment. verifiers calls this."""
    asked = (f"Describe {SUBJECTS[at % len(SUBJECTS)]}. This is question {at}." for at in range(num_rows))
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": ""} for text in asked]
    return ShorterEachTime(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[grows_shorter]), max_turns=3)


class ShorterEachTime(vf.MultiTurnEnv):
    """Three turns: each answer should have fewer words than the one before."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        """Return what the user says to the model's answer."""
        return [vf.UserMessage(content="Now say it in fewer words.")]


def grows_shorter(state: vf.State, **_: Any) -> float:
    """Reward the share of answers that are shorter than the one before, and not empty."""
    counts = [len(str(step["completion"][-1].content).split()) for step in state["trajectory"]]
    pairs = list(itertools.pairwise(counts))
    return sum(0 < after < before for before, after in pairs) / max(len(pairs), 1)
