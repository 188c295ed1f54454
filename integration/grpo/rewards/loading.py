"""The import of reward functions, and their forms.

A reward is a function of a row and a completion, of one or many:

    def reward(row, completion) -> float | dict[str, float]
    async def reward(row, completion) -> float | dict[str, float]
    def reward(rows, completions) -> list[float | dict[str, float]]     (the name `rows` says so; async too)
    def reward(prompt, completion, answer) -> float | dict[str, float]

A parameter `info` gets `SampleInfo` besides, or a list of them. A function's attribute `success_at` says from which
value on a completion counts as a success; a component "success" of a dict says so too, and is not added to the total
unless it has a weight. A reward must be a pure function of its arguments: a resumed run scores the same completions
again.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..user_code import bound, imported
from . import ready

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

# Old locations of our reward functions, with the new names.
_MOVED = {
    "lockstep.integration.rewards:exact_answer": "exact_answer",
    "lockstep.integration.grpo.rewards:exact_answer": "exact_answer",
}
READY = tuple(
    name for name, value in vars(ready).items()
    if inspect.isfunction(value) and value.__module__ == ready.__name__ and not name.startswith("_")
)  # names that need no module  # fmt: skip


def load_reward(location: str, options: Mapping[str, object] | None = None) -> RewardFunction:
    """Import the reward function at "module:function" or "path/to/file.py:function" (after the colon, dots name
    attributes of classes), or the ready one of that name, and bind its options.

    An old location of our own functions is accepted, with a logged warning. Raises ValueError, in one line that names
    `location`, if it cannot be imported or called, or has no such option.
    """
    if location in _MOVED:
        logger.warning("reward %r has moved: write %r", location, _MOVED[location])
        location = _MOVED[location]
    if location in ready.PACKAGES and importlib.util.find_spec(ready.PACKAGES[location]) is None:
        name, extra = ready.PACKAGES[location].replace("_", "-"), ready.EXTRAS.get(location, "rewards")
        raise ValueError(f"reward {location!r} needs {name}, the extra `{extra}`: pip install -e '.[{extra}]'")
    ready_ones = f", or the name of a ready one: {', '.join(READY)}"
    found = getattr(ready, location) if location in READY else imported(location, "reward", ready_ones)
    return bound(found, "reward", location, options)
