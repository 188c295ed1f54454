"""Stop strings and their beginnings at the end of a growing text: Knuth, Morris and Pratt's prefix function (1977)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache


class StopPrefixes:
    """Follow a text character by character: which stops it completes, and how many of its last characters begin one.

    A character costs a few operations for each stop, however long the stops are and however much of them has matched.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._lengths = [0] * len(self._stops)  # of the longest beginning of each stop, not all of it, at the end

    @property
    def num_chars(self) -> int:
        """The largest number of characters at the end of the text that are a beginning of a stop, not all of it."""
        return max(self._lengths, default=0)

    def follow(self, fresh: str) -> list[tuple[int, str]]:
        """Take the text's next characters. Return each stop that they complete, after the number of them up to its
        first end."""
        lengths, completed = self._lengths, []
        for index, (stop, borders) in enumerate(self._stops):
            length, last, end = lengths[index], len(stop) - 1, 0
            for num, character in enumerate(fresh, 1):
                while length and stop[length] != character:
                    length = borders[length - 1]
                if stop[length] == character:
                    if length < last:
                        length += 1
                    else:
                        length, end = borders[last], end or num
            lengths[index] = length
            if end:
                completed.append((end, stop))
        return completed


@lru_cache(maxsize=64)
def _borders(stop: str) -> array[int]:
    """Return for each beginning of a stop, by its last character, the length of its longest proper part that is both a
    beginning and an end of it."""
    borders, length = array("i", [0]), 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return borders
