"""The check that the grammar engine enforces every keyword of a JSON schema.

The engine silently ignores the keywords that it does not know, so a text could match the grammar and not the schema.
Such a schema is refused here, with the position of every error.

Texts follow a schema more strictly than validators check it: one order of properties (that of the schema), no
properties or items but the named ones, patterns from the first character to the last.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from .kinds import TYPES, has_type, kind_of, listed, types_of
from .patterns import pattern_faults, plain_pattern
from .references import resolved, target
from .unions import overlapping

_MOST_STEP = 1024  # the library ignores a larger `multipleOf`
_NUM_DECIMALS = 6  # of the numbers that the library writes within bounds
MAX_NESTING = 64  # the time to compile grows with its cube

_IGNORED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "contentSchema",
)  # fmt: skip
_BY_TYPE = {  # validation keywords, by the type that must be present for them to be enforced
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "unevaluatedProperties", "minProperties", "maxProperties"),
}  # fmt: skip
_IMPLY_THEIR_TYPE = ("properties", "items", "prefixItems", "additionalProperties", "patternProperties")
_FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
_ALONE = ("anyOf", "oneOf", "allOf", "$ref", "const", "enum")  # the engine ignores other keywords beside these


def parse_json(text: str, what: str) -> Any:
    """Parse a JSON text. Raises ValueError with the position of the error, also for a text nested too deeply."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError:
        raise ValueError(f"{what}: nested more than {MAX_NESTING} levels deep") from None
    if _depth(values) > MAX_NESTING:
        raise ValueError(f"{what}: nested more than {MAX_NESTING} levels deep")
    return values


def check_schema(schema: object) -> None:
    """Check a schema. Raises ValueError naming, by JSON pointer, everything that would not be enforced."""
    walk = _Walk(schema)
    faults: list[str] = []
    walk.waiting.append((schema, "#"))
    while walk.waiting:
        faults += _faults(*walk.waiting.popleft(), walk)
    if faults:
        raise ValueError("json_schema: " + "; ".join(faults))


@dataclass
class _Walk:
    """The parts of one schema that were looked at, and those that references name."""

    root: object
    seen: dict[int, object] = field(default_factory=dict)  # by their ids
    waiting: deque[tuple[object, str]] = field(default_factory=deque)


def _faults(schema: object, at: str, walk: _Walk) -> Iterator[str]:
    if isinstance(schema, bool) or id(schema) in walk.seen:
        return
    walk.seen[id(schema)] = schema
    if not isinstance(schema, dict):
        yield f"{at} is {kind_of(schema)}, not a schema"
        return
    if malformed := list(_malformed(schema, at)):
        yield from malformed
        return
    yield from _not_enforced(schema, at)
    yield from _narrow_bounds(schema, at)
    yield from _shadowed(schema, at, walk.root)
    yield from _wrong_references(schema, at, walk)
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(members := schema.get(name), dict):
            for key, member in members.items():
                yield from _faults(member, f"{at}/{name}/{key}", walk)
    for name in ("items", "additionalProperties", "unevaluatedProperties"):
        if name in schema:
            yield from _faults(schema[name], f"{at}/{name}", walk)
    if (names := schema.get("propertyNames")) is not None:
        is_bare = isinstance(names, dict) and "$ref" not in names
        names = {"type": "string", **names} if is_bare else names  # this type is implied
        yield from _faults(names, f"{at}/propertyNames", walk)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, member in enumerate(listed(schema.get(name))):
            yield from _faults(member, f"{at}/{name}/{index}", walk)


def _malformed(schema: dict, at: str) -> Iterator[str]:
    """Yield keywords whose values are none that a schema can have."""
    types = schema.get("type", "object")
    for name in types if isinstance(types, list) and types else [types]:
        if not isinstance(name, str) or name not in TYPES:
            yield f"{at}/type {_short(name)} is none of {', '.join(TYPES)}"
    for keywords, words, is_right in _FORMS:
        for keyword in keywords:
            if keyword in schema and not is_right(schema[keyword]):
                yield f"{at}/{keyword} must be {words}, not {_short(schema[keyword])}"


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_number(value: object) -> bool:
    return has_type(value, "number")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords, and what their values must be.
