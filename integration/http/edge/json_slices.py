"""Parse and encode long JSON in slices, so that other threads run in between.

The C functions of `json` hold the interpreter's lock for a whole document, which is seconds for tens of megabytes. Here
each call of them sees one slice. What they accept and return is the same.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator

from ....rollout.giving_way import give_way
from .nesting import TooDeep, lists_in

_WINDOW = 1 << 14  # characters of a slice
_ROW = 16  # entries of a long list that are encoded together
_SPACE = re.compile(r"[ \t\n\r]*+")
# Entries of a list that are neither lists nor objects, each with the comma behind it.
_PLAIN_RUN = re.compile(r'(?:[ \t\n\r]*+(?:"(?:[^"\\]++|\\.)*+"[ \t\n\r]*+|[^\[\]{}",]++),)++', re.DOTALL)


class TooManyLists(Exception):
    """More lists, objects and keys of long objects in a document than are allowed."""


def parse_in_slices(
    text: str,
    max_lists: int,
    *,
    parse_constant: Callable[[str], object],
    parse_float: Callable[[str], object] | None = None,
    max_nesting: int = sys.maxsize,
) -> object:
    """Parse one JSON value. Raises ValueError as `json.loads`, RecursionError for deep nesting, or TooDeep for a deeper
    one than `max_nesting`, and TooManyLists for more lists, objects, and keys of objects longer than a slice than
    `max_lists`."""
    decoder = json.JSONDecoder(parse_constant=parse_constant, parse_float=parse_float)
    parser = _Parser(text, decoder, max_lists, max_nesting)
    value, at = parser.value(parser.skip(0))
    if parser.skip(at) != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return value


class _Parser:
    """The parser of one text. `at` is a place in the text; each method returns the place after what it has read."""

    def __init__(self, text: str, decoder: json.JSONDecoder, max_lists: int, max_nesting: int) -> None:
        self._text, self._left = text, max_lists
        self._depth_left = max_nesting  # less the lists and objects around the place
        self._decode = decoder.decode
        self._scan: Callable[[str, int], tuple[object, int]] = decoder.scan_once  # type: ignore[attr-defined]
        self._window, self._base = "", 0  # a copy of a part of the text, and its place

    def skip(self, at: int) -> int:
        """Return the place of the next character that is no white space."""
        match = _SPACE.match(self._text, at)
        assert match is not None  # it matches the empty text, too
        return match.end()

    def value(self, at: int) -> tuple[object, int]:
        first = self._text[at : at + 1]
        if first not in ("[", "{"):
            return self._scalar(at)
        found = self._short(at)
        if found is not None:
            return found
        self._count(1)
        self._check_depth(1)
        self._depth_left -= 1
        found = self._list(at) if first == "[" else self._object(at)
        self._depth_left += 1
        return found

    def _scalar(self, at: int) -> tuple[object, int]:
        try:
            return self._scan(self._text, at)
        except StopIteration:
            raise json.JSONDecodeError("Expecting value", self._text, at) from None

    def _short(self, at: int) -> tuple[object, int] | None:
        """Read a list or an object that lies in the window; None for one that is longer, or wrong."""
        for _ in range(2):
            start = at - self._base
            if self._window and 0 <= start < len(self._window):
                try:
                    value, end = self._scan(self._window, start)
                except (StopIteration, json.JSONDecodeError):
                    if start == 0:
                        return None
                else:
                    has_more = any(self._window.find(mark, start + 1, end) >= 0 for mark in "[{")
                    num, depth = lists_in(value) if has_more else (1, 1)  # type: ignore[arg-type]
                    self._count(num)
                    self._check_depth(depth)
                    return value, self._base + end
            self._window, self._base = self._text[at : at + _WINDOW], at
        return None

    def _list(self, at: int) -> tuple[object, int]:
        values: list[object] = []
        at = self.skip(at + 1)
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            run = _PLAIN_RUN.match(self._text, at, at + _WINDOW)
            if run is not None:
                values += self._decode(f"[{run[0][:-1]}]")
                at = self.skip(run.end())
            value, at = self.value(at)
            values.append(value)
            at, is_last = self._next(at, "]")
            if is_last:
                return values, at

    def _object(self, at: int) -> tuple[object, int]:
        values: dict[object, object] = {}
        at = self.skip(at + 1)
        if self._text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key, at = self._scalar(at)
            at = self.skip(at)
            if self._text[at : at + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
            self._count(1)
            values[key], at = self.value(self.skip(at + 1))
            at, is_last = self._next(at, "}")
            if is_last:
                return values, at

    def _next(self, at: int, closing: str) -> tuple[int, bool]:
        """Read a comma or the closing mark. Returns the place after it, and whether it was the closing one."""
        give_way()
        at = self.skip(at)
        mark = self._text[at : at + 1]
        if mark == closing:
            return at + 1, True
        if mark != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return self.skip(at + 1), False

    def _count(self, num: int) -> None:
        self._left -= num
        if self._left < 0:
            raise TooManyLists

    def _check_depth(self, depth: int) -> None:
        if depth > self._depth_left:
            raise TooDeep


def _has_long_entries(value: list[object] | tuple[object, ...]) -> bool:
    """Return whether the entries of a list are encoded one by one: objects, and a few lists, which may be long."""
    return isinstance(value[0], dict) or (len(value) <= _ROW and isinstance(value[0], list | tuple))


def encode_in_slices(value: object, encode: Callable[[object], str], *, sorts: bool = False) -> Iterator[str]:
    """Encode a plain value as JSON, piece by piece. `encode` encodes a part, without blanks. sorts: by key."""
    give_way()
    if isinstance(value, dict):
        yield "{"
        for index, (key, entry) in enumerate(sorted(value.items()) if sorts else value.items()):
            yield f"{',' if index else ''}{encode(str(key))}:"
            yield from encode_in_slices(entry, encode, sorts=sorts)
        yield "}"
    elif isinstance(value, list | tuple) and value and _has_long_entries(value):
        yield "["
        for index, entry in enumerate(value):
            if index:
                yield ","
            yield from encode_in_slices(entry, encode, sorts=sorts)
        yield "]"
    elif isinstance(value, list | tuple) and len(value) > _ROW:
        yield "["
        for index in range(0, len(value), _ROW):
            give_way()
            yield f"{',' if index else ''}{encode(value[index : index + _ROW])[1:-1]}"
        yield "]"
    else:
        yield encode(value)
