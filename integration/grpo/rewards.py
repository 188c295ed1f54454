"""Reward functions: the default one, and how a user's own is found and kept honest."""

import importlib
import logging
import math
from typing import Protocol

logger = logging.getLogger(__name__)

# Old places of our own reward functions: where they are now. Accepted until release 0.2.
_MOVED = {"lockstep.integration.rewards:exact_answer": "lockstep.integration.grpo.rewards:exact_answer"}


class RewardFunction(Protocol):
    """Scores one completion. Called as reward(prompt, completion, answer), all text; returns a finite number.

    A reward must be a pure function of its arguments: a resumed run scores the same completions again.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float: ...


def exact_answer(prompt: str, completion: str, answer: str) -> float:
    """1.0 if the completion's final answer is `answer`, else 0.0; white space around either does not count.

    The final answer is what stands after the last "=", or the whole completion.
    """
    wanted = answer.strip()
    final = completion.rpartition("=")[2].strip()
    return float(final == wanted or completion.strip() == wanted)


def load_reward(location: str) -> RewardFunction:
    """Find the reward function at "module:function" (dots after the colon reach into classes).

    An old place of one of our own is accepted, with a logged warning. Raises ValueError, in one line that names
    `location`, if it cannot be imported or called. The result checks what the function returns, see `checked_reward`.
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
    """The same reward function, whose results are refused with a ValueError naming it unless they are finite
    numbers.

    Integers, booleans and whatever converts with float() (such as numpy scalars) pass, as a float.
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
