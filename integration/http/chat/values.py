"""The values of arguments: strict JSON, and texts without quotes that have the type of a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from ....rollout.grammars.schemas.references import target
from ..edge.nesting import MAX_NESTING, check_nesting

_MAX_PARTS = 64  # of a schema that are looked at to find the types of a value
_FIRST_CHARS, _GROWTH = 1 << 10, 4  # of a text in which a value is looked for
_CUT_CHARS = 16  # at the end of a piece: what ends there, or is wrong there, may be cut
_LEVELS_AROUND = 16  # of a request's lists and objects around the arguments of a call, at most
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Not strict: line breaks and the like inside a text. The arguments of a call are written anew, as strict JSON.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def decoded(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError."""
    text = text.strip()
    value, end = decode_at(text, 0)
    if end != len(text):
        raise ValueError("text after the JSON")
    return value


def decode_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and the place behind it. Takes a time in proportion to
    the text that is JSON so far: an error of `json` counts the lines before it. Raises ValueError."""
    num = _FIRST_CHARS
    while True:
        piece = text[at : at + num]
        is_rest = at + len(piece) >= len(text)
        try:
            value, end = _DECODER.raw_decode(piece)
            if is_rest or end <= len(piece) - _CUT_CHARS:
                return value, at + end
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except json.JSONDecodeError as error:
            is_cut = error.pos > len(piece) - _CUT_CHARS or error.msg.startswith("Unterminated string")
            if is_rest or not is_cut:
                raise
        num *= _GROWTH


def dumped(arguments: dict[str, Any]) -> str:
    """Return the JSON of arguments. Raises ValueError for numbers that JSON does not have, and for nesting with which a
    request would be refused that has the call in its history."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        check_nesting(arguments, text, MAX_NESTING - _LEVELS_AROUND)
        return text if text.isascii() or is_unicode(text) else json.dumps(arguments, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: half of a surrogate pair, which only an escape can write, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def value_of(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for under a schema; root: the schema that this one is a part of."""
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    plain = text.strip()
    if (word := plain.lower()) in _WORDS:  # Python's words too, as templates write them
        value = _WORDS[word]
        return value if not types or _type_of(value) & types else text
    try:
        value = decoded(plain)
    except ValueError:
        return text
    return value if not types or _type_of(value) & types else text


def types_of(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; none: any. A caller's schema may name itself, so few parts are read."""
    found: set[str] = set()
    todo, num_read = [schema], 0
    while todo and num_read < _MAX_PARTS:
        num_read += 1
        part = todo.pop()
        if not isinstance(part, Mapping):
            continue
        if isinstance(reference := part.get("$ref"), str):
            todo.append(target(reference, root))
        declared = part.get("type")
        named = {one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)}
        values = [part["const"]] if "const" in part else part.get("enum")
        if not named and isinstance(values, list):
            named = set().union(*map(_type_of, values[:_MAX_PARTS]))
        found |= named
        for union in ("anyOf", "oneOf"):
            if isinstance(choices := part.get(union), list):
                todo += choices[:_MAX_PARTS]
    return found


def _type_of(value: object) -> set[str]:
    """Return the names of a value's type."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    kinds = {str: "string", float: "number", type(None): "null", list: "array", dict: "object"}
    return {kinds[type(value)]}
