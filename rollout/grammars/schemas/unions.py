"""Branches of a oneOf, of which no value may fit two: the grammar engine checks the choice of none."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .kinds import listed, types_of


def overlapping(branches: list) -> Iterator[int]:
    """Yield the index of each branch that may hold together with an earlier one."""
    others: list[object] = []  # earlier branches without constants
    constants: set[str] = set()  # of the earlier branches with them
    for index, branch in enumerate(branches):
        values = _constants(branch) if isinstance(branch, dict) else None
        if values is None:
            is_apart = all(_are_disjoint(branch, other) for other in branches[:index])
            others.append(branch)
        else:
            its_own = {_canonical(value) for value in values}
            is_apart = constants.isdisjoint(its_own) and all(_are_disjoint(branch, other) for other in others)
            constants |= its_own
        if not is_apart:
            yield index


def _are_disjoint(a: object, b: object) -> bool:
    """Return whether no value can fit both, as far as their types and constants show."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values_a, values_b = _constants(a), _constants(b)
    if values_a is not None and values_b is not None:
        return {_canonical(value) for value in values_a}.isdisjoint(map(_canonical, values_b))
    if (types_a := types_of(a)) and (types_b := types_of(b)):
        numbers = {"integer", "number"}
        meet = set(types_a) & set(types_b) or (set(types_a) & numbers and set(types_b) & numbers)
        if not meet:
            return True
    common = set(listed(a.get("required"))) & set(listed(b.get("required")))
    of_a, of_b = a.get("properties"), b.get("properties")
    if not isinstance(of_a, dict) or not isinstance(of_b, dict):
        return False
    return any(_are_disjoint(of_a.get(name), of_b.get(name)) for name in common)


def _constants(schema: dict) -> list | None:
    if "const" in schema:
        return [schema["const"]]
    return listed(schema["enum"]) if "enum" in schema else None


def _canonical(value: object) -> str:
    """Return a text that is the same for equal JSON values; 1 and 1.0 are equal, 1 and true are not."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: object) -> object:
    if isinstance(value, dict):
        return {name: _with_integers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_integers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
