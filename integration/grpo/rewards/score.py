"""The score of a completion or an episode, and how it follows from what a user's function returned."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

Value = float | dict[str, float]  # what a reward gives: a number, or components by name

_MOST = 1e18  # in either direction: advantages are float32, and have to hold its square
_SUCCESS = "success"  # the component that says whether a completion is a success


@dataclass(frozen=True)
class Score:
    """The reward of one completion, and whether it is a success."""

    total: float  # what is trained on
    components: Mapping[str, float] = field(default_factory=dict)  # by name, where the reward has several
    is_success: bool | None = None  # None: the reward does not say


class RewardWeights:
    """The weights of rewards and of their components, by name, which are told where nothing has the name."""

    def __init__(
        self, by_name: Mapping[str, float], names: Collection[str], rewards: str, *, may_vary: bool = False
    ) -> None:
        """Take the weights. names: of the rewards; rewards: likewise, for messages. may_vary: a reward may be a number
        at first and have components later. Raises ValueError for a weight that is not finite."""
        self._may_vary = may_vary
        if bad := {name: weight for name, weight in by_name.items() if not math.isfinite(weight)}:
            raise ValueError(f"reward_weights must be finite numbers, not {bad}")
        self.by_name = dict(by_name)
        self._rewards = rewards
        self._unused = set(by_name) - set(names)  # until a component has the name

    def check(self, values: Iterable[Value]) -> None:
        """Look for the components that weights are of, once. values: the first ones; none are looked at later. Raises
        ValueError for weights of a name that no reward has, where none gives components. Where some do, or may
        (`may_vary`), warns: a component may come later."""
        values = list(values)
        if not self._unused or not values:
            return
        known = {name for value in values if isinstance(value, dict) for name in value}
        left, self._unused = self._unused - known, set()
        if not left:
            return
        wrong = f"reward_weights are of {' and '.join(sorted(left))}, but the rewards are {self._rewards}"
        if not known and not self._may_vary:
            raise ValueError(wrong)
        logger.warning("%s, and their components so far %s", wrong, ", ".join(sorted(known)) or "none")


def score_of(
    values: Mapping[str, Value], weights: Mapping[str, float], success_at: Mapping[str, float | None]
) -> Score:
    """Return the score that checked values give together: the weighted sum of all their components.

    values: by the name of what gave each. weights: of those names and of components, which has both multiplied; 1.0
    where nothing is said, but 0.0 for "success". success_at: by name, the least number that is a success. Raises
    ValueError for components of one name, and for a sum that no advantage can hold.
    """
    components: dict[str, float] = {}
    successes: list[bool] = []
    total = 0.0
    for name, value in values.items():
        own = value if isinstance(value, dict) else {name: value}
        if twice := sorted(components.keys() & own.keys() - {_SUCCESS}):
            raise ValueError(f"two rewards give {' and '.join(twice)}, {name!r} one of them: give each its own name")
        components |= own
        of_all = weights.get(name, 1.0) if isinstance(value, dict) else 1.0
        total += of_all * sum(one * weights.get(key, 0.0 if key == _SUCCESS else 1.0) for key, one in own.items())
        if isinstance(value, dict):
            if _SUCCESS in value:
                successes.append(value[_SUCCESS] > 0)
        elif (least := success_at.get(name)) is not None:
            successes.append(value >= least)
    if not abs(total) <= _MOST:
        raise ValueError(f"the rewards are {total} together, more than the {_MOST:g} that an advantage can hold")
    has_several = len(components) > 1 or any(isinstance(value, dict) for value in values.values())
    return Score(float(total), components if has_several else {}, all(successes) if successes else None)


def checked_value(value: Any, who: str, source: str) -> Value:
    """Return what a user's function returned as a number, or as numbers by name.

    who: the function, source: the row, for errors; source may be empty. Raises ValueError for all that is no finite
    number and no mapping to such. Integers, booleans and scalars of other libraries are converted.
    """
    where = f", of {source}" if source else ""
    if isinstance(value, Mapping):
        return {str(name): _number(one, who, f" for {name!r}", where) for name, one in value.items()}
    return _number(value, who, "", where)


def described(value: object) -> str:
    """Return the kind of a value, for messages."""
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, Sequence) else "")


def _number(value: Any, who: str, what: str, where: str) -> float:
    if not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ValueError(f"{who} returned {described(value)}{what}, not a number{where}")
    try:
        number = float(value)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # of arrays, too large integers and others
        raise ValueError(f"{who} returned {described(value)}{what}, not a number{where}: {error}") from error
    if not math.isfinite(number):
        raise ValueError(f"{who} returned {number}{what}, not a finite number{where}")
    if abs(number) > _MOST:
        raise ValueError(f"{who} returned {number:g}{what}, more than the {_MOST:g} that an advantage can hold{where}")
    return number
