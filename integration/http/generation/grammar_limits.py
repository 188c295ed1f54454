"""The limits of grammars that clients send. Each is a setting, and the error names it.

They are looked at in one pass, the length first, before a grammar goes to the process that compiles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from ....rollout.grammars.compiler import Constraint, constraint_of
from ....rollout.sampling_params import SamplingParams
from ..edge.config import HttpConfig
from ..edge.errors import BadField

_COUNTS = ("minLength", "minItems", "minProperties")
_UNIONS = ("enum", "anyOf", "oneOf", "elements", "tags")
_PATTERNS = ("pattern", "regex")
_CLASS = r"\[\^?\]?(?:[^\]\\]|\\.)*+\]?"
# Escapes, classes, texts and comments are passed over; then a parenthesis, a bar or the least number of a repeat.
_REGEX_TOKEN = re.compile(rf"\\.|{_CLASS}|(?P<mark>[()|])|\{{(?P<count>\d+)", re.DOTALL)
_EBNF_TOKEN = re.compile(rf'"(?:[^"\\]|\\.)*+"?|{_CLASS}|\#[^\n]*+|(?P<mark>[()|])|\{{\s*(?P<count>\d+)', re.DOTALL)


@dataclass
class _Size:
    """The measures of a grammar, added up over its parts."""

    nesting: int = 0
    pattern_bytes: int = 0  # of the longest pattern inside a schema
    repeats: int = 0  # the highest least number of repeats
    alternatives: int = 0  # of all choices together


def check_grammars(params: Iterable[SamplingParams], config: HttpConfig, field: str | None = None) -> None:
    """Check the grammars of a request. field: as in `check_grammar`. Raises BadField naming the setting that one
    of them exceeds."""
    for constraint in dict.fromkeys(map(constraint_of, params)):
        if constraint is not None:
            check_grammar(constraint, config, field)


def check_grammar(constraint: Constraint, config: HttpConfig, field: str | None = None) -> None:
    """Check one grammar. field: the request's, that the grammar is made of; None: it is the kind of grammar. Raises
    BadField naming the setting that it exceeds."""
    text, is_text = constraint.text, constraint.kind in ("regex", "ebnf")
    kind = field or constraint.kind
    num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    _check(kind, "bytes", num_bytes, "max_grammar_bytes", config.max_grammar_bytes)
    size = _Size()
    if is_text:
        _add_text(size, text, _REGEX_TOKEN if constraint.kind == "regex" else _EBNF_TOKEN)
    else:
        try:
            _add_json(size, json.loads(text))
        except RecursionError:
            size.nesting = config.max_grammar_nesting + 1
        except ValueError:
            return  # the compiler names the place of the error
    if size.nesting > config.max_grammar_nesting:
        raise BadField(kind, f"nested more than {config.max_grammar_nesting} levels deep (max_grammar_nesting)")
    _check(kind, "bytes of a pattern", size.pattern_bytes, "max_pattern_bytes", config.max_pattern_bytes)
    _check(kind, "repeats", size.repeats, "max_grammar_repeats", config.max_grammar_repeats)
    _check(kind, "alternatives", size.alternatives, "max_grammar_alternatives", config.max_grammar_alternatives)


def _check(kind: str, what: str, found: int, setting: str, most: int) -> None:
    if found > most:
        raise BadField(kind, f"more than {most} {what} ({setting})")


def _add_text(size: _Size, text: str, token: re.Pattern[str]) -> None:
    depth = 0
    for match in token.finditer(text):
        mark = match["mark"]
        if mark is None:
            if match["count"] is not None:
                size.repeats = max(size.repeats, int(match["count"][:18]))
        elif mark == "|":
            size.alternatives += 1
        else:
            depth = max(depth + (1 if mark == "(" else -1), 0)
            size.nesting = max(size.nesting, depth)


def _add_json(size: _Size, value: object) -> None:
    """Add a schema or a structural tag, level by level."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        for member in level:
            if isinstance(member, dict):
                _add_members(size, member)
        level = list(chain.from_iterable(map(_inside, level)))
    size.nesting = max(size.nesting, depth)


def _add_members(size: _Size, members: Mapping[str, object]) -> None:
    for name in _COUNTS:
        if isinstance(count := members.get(name), int | float):
            size.repeats = max(size.repeats, count)  # type: ignore[assignment]  # 1e300 is a number too
    for name in _UNIONS:
        if isinstance(entries := members.get(name), list):
            size.alternatives += len(entries)
    named = members.get("patternProperties")
    for pattern in chain(map(members.get, _PATTERNS), named if isinstance(named, dict) else ()):
        if isinstance(pattern, str):
            if members.get("type") != "regex":  # a whole part of a structural tag
                size.pattern_bytes = max(size.pattern_bytes, len(pattern.encode(errors="surrogatepass")))
            _add_text(size, pattern, _REGEX_TOKEN)
    if members.get("type") == "grammar" and isinstance(grammar := members.get("grammar"), str):
        _add_text(size, grammar, _EBNF_TOKEN)


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
