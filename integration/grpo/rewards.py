"""Reward functions: the default one, and the import and checks of a user's own."""

import importlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)

# Old locations of our reward functions, with the new ones. Accepted until release 0.2.
_MOVED = {"lockstep.integration.rewards:exact_answer": "lockstep.integration.grpo.rewards:exact_answer"}


@dataclass(frozen=True)
class Score:
    """The reward of one completion."""

    total: float  # what is trained on
    components: Mapping[str, float] = field(default_factory=dict)  # by name, where the reward has several
    is_success: bool | None = None  # None: the reward does not say


class RewardFunction(Protocol):
    """A function that scores one completion: reward(prompt, completion, answer), all text; returns a finite number.

    A reward must be a pure function of its arguments: a resumed run scores the same completions again.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float: ...


def exact_answer(prompt: str, completion: str, answer: str) -> float:
    """Return 1.0 if the completion's final answer is `answer`, else 0.0. White space around either is ignored.

    The final answer is the text after the last "=", or the whole completion.
    """
    wanted = answer.strip()
    final = completion.rpartition("=")[2].strip()
    return float(final == wanted or completion.strip() == wanted)


def load_reward(location: str) -> RewardFunction:
    """Import the reward function at "module:function" (after the colon, dots name attributes of classes).

    An old location of our own functions is accepted, with a logged warning. Raises ValueError, in one line that names
    `location`, if it cannot be imported or called. The result checks the function's values, see `checked_reward`.
    """
    if location in _MOVED:
        logger.warning("reward %r has moved: write %r", location, _MOVED[location])
        location = _MOVED[location]
    module_name, colon, path = location.partition(":")
    if not (colon and module_name and path):
        raise ValueError(f"reward {location!r}: 'module:function' is needed")
    if module_name.startswith("."):
        raise ValueError(f"reward {location!r}: {module_name!r} must be an absolute module name")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward {location!r}: cannot import {module_name!r}: {_one_line(error)}") from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise ValueError(f"reward {location!r}: {where}: {_one_line(error.msg)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"reward {location!r}: {module_name!r} has no {path!r}")
        found = getattr(found, name)
    if not callable(found):
        raise ValueError(f"reward {location!r}: a {type(found).__name__} cannot be called")
    return checked_reward(found, location)


def checked_reward(reward: RewardFunction, name: str) -> RewardFunction:
    """Wrap a reward function so that it raises ValueError, naming it, for a value that is not a finite number.

    Integers, booleans and other values that float() converts (such as numpy scalars) are returned as a float.
    """

    def checked(prompt: str, completion: str, answer: str, /) -> float:
        value = reward(prompt, completion, answer)
        is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
        if not is_number:
            raise ValueError(f"reward {name!r} returned a {type(value).__name__}, not a number")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"reward {name!r} returned {number}, not a finite number")
        return number

    return checked


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
