"""Regular expressions in schemas and grammars that the compiler would read otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Character classes that exclude characters, as quotes always are. One that is not closed reaches to the end, so that no
# character is looked at twice.
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)", re.DOTALL)
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[nrtfv0xucb]|\\)")
_LATE_START = re.compile(r"(?<![\\|\[])(?<!^)\^")
_EARLY_END = re.compile(r"(?<!\\)\$(?!$|\|)")
# What is left of a pattern without its escapes and character classes, which may be unclosed.
_CLASSES_AND_ESCAPES = re.compile(r"\\[pPu]\{[^}]*+\}|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)", re.DOTALL)
_GROUP = re.compile(r"\(\?(?!:|<[a-zA-Z])[^a-zA-Z]?[a-zA-Z]?")
_POSSESSIVE = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\+")
_LETTER_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("dDsSwWbBnrtfvxupPkc")  # the compiler reads them, or refuses them by itself


def escape_fault(pattern: str) -> str | None:
    r"""Return what is wrong with a regular expression's first escape that languages read differently, or None.

    The compiler would take \A or \Z for the letter, as JavaScript does, where Python means an end of the text.
    """
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
    if _LATE_START.search(outside) or _EARLY_END.search(outside):
        yield "has ^ or $ in its middle"
    bare = _CLASSES_AND_ESCAPES.sub("_", pattern)
    if (group := _GROUP.search(bare)) is not None:
        yield f"has a group {group[0]}, which is not supported: of those that begin with (?, only (?: and (?<name> are"
    if _POSSESSIVE.search(bare):
        yield "has a possessive quantifier, which is not supported"
    if (fault := escape_fault(pattern)) is not None:
        yield fault
