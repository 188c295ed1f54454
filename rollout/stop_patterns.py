"""The size of a stop pattern, found before it is compiled: the compiler writes each repeat out."""

from __future__ import annotations

import re

MAX_PATTERN_SIZE = 10_000  # of all stop patterns of a request: about 10 ms and 5 MB to compile

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?|\(\?#[^)]*+\)?|\{(\d*)(,?)(\d*)\}|.", re.DOTALL
)  # an escape, a class, a comment, a repeat, a character
_NEW_SYNTAX = re.compile(r"\(\?[a-zA-Z0-9-]*[xV]")  # comments to the end of a line; classes in classes


def pattern_size(pattern: str) -> int:
    """Return a bound of the pattern's length once its repeats are written out, in characters. Reads it once."""
    repeats = [match for match in _TOKEN.finditer(pattern) if match[1] is not None]
    counts = [max(_number(match[1]), _number(match[3]), 1) for match in repeats]
    if _NEW_SYNTAX.search(pattern):  # its groups cannot be told from its comments here: as if all were nested
        size = len(pattern)
        for count in counts:
            size *= count
        return size
    sizes, last = [0], 0  # of each open group so far; of the part before, which a repeat repeats
    for match in _TOKEN.finditer(pattern):
        token = match[0]
        if token == "(":
            sizes.append(1)
            last = 0
        elif token == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif match[1] is not None:
            grown = last * max(_number(match[1]), _number(match[3]), 1)
            sizes[-1] += grown - last
            last = grown
        elif token not in "*+?|":
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _number(digits: str) -> int:
    return int(digits[:9] or 0)
