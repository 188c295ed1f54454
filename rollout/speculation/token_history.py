"""The search for the place in earlier tokens that ends like a sequence: the prompt lookup of Saxena (2023).

Tokens are kept as bytes, four a token, so that CPython's search for bytes does the work: no index is built, and a text
of ten thousand tokens takes some tens of microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LENGTHS = (12, 6, 3, 2, 1)  # of the endings that are looked for, the longest first
TOKEN_BYTES = 4  # bytes of a token
_MAX_BETWEEN = 64  # occurrences between tokens that a search looks past: a text made for it has one at each token
_BREAK = array("i", [-1]).tobytes()  # between texts: no token


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the bytes of tokens."""
    return array("i", token_ids).tobytes()


class TokenHistory:
    """Tokens in the order of their arrival, and the places in them."""

    __slots__ = ("_bytes",)

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._bytes = bytearray(array("i", token_ids).tobytes())

    def __len__(self) -> int:
        return len(self._bytes) // TOKEN_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        self._bytes += array("i", token_ids).tobytes()

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        del self._bytes[num_tokens * TOKEN_BYTES :]

    @classmethod
    def joined(cls, samples: Sequence[bytes], most: int) -> TokenHistory:
        """Return the bytes of several texts as one, the last ones of them up to `most` bytes, and at least the last.
        No ending is found across their borders."""
        num_bytes, first = 0, len(samples)
        while first and (first == len(samples) or num_bytes + len(samples[first - 1]) <= most):
            first -= 1
            num_bytes += len(samples[first])
        whole = cls()
        whole._bytes = bytearray(_BREAK.join(samples[first:]))
        return whole

    def last(self, num_tokens: int) -> bytes:
        """Return the bytes of the last tokens, fewer if there are fewer."""
        return bytes(self._bytes[-num_tokens * TOKEN_BYTES :])

    def after(self, ending: bytes, most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that followed the longest part of an ending, at its newest place, and its length.

        ending: the bytes of a sequence's last tokens. A place at the end of this history, which nothing follows yet,
        does not count. Returns no tokens where not even the shortest part of LENGTHS is found.
        """
        best: tuple[list[int], int] = [], 0
        for length in reversed(LENGTHS):  # where a part is not found, no longer one is
            if not (found := self._followers(ending, length, most)):
                break
            best = found, length
        return best

    def _followers(self, ending: bytes, length: int, most: int) -> list[int]:
        """Return up to `most` tokens behind the newest place of the last `length` tokens of an ending."""
        if length * TOKEN_BYTES > len(ending):
            return []
        end = self._find(ending[-length * TOKEN_BYTES :], len(self._bytes) - TOKEN_BYTES)
        if end < 0:
            return []
        found = array("i", bytes(self._bytes[end : end + most * TOKEN_BYTES])).tolist()
        if -1 in found:
            del found[found.index(-1) :]
        return found

    def _find(self, part: bytes, limit: int) -> int:
        """Return the end of the newest occurrence of whole tokens before `limit`; -1 without one."""
        at = self._bytes.rfind(part, 0, limit)
        for _ in range(_MAX_BETWEEN):
            if at <= 0 or not at % TOKEN_BYTES:
                break
            at = self._bytes.rfind(part, 0, at + len(part) - 1)
        return -1 if at < 0 or at % TOKEN_BYTES else at + len(part)
