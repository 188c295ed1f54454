"""The text that a grammar forces at a position of a matcher, in pieces of bounded length and time.

The library finds the whole forced text in one call, and never returns where the text has no end. So it is asked only
where the grammar proves that the text is short. Elsewhere the text is found byte by byte, and taken back afterwards.
So it is where a grammar names tokens: the library looks at text alone, and such a token may come in its place.

All of it is whole characters, as the library has it from release 0.2.9 on: jumps do not depend on the release.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .processor_time import thread_time
from .shortest_text import NO_BOUND, ForcedBound
from .token_text import whole_characters
from .vocabulary import Vocabulary

MAX_WHOLE_BYTES = 8192  # texts that may be longer are found byte by byte
MAX_PIECE_BYTES = 128  # of a text that is found so
_BYTES = [bytes([byte]) for byte in range(256)]


class ForcedText:
    """Find the forced text at the position of one matcher. Leaves the position as it is."""

    def __init__(
        self, matcher: Any, row: np.ndarray, vocabulary: Vocabulary, banned: np.ndarray, bound: ForcedBound
    ) -> None:
        """Bind to a matcher.

        row: int32 [1, ceil(V / 32)], overwritten. banned: a mask of tokens that are never allowed.
        """
        self._matcher, self._row, self._banned, self._bound = matcher, row, banned, bound
        self._first_bytes, byte_ids = vocabulary.first_bytes, vocabulary.byte_ids
        self.is_late = False  # whether a text took longer than its limit, and is not whole
        self._bytes_with_token = np.flatnonzero(byte_ids >= 0)
        ids = byte_ids[self._bytes_with_token]
        self._byte_places, self._byte_bits = ids // 8, (1 << ids % 8).astype(np.uint8)
        self._others = [_BYTES[byte] for byte in np.flatnonzero(byte_ids < 0)]

    def find(self, num_bytes: int, limit_s: float | None) -> bytes:
        """Return the characters of the forced text after a text of this many bytes, or its beginning if it may be very
        long; nothing where the position is inside a character. limit_s: of processor time, for a grammar whose bytes
        may take long; None: no limit."""
        if limit_s is not None or self._bound.after(num_bytes) > MAX_WHOLE_BYTES:
            return self.find_by_bytes(limit_s)
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # up to 0.2.8 the library converts bytes to str that may be no text
            return _characters(bytes(error.object))

    def find_by_bytes(self, limit_s: float | None = None) -> bytes:
        """Return the characters in the first `MAX_PIECE_BYTES` bytes of the forced text, in a time that its length does
        not determine."""
        matcher, found, began = self._matcher, bytearray(), thread_time()
        self.is_late = False
        try:
            while len(found) < MAX_PIECE_BYTES and not matcher.is_completed():
                if limit_s is not None and thread_time() - began > limit_s:
                    self.is_late = True
                    break
                if (byte := self._only_byte()) is None or not matcher.accept_string(byte, False):
                    break
                found += byte
        finally:
            if found:
                matcher.rollback(len(found))  # each accepted text is one step, as a token is
        return _characters(bytes(found))

    def _only_byte(self) -> bytes | None:
        """Return the byte that every continuation begins with, or None."""
        self._matcher.fill_next_token_bitmask(self._row, 0, False)
        allowed = self._row[0].view(np.uint8)[self._byte_places] & self._byte_bits
        candidates = [_BYTES[byte] for byte in self._bytes_with_token[np.flatnonzero(allowed)[:2]]]
        for byte in self._others:
            if len(candidates) > 1:
                break
            if self._matcher.accept_string(byte, False):
                self._matcher.rollback(1)
                candidates.append(byte)
        if len(candidates) != 1 or (self._bound == NO_BOUND and self._allows_another(candidates[0][0])):
            return None
        return candidates[0]

    def _allows_another(self, byte: int) -> bool:
        """Return whether the row, filled before, allows a token that does not begin with this byte."""
        others = np.packbits(self._first_bytes != byte, bitorder="little")
        return bool((self._row[0].view(np.uint8)[: len(others)] & ~self._banned[: len(others)] & others).any())


def _characters(text: bytes) -> bytes:
    """Return the whole characters at the beginning of a text; none where it begins inside one."""
    return b"" if text and 0x80 <= text[0] < 0xC0 else whole_characters(text)
