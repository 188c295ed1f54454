"""Regular expressions in schemas and grammars that the compiler would read otherwise."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .characters import COMPLEMENTS, characters_of
from .formats import PATTERNS
from .references import copied

# Character classes that exclude characters, as quotes always are. One that is not closed reaches to the end, so that no
# character is looked at twice.
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)", re.DOTALL)
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[nrtfv0xucb]|\\)")
# What is left of a pattern without its escapes and character classes, which may be unclosed.
_CLASSES_AND_ESCAPES = re.compile(r"\\[pPu]\{[^}]*+\}|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)", re.DOTALL)
_GROUP = re.compile(r"\(\?(?!:|<[a-zA-Z])[^a-zA-Z]?[a-zA-Z]?")
_POSSESSIVE = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\+")
_LETTER_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]|(?<!\\)(?:\\\\)*\\u(?:\{0*|)[dD][89a-fA-F][0-9a-fA-F]{2}")
_PART = re.compile(  # of a pattern, as far as the places of ^ and $ need it
    r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)|\(\?<[a-zA-Z]\w*>|\(\?:|[*+?]\??|\{[\d,]+\}\??|.", re.DOTALL
)
_CLASS_ESCAPE = re.compile(  # that languages, and the compiler, read alike
    r"\\(?:[dDsSwWbnrtfv0]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[a-zA-Z]|[^a-zA-Z0-9])"
)
_NUMBER = re.compile(r"(?<!\\)(?:\\\\)*(\\u\{0*+([0-9a-fA-F]*+)\})")  # of a character
_MIDDLE = "has ^ or $ in its middle, which is not supported"
_KNOWN_ESCAPES = frozenset("dDsSwWbBnrtfvxupPkc")  # the compiler reads them, or outside classes refuses them by itself
_MOST_DIGITS = 6  # of the number of a character


def escape_fault(pattern: str) -> str | None:
    r"""Return what is wrong with a regular expression's first escape that languages read differently, or None.

    The compiler would take \A or \Z for the letter, as JavaScript does, where Python means an end of the text.
    """
    if (half := _HALF_CHARACTER.search(pattern)) is not None:
        return f"has {half[0]!a}, half of a surrogate pair, which no text has: write the character itself"
    for number in _NUMBER.finditer(pattern):
        if len(number[2]) > _MOST_DIGITS or int(number[2] or "0", 16) > sys.maxunicode:
            return f"has {number[1][:20]}, which is no character"
    for letter in _LETTER_ESCAPE.findall(pattern):
        if letter.isascii() and letter.isalpha() and letter not in _KNOWN_ESCAPES:
            return f"has \\{letter}, which is not supported: languages read it differently"
    for part in _PART.findall(pattern):
        if part.startswith(("[^]", "[]")):
            return rf"has {part[: 2 + (part[1] == '^')]}, which languages read differently: write \] for the bracket"
        if part[0] == "[" and (wrong := _LETTER_ESCAPE.search(_CLASS_ESCAPE.sub("", part))) is not None:
            return f"has {wrong[0]} in a class, which is not supported: the compiler would take it for the character"
    return None


def pattern_faults(pattern: str) -> Iterator[str]:
    """Yield reasons why a text that matches from end to end may be no JSON string between quotes, or not match
    there."""
    outside = _NEGATED.sub("", pattern)
    if '"' in outside or _ESCAPED.search(outside) or any(character < " " for character in pattern):
        yield "allows quotes, backslashes or control characters, which JSON writes in another way"
    if (fault := anchor_fault(pattern)) is not None:
        yield fault
    bare = _CLASSES_AND_ESCAPES.sub("_", pattern)
    if (group := _GROUP.search(bare)) is not None:
        yield f"has a group {group[0]}, which is not supported: of those that begin with (?, only (?: and (?<name> are"
    if _POSSESSIVE.search(bare):
        yield "has a possessive quantifier, which is not supported"
    if (fault := escape_fault(pattern)) is not None:
        yield fault
    elif empty := [part for part in _PART.findall(pattern) if part[0] == "[" and characters_of(part) == []]:
        yield f"has {empty[0]}, which no character of a JSON string matches"


def plain_pattern(pattern: str) -> str:
    """Return a pattern that matches the same texts from end to end, of those without quotes, backslashes and control
    characters, and no other texts.

    The library has two readers of patterns. The one that keeps them inside a JSON string takes (xd+)? for (x?d*)?, so
    they are written for the other one, which knows no strings and reads whatever holds a character outside ASCII.
    """
    *first, last = _PART.findall(pattern) or [""]
    if last == "\\":  # an error that the library names
        return pattern
    return "".join(map(_inside_string, [*first, last])) + "é{0}"


def _inside_string(part: str) -> str:
    """Return a part of a pattern that matches no quote, backslash or control character, and has no ^ or $."""
    if part in ("^", "$"):
        return ""
    if part == "." or part in COMPLEMENTS:
        part = f"[{part}]" if part != "." else "[^]"
    if part[0] != "[" or (found := characters_of(part)) is None:
        return part
    return "[" + "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in found) + "]"


def with_plain_patterns(schema: Any) -> Any:
    """Return a schema of the same meaning whose patterns are plain ones, and whose formats are patterns where the
    library would allow other texts too; the schema itself if nothing changes."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        found, pattern, members, name = dict(part), *map(part.get, ("pattern", "patternProperties", "format"))
        if isinstance(pattern, str):
            found["pattern"] = plain_pattern(pattern)
        if isinstance(members, dict):
            found["patternProperties"] = {plain_pattern(key): value for key, value in members.items()}
        if isinstance(name, str) and name in PATTERNS:
            del found["format"]
            found["pattern"] = plain_pattern(PATTERNS[name])
        return found

    plain = copied(schema, changed)
    return schema if plain == schema else plain


@dataclass
class _Group:
    """The places of ^ and $ in a group of a pattern, or in the whole one."""

    begins: bool  # at the beginning of the text
    follows_end: bool  # a $ stands before it
    is_at_begin: bool  # nothing stands between the beginning of the text and here
    is_ended: bool  # a $ stands before in this branch
    ends: bool = False  # in a branch before
    is_anchored: bool = False


def anchor_fault(pattern: str) -> str | None:
    """Return what is wrong with a ^ or $ that is not at the beginning or the end of the text, or None. The compiler
    would leave it out, and other texts would match."""
    groups = [_Group(begins=True, follows_end=False, is_at_begin=True, is_ended=False)]
    last: _Group | None = None  # the group that a quantifier would repeat
    for part in _PART.findall(pattern):
        here, closed, last = groups[-1], last, None
        is_repeat = part[0] in "*+" or (part[0] == "{" and len(part) > 1)
        if part[0] == "(":
            groups.append(_Group(here.is_at_begin, here.is_ended, here.is_at_begin, here.is_ended))
        elif part == ")" and len(groups) > 1:
            last = groups.pop()
            outer = groups[-1]
            outer.is_anchored |= last.is_anchored
            outer.is_at_begin, outer.is_ended = False, last.is_ended or last.ends
        elif part == "|":
            here.ends |= here.is_ended
            here.is_at_begin, here.is_ended = here.begins, here.follows_end
        elif part == "^" and not here.is_at_begin:
            return _MIDDLE
        elif part in ("^", "$"):
            here.is_anchored = True
            here.is_ended |= part == "$"
        elif is_repeat and closed is not None and closed.is_anchored:
            return _MIDDLE
        elif not is_repeat and part[0] != "?":
            if here.is_ended:
                return _MIDDLE
            here.is_at_begin = False
    return None