_FORMS: tuple[tuple[tuple[str, ...], str, Callable[[object], bool]], ...] = (
    (("enum", "anyOf", "oneOf", "allOf"), "a list with a member", _is_list),
    (("required",), "a list of names", _is_names),
    (("properties", "patternProperties", "$defs", "definitions"), "an object", _is_object),
    (_BY_TYPE["number"], "a number", _is_number),
    (_COUNTS, "an integer from 0", _is_count),
    ((*_BY_TYPE["number"][:4], *_COUNTS), "within int64 or float64", lambda value: not _is_rounded(value)),
    (("pattern", "$ref"), "a text", _is_text),
)


def _short(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]


def _not_enforced(schema: dict, at: str) -> Iterator[str]:
    for name in _IGNORED:
        if schema.get(name) not in (None, False):
            yield f"{at}/{name} is not supported"
    types = types_of(schema)
    for needed, names in _BY_TYPE.items():
        ok = {"number", "integer"} if needed == "number" else {needed}
        for name in names:
            if name in schema and not (set(types) & ok) and not (not types and name in _IMPLY_THEIR_TYPE):
                implied = any(other in schema for other in _IMPLY_THEIR_TYPE if other in names)
                if not implied:
                    yield f'{at}/{name} needs "type": "{needed}" beside it'
    if schema.get("format") not in (None, *_FORMATS):
        yield f"{at}/format {schema['format']!r} is not supported"
    beside_pattern = [name for name in ("minLength", "maxLength", "format") if name in schema]
    if "pattern" in schema and beside_pattern:
        yield f"{at}/pattern cannot stand beside {', '.join(beside_pattern)}"
    if "format" in schema and ("minLength" in schema or "maxLength" in schema):
        yield f"{at}/format cannot stand beside minLength and maxLength"
    if isinstance(pattern := schema.get("pattern"), str):
        yield from (f"{at}/pattern {pattern!r} {why}" for why in pattern_faults(pattern))
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from (f"{at}/patternProperties {key!r} {why}" for key in named for why in pattern_faults(key))
        if len(set(map(plain_pattern, named))) < len(named):
            yield f"{at}/patternProperties has one pattern twice, written in two ways"
    is_open = any(schema.get(name) not in (None, False) for name in ("additionalProperties", "unevaluatedProperties"))
    is_open = is_open or "patternProperties" in schema
    if schema.get("minProperties", 0) > 1 and (is_open or "propertyNames" in schema):
        yield f"{at}/minProperties over 1 needs properties with names, as one name might come twice"
    bounds = [name for name in _BY_TYPE["number"][:4] if name in schema]
    step = schema.get("multipleOf", 1)
    if types == ["integer"] and not (0 < step < math.inf and step == int(step)):
        yield f"{at}/multipleOf must be a positive whole number, not {_short(step)}"
    elif types == ["integer"] and step > _MOST_STEP:
        yield f"{at}/multipleOf is enforced up to {_MOST_STEP} only, not {_short(step)}"
    if "multipleOf" in schema and (types != ["integer"] or bounds):
        yield f'{at}/multipleOf is supported for "type": "integer" without bounds only'
    declared = schema.get("properties")
    known = set(declared) if isinstance(declared, dict) else set()
    if unknown := [name for name in listed(schema.get("required")) if name not in known]:
        yield f"{at}/required names {', '.join(map(repr, unknown))}, which properties does not declare"
    patterned = [name for name in ("patternProperties", "propertyNames") if name in schema]
    others = ("properties", "additionalProperties", "minProperties", "maxProperties")
    if patterned and (mixed := [name for name in others if schema.get(name) not in (None, False)]):
        yield f"{at}/{patterned[0]} cannot stand beside {', '.join(mixed)}"


