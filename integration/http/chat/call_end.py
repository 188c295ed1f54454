"""The end of a tool call whose values may spell the marker that ends it.

<tool_call>{"name": "f", "arguments": {"a": "no end: </tool_call>"}}</tool_call>
                                                     in a value     the end
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Values:
    """The values in the calls of one form, in which every text stands for itself."""

    opens: str  # the marker before a value
    closes: str  # the marker behind it; a quote that a backslash escapes is none
    ends: tuple[str, ...]  # the markers that end a call


def _alternatives(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class CallEnd:
    """Look for the end of one call, whose text grows. Each character is looked at once, those of markers apart."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self._outside = _alternatives((values.opens, *values.ends))
        escape = r"|\\." if values.closes == '"' else ""
        self._inside = re.compile(re.escape(values.closes) + escape, re.DOTALL)
        self._longest = max(map(len, (values.opens, values.closes, *values.ends)))
        self._tail = ""  # text that may begin a marker
        self.is_inside = False  # of a value

    def feed(self, text: str) -> int | None:
        """Add text; return the number of its characters behind the end of the call, None while it has not come."""
        text = self._tail + text
        at = 0
        while (match := (self._inside if self.is_inside else self._outside).search(text, at)) is not None:
            at = match.end()
            if match.group() in self.values.ends and not self.is_inside:
                self._tail = ""
                return len(text) - at
            if match.group() in (self.values.opens, self.values.closes):
                self.is_inside = not self.is_inside
        self._tail = text[max(at, len(text) - self._longest + 1) :]
        return None
