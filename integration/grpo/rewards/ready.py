"""Ready rewards, named in a config by their function's name alone.

Each takes a row and a completion; settings of its own come from the table `reward_options.NAME`. Patterns and schemas
are a row's own where it has the field that the option names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row_fields import entry_of, pattern_of, schema_of
from .scoring_process import ScoringProcess

_OTHER = ScoringProcess()  # started with the first completion that one of PACKAGES scores
_LIMIT_S = 1.0  # of one search: a pattern may take exponential time


def exact_answer(prompt: str, completion: str, answer: str) -> float:
    """Return 1.0 if the completion's final answer is `answer`, else 0.0. White space around either is ignored.

    The final answer is the text after the last "=", or the whole completion.
    """
    wanted = answer.strip()
    final = completion.rpartition("=")[2].strip()
    return float(final == wanted or completion.strip() == wanted)


def no_reward(row: Mapping[str, Any], completion: str) -> float:
    """Return 0.0: a reference alone teaches (`train.reference`)."""
    return 0.0


def matches(row: Mapping[str, Any], completion: str, *, pattern: str = "", field: str = "pattern") -> float:
    """Return 1.0 if the whole completion, without white space around it, matches a regular expression, else 0.0.

    pattern: of all rows; empty: each row's own, in its field `field`. A search that takes over a second is no match.
    Raises ValueError for a row without a pattern, or for a pattern that is wrong.
    """
    found = pattern_of(row, pattern=pattern, field=field)
    try:
        return float(found.fullmatch(completion.strip(), timeout=_LIMIT_S) is not None)
    except TimeoutError:
        return 0.0


def follows_schema(
    row: Mapping[str, Any], completion: str, *, schema: str = "", field: str = "schema", limit_s: float = 5.0
) -> float:
    """Return 1.0 if the completion is JSON that a JSON schema allows, else 0.0. NaN and Infinity are no JSON.

    schema: of all rows, as JSON text; empty: each row's own, in its field `field`, as JSON text or an object. The
    package jsonschema compares. A completion that takes it over `limit_s` seconds, or too much memory or depth, has
    0.0. Raises ValueError for a row without a schema, or for a schema that is wrong or refers to nothing.
    """
    return _OTHER.score("follows_schema", (completion, schema_of(row, schema=schema, field=field)), limit_s)


def short_enough(row: Mapping[str, Any], completion: str, *, target: int = 200, slack: int = 100) -> float:
    """Return 1.0 for a completion of up to `target` characters, then less, down to 0.0 at `target + slack`.

    Raises ValueError for a target or slack that is not positive.
    """
    if target < 1 or slack < 1:
        raise ValueError(f"target and slack must be at least 1, not {target} and {slack}")
    return min(1.0, max(0.0, 1.0 - (len(completion) - target) / slack))


def math_verify(prompt: str, completion: str, answer: str, *, limit_s: float = 5.0) -> float:
    """Return 1.0 if the completion's last answer is equal to `answer` as mathematics (1/2 and 0.5 are), else 0.0.

    The package math-verify finds it, in LaTeX or as a plain expression, and compares. A completion that takes it over
    `limit_s` seconds has 0.0. Raises ValueError for a row whose answer is no mathematical expression.
    """
    return _OTHER.score("math_verify", (completion, answer), limit_s)


def reasoning_gym(
    row: Mapping[str, Any], completion: str, *, dataset: str = "", tag: str = "answer", limit_s: float = 5.0
) -> float:
    """Return the score, 0.0 to 1.0, that a dataset of the package reasoning-gym gives the completion's answer.

    The answer stands in <answer> tags (`tag` names others), or is the whole completion. A row is an entry of the
    dataset, or has one in its field `entry`; the dataset is `dataset`, or is named in the row's field `dataset` or in
    the entry's metadata. A completion that takes it over `limit_s` seconds has 0.0. Raises ValueError for a row that
    names no dataset of the package.
    """
    name, entry = entry_of(row, dataset=dataset)
    return _OTHER.score("reasoning_gym", (completion, name, entry, tag), limit_s)


SUCCESS_AT = {exact_answer: 1.0, matches: 1.0, follows_schema: 1.0, math_verify: 1.0, reasoning_gym: 1.0}
# By reward: the module that scores, and its extra where that is not `rewards`.
PACKAGES = {"follows_schema": "jsonschema", "math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}
EXTRAS = {"follows_schema": "train"}
for _reward, _least in SUCCESS_AT.items():
    _reward.success_at = _least  # type: ignore[attr-defined]
