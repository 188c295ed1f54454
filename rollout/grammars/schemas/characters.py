"""The characters that a class of a regular expression matches, such as [^a-z\\d], of those that a JSON string holds."""

from __future__ import annotations

import re
import sys

Ranges = list[tuple[int, int]]  # first and last numbers of characters, ascending, with others between them

_TOKEN = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[a-zA-Z]|.)|.", re.DOTALL)
_LETTERS = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "b": 8, "0": 0}
_SHORTHANDS: dict[str, Ranges] = {
    "\\d": [(48, 57)],
    "\\w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "\\s": [(9, 13), (32, 32), (160, 160)],
}
COMPLEMENTS = ("\\D", "\\W", "\\S")
_ESCAPED = [(0, 31), (34, 34), (92, 92)]  # control characters, the quote and the backslash


def characters_of(part: str) -> Ranges | None:
    """Return the characters of a class, from its bracket to the closing one, that stand in a JSON string as they are.

    None: of one that is not closed, or has a wrong range.
    """
    if part[-1] != "]" or part == "[^":
        return None
    is_negated = part[1] == "^"
    found: Ranges = []
    tokens = _TOKEN.findall(part[2 if is_negated else 1 : -1])
    at = 0
    while at < len(tokens):
        token, rest = tokens[at], tokens[at + 1 : at + 3]
        at += 1
        if token in _SHORTHANDS:
            found += _SHORTHANDS[token]
        elif token in COMPLEMENTS:
            found += complement(_SHORTHANDS[token.lower()])
        else:
            first = last = _number(token)
            if len(rest) == 2 and rest[0] == "-":
                if rest[1] in _SHORTHANDS or rest[1] in COMPLEMENTS or (last := _number(rest[1])) < first:
                    return None
                at += 2
            found.append((first, last))
    return complement([*(found if is_negated else complement(found)), *_ESCAPED])


def complement(ranges: Ranges) -> Ranges:
    """Return the characters that are in none of these ranges, which may be in any order."""
    others: Ranges = []
    start = 0
    for first, last in sorted(ranges):
        if first > start:
            others.append((start, first - 1))
        start = max(start, last + 1)
    return [*others, (start, sys.maxunicode)] if start <= sys.maxunicode else others


def _number(token: str) -> int:
    """Return the number of the character that a token of a class stands for."""
    if token[0] != "\\" or token == "\\":
        return ord(token)
    letter, digits = token[1], token[2:].strip("{}")
    if letter in "xu" and digits:
        return int(digits, 16)
    if letter == "c" and digits:
        return ord(digits) & 31
    return _LETTERS.get(letter, ord(letter))
