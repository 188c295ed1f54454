"""A reward of an agent's run: the share of digits in what it printed. `agent.toml` names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def digits(row: Mapping[str, Any], done: Any) -> dict[str, float]:
    """Return the components of the reward. done: an `AgentRun`, with the command's output, its folder and its turns."""
    said = done.stdout
    share = sum(character.isdigit() for character in said) / max(len(said), 1)
    return {"digits": share, "crashed": -float(done.returncode != 0)}
