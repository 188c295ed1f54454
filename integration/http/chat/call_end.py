"""The end of a tool call whose values may spell the marker that ends it.

<tool_call>{"name": "f", "arguments": {"a": "no end: </tool_call>"}}</tool_call>
                                                     in a value     the end

Where values have no quotes, one that begins as JSON, and may be JSON by the tool's schema, holds the texts in its own
quotes; one that turns out to be none is a text after all, and is looked through from its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Names:
    """The places of a call's name and of an argument's, before the argument's value."""

    call: re.Pattern[str]  # its first group, in all text before the first value
    argument: re.Pattern[str]  # likewise, in the text between the values
    closes: str = ""  # the marker behind the argument's name, where that follows `Values.opens`


@dataclass(frozen=True)
class Values:
    """The values in the calls of one form, in which every text stands for itself."""

    opens: str  # the marker before a value
    closes: str  # the marker behind it; a quote that a backslash escapes is none
    ends: tuple[str, ...]  # the markers that end a call
    names: Names | None = None  # None: every value is a text in quotes


class _Place(Enum):
    """The place of the next character."""

    OUTSIDE = auto()  # of values
    NAME = auto()  # of an argument, which has a marker behind it
    BEGIN = auto()  # blanks before a value
    TEXT = auto()  # a value up to its marker
    JSON = auto()  # a value that is JSON so far, between its texts
    QUOTED = auto()  # a text of that


_NO_JSON = r"[^\s\d.,:eE+\-truefalsn]"  # outside of its texts and brackets: letters of its words alone
_ON_THE_WAY = {
    _Place.BEGIN: re.compile(r"\S"),
    _Place.JSON: re.compile(rf'["\[\]{{}}]|{_NO_JSON}'),
    _Place.QUOTED: re.compile(r'"|\\.', re.DOTALL),
}
_DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}


def _alternatives(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class CallEnd:
    """Look for the end of one call, whose text grows. Each character is looked at once, or twice in what is no JSON,
    those of markers apart."""

    def __init__(self, values: Values, may_be_json: Callable[[str, str], bool]) -> None:
        """Begin a call. may_be_json: of its name, and that of an argument; values with quotes do not ask it."""
        self.values = values
        self._may_be_json = may_be_json
        escape = r"|\\." if values.closes == '"' else ""
        self._patterns = {
            _Place.OUTSIDE: _alternatives((values.opens, *values.ends)),
            _Place.NAME: re.compile(re.escape(values.names.closes) if values.names is not None else ""),
            _Place.TEXT: re.compile(re.escape(values.closes) + escape, re.DOTALL),
            **_ON_THE_WAY,
        }
        self._longest = max(map(len, (values.opens, values.closes, *values.ends)))
        self._place = _Place.OUTSIDE
        self._depth = 0  # of the brackets around a place in JSON
        self._name: str | None = None  # of the call, known with its first argument
        self._kept: list[str] = []  # text since the last value, or of the value that is JSON so far
        self._tail = ""  # text that may begin a marker

    def feed(self, text: str) -> int | None:
        """Add text; return the number of its characters behind the end of the call, None while it has not come."""
        text = self._tail + text
        at = begin = 0  # begin: of the text that `_kept` has not
        while (match := self._patterns[self._place].search(text, at)) is not None:
            found, at = match.group(), match.end()
            if self._place is _Place.OUTSIDE and found in self.values.ends:
                self._tail = ""
                return len(text) - at
            if self._place is _Place.OUTSIDE or self._place is _Place.NAME:
                self._place = self._after_opening(text[begin:at])
                if self._place is not _Place.NAME:
                    self._kept = []
            elif self._place is _Place.BEGIN:
                self._place = _Place.JSON if found in '{["' else _Place.TEXT
                at = begin = match.start()
            elif self._place is _Place.TEXT:
                if found == self.values.closes:
                    self._place, begin = _Place.OUTSIDE, at
            elif not self._follow_json(found):  # the value is a text
                text, at, self._kept = "".join((*self._kept, text[begin:])), 0, []
        self._tail = text[max(at, len(text) - self._longest + 1) :]
        if self.values.names is not None and self._place not in (_Place.BEGIN, _Place.TEXT):
            self._kept.append(text[begin : len(text) - len(self._tail)])
        return None

    def _after_opening(self, newest: str) -> _Place:
        """Return the place behind a marker before a value, or before or behind its name. newest: the text up to it that
        is not kept yet."""
        names = self.values.names
        if names is None:
            return _Place.TEXT
        if self._place is _Place.OUTSIDE and names.closes:
            return _Place.NAME
        text = "".join((*self._kept, newest))
        if self._name is None:
            self._name = _first(names.call, text)
        return _Place.BEGIN if self._may_be_json(self._name, _first(names.argument, text)) else _Place.TEXT

    def _follow_json(self, found: str) -> bool:
        """Follow a character of a value that is JSON so far; return whether it still may be."""
        if found == '"':
            self._place = _Place.JSON if self._place is _Place.QUOTED else _Place.QUOTED
        elif self._place is _Place.JSON:
            self._depth += _DEPTHS.get(found, 0)
            if found not in _DEPTHS or self._depth < 0:
                self._place, self._depth = _Place.TEXT, 0
                return False
        if self._place is _Place.JSON and not self._depth:  # it is whole
            self._place, self._kept = _Place.TEXT, []
        return True


def _first(pattern: re.Pattern[str], text: str) -> str:
    """Return the first group of the last match, without blanks around it; empty without a match."""
    *_, last = [None, *pattern.finditer(text)]
    return "" if last is None else last[1].strip()