def _narrow_bounds(schema: dict, at: str) -> Iterator[str]:
    """Yield bounds of numbers between which the library writes the empty text, or numbers that are read as the bound
    itself where it is exclusive."""
    names = [name for name in _BY_TYPE["number"][:4] if name in schema] if "number" in types_of(schema) else []
    scaled = {name: Fraction(repr(schema[name])) * 10**_NUM_DECIMALS for name in names}
    ends = {  # the first and last numbers of so many decimals that each bound allows, in units of the last decimal
        "minimum": math.ceil, "maximum": math.floor,
        "exclusiveMinimum": lambda bound: math.floor(bound) + 1,
        "exclusiveMaximum": lambda bound: math.ceil(bound) - 1,
    }  # fmt: skip
    found = {name: ends[name](bound) for name, bound in scaled.items()}
    lows, highs = ([found[name] for name in names if name.lower().endswith(side)] for side in ("minimum", "maximum"))
    if lows and highs and max(lows) > min(highs):
        yield f"{at}/{' and '.join(names)} leave no number of at most {_NUM_DECIMALS} decimals, the only ones written"
        return
    for name in names:
        bound, other, nearest = schema[name], name[9:].lower(), float(Fraction(found[name], 10**_NUM_DECIMALS))
        if nearest == bound and name.startswith("exclusive"):
            yield f"{at}/{name} {_short(bound)} is too large: float64 has no number next to it: use {other}"


def _shadowed(schema: dict, at: str, root: object) -> Iterator[str]:
    """Yield keywords that another keyword beside them would disable, and unions whose choice is not checked."""
    present = [name for name in _ALONE if name in schema]
    validating = [name for names in _BY_TYPE.values() for name in names if name in schema]
    values = listed(schema.get("enum")) if "enum" in schema else [schema.get("const")]
    if "type" in schema and present:
        if set(present) <= {"enum", "const"}:
            wrong = [value for value in values if not any(has_type(value, name) for name in types_of(schema))]
            if wrong:
                yield f"{at}/{present[0]} holds {wrong[0]!r}, which is not of the type beside it"
        else:
            validating.append("type")
    if present and (hidden := present[1:] + validating):
        yield f"{at}/{present[0]} cannot stand beside {', '.join(hidden)}"
    if len(listed(schema.get("allOf"))) > 1:
        yield f"{at}/allOf is supported with one schema only"
    if present and any(map(_is_rounded, values)):
        yield f"{at}/{present[0]} holds a number beyond int64 or float64, which the grammar would have rounded"
    for index in overlapping([resolved(branch, root) for branch in listed(schema.get("oneOf"))]):
        yield f"{at}/oneOf/{index} may hold together with an earlier one: give them types, or a required property "\
              "whose const values differ, or use anyOf"  # fmt: skip


def _is_rounded(value: object) -> bool:
    """Return whether a value is, or holds, a number that the library reads as another one."""
    if isinstance(value, dict | list):
        return any(map(_is_rounded, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _wrong_references(schema: dict, at: str, walk: _Walk) -> Iterator[str]:
    reference = schema.get("$ref")
    if reference is None:
        return
    if not isinstance(reference, str) or not reference.startswith("#"):
        yield f"{at}/$ref {reference!r} is not inside this schema"
        return
    if (named := target(reference, walk.root)) is None:
        yield f"{at}/$ref {reference!r} points nowhere"
    else:
        walk.waiting.append((named, reference))


def _depth(values: object) -> int:
    """Count the levels of nesting without recursion."""
    depth, level = 0, [values]
    while level:
        depth += 1
        level = [
            member
            for value in level
            if isinstance(value, dict | list)
            for member in (value.values() if isinstance(value, dict) else value)
        ]
    return depth
