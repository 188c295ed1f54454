"""The process that scores with other packages: `python -m lockstep.integration.grpo.rewards.scoring_worker FD`.

A request is (kind, arguments, seconds), pickled by the trainer; answers are JSON, because a scorer may evaluate what a
model wrote: {"loaded": true} once the kind's packages are there, then {"value": 1.0}, with "error" where the scorer
failed, or {"refused": "..."} for a row that is wrong, or, alone, for a package that is missing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from .scoring_process import LOADED

_MEMORY_BYTES = 4 << 30
_MARKS = ("$", "\\boxed", "\\(", "\\[")  # of an answer that says itself where its mathematics is


class OutOfTime(BaseException):
    """The end of a time limit. No `except Exception` of a scorer keeps it."""


def main() -> None:
    """Answer requests until the trainer closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends this process
    signal.signal(signal.SIGALRM, _raise_out_of_time)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, most))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit of its own
    channel = Connection(int(sys.argv[1]))
    while True:
        try:
            kind, arguments, limit_s = channel.recv()
        except EOFError:
            return
        for answer in answers_to(kind, arguments, limit_s):
            channel.send_bytes(json.dumps(answer).encode())


def answers_to(kind: str, arguments: tuple[Any, ...], limit_s: float) -> Iterator[Mapping[str, object]]:
    """Load what a kind needs and say so, then compute one value; see the head of this module."""
    load, score = _KINDS[kind]
    try:
        load()  # imports take as long as they take
    except ImportError as error:
        yield {"refused": f"{kind} needs a package: {error}"}
        return
    yield LOADED
    yield _answer(kind, partial(score, *arguments), limit_s)


def _answer(kind: str, score: Callable[[], float], limit_s: float) -> dict[str, object]:
    """Compute one value within a time limit. Called in the main thread; SIGALRM raises OutOfTime there."""
    try:
        signal.setitimer(signal.ITIMER_PROF, 2 * limit_s)  # its signal ends the process, also inside a C function
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        return {"value": score()}
    except (OutOfTime, MemoryError, RecursionError):
        return {"value": 0.0}
    except Refused as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - of a package, which reads what a model wrote
        return {"value": 0.0, "error": f"{kind}: {type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


class Refused(ValueError):
    """The error of a row that cannot be scored."""


def _raise_out_of_time(number: int, frame: object) -> None:
    raise OutOfTime


def _load_math() -> None:
    import math_verify  # noqa: F401


def _math(completion: str, answer: str) -> float:
    """Return 1.0 if the completion's final answer is equal to the given one as mathematics, else 0.0."""
    from math_verify import parse, verify

    gold = _gold(answer)
    if not gold:
        raise Refused(f"the answer {answer!r} is no mathematical expression")
    # Its own limits are alarms, as this process's.
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(4096)
def _gold(answer: str) -> tuple[Any, ...]:
    from math_verify import parse

    whole = answer if any(mark in answer for mark in _MARKS) else f"\\boxed{{{answer}}}"
    return tuple(parse(whole, parsing_timeout=None) or parse(answer, parsing_timeout=None))


def _load_gym() -> None:
    import reasoning_gym  # noqa: F401


def _gym(completion: str, name: str, entry: Mapping[str, Any], tag: str) -> float:
    """Return the value that a dataset of Reasoning Gym gives an answer: what stands in the last pair of tags, or else
    the whole completion."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion, tag) if tag else None
    return float(_gym_scorer(name)(completion.strip() if answer is None else answer, entry))


@functools.lru_cache(256)
def _gym_scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if name not in DATASETS:
        raise Refused(f"Reasoning Gym has no dataset {name!r}")
    scorer: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(name)
    return scorer


def _load_schema() -> None:
    import jsonschema  # noqa: F401


def _schema(completion: str, schema: str) -> float:
    """Return 1.0 if the completion is JSON that a schema allows, else 0.0."""
    from referencing.exceptions import Unresolvable

    validator = _validator(schema)
    try:
        return float(validator.is_valid(json.loads(completion, parse_constant=_refuse_constant)))
    except (ValueError, OverflowError):  # it is no JSON, or has a number beyond floating point
        return 0.0
    except Unresolvable as error:
        raise Refused(f"the schema is wrong: {error}") from None


def _check_schema(schema: str) -> float:
    """Return 1.0 for a schema that is right. Raises Refused for another."""
    _validator(schema)
    return 1.0


@functools.lru_cache(256)
def _validator(schema: str) -> Any:
    """Make the validator of a schema. Raises Refused for a schema that is wrong."""
    import jsonschema

    try:
        given = json.loads(schema)
        if not isinstance(given, dict | bool):
            raise Refused(f"the schema is wrong: an object is needed, not a {type(given).__name__}")
        kind = jsonschema.validators.validator_for(given)
        kind.check_schema(given)
    except json.JSONDecodeError as error:
        raise Refused(f"the schema is wrong: {error}") from None
    except jsonschema.SchemaError as error:
        raise Refused(f"the schema is wrong: {error.message}") from None
    return kind(given)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_KINDS: dict[str, tuple[Callable[[], None], Callable[..., float]]] = {
    "follows_schema": (_load_schema, _schema),
    "math_verify": (_load_math, _math),
    "reasoning_gym": (_load_gym, _gym),
    "schema": (_load_schema, _check_schema),  # of a row, before any completion
}

if __name__ == "__main__":
    main()
    os._exit(0)  # nothing to flush, and the packages' own ends take long
