"""Regular expressions in schemas and grammars that the compiler would read otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
_MIDDLE = "has ^ or $ in its middle, which is not supported"
_KNOWN_ESCAPES = frozenset("dDsSwWbBnrtfvxupPkc")  # the compiler reads them, or refuses them by itself


def escape_fault(pattern: str) -> str | None:
    r"""Return what is wrong with a regular expression's first escape that languages read differently, or None.

    The compiler would take \A or \Z for the letter, as JavaScript does, where Python means an end of the text.
    """
    if (half := _HALF_CHARACTER.search(pattern)) is not None:
        return f"has {half[0]!a}, half of a surrogate pair, which no text has: write the character itself"
    for letter in _LETTER_ESCAPE.findall(pattern):
        if letter.isascii() and letter.isalpha() and letter not in _KNOWN_ESCAPES:
            return f"has \\{letter}, which is not supported: languages read it differently"
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
