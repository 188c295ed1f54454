"""The search for the place in earlier tokens that ends like a sequence: the prompt lookup of Saxena (2023).

No index is built. C++ searches a text of ten thousand tokens in some microseconds; without a compiler CPython's search
for bytes does it, which takes some tens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from ...kernels.drafts import votes
from ..sequences.step import Vote
from .proposer import NO_PROPOSAL, Proposal

NUM_PLACES = 8  # that a search looks at: enough to see whether they go on alike
LENGTHS = (12, 6, 3, 2, 1)  # of the endings that are looked for, the longest first
_ASCENDING = LENGTHS[::-1]
TOKEN_BYTES = 4  # bytes of a token
_MAX_BETWEEN = 64  # occurrences between tokens that a search looks past: a text made for it has one at each token
_BREAK = array("i", [-1]).tobytes()  # between texts: no token


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the bytes of tokens."""
    return array("i", token_ids).tobytes()


def _token_ids(tokens: bytes) -> list[int]:
    return array("i", tokens).tolist()


class Places(NamedTuple):
    """The tokens behind the places in earlier tokens that end like a sequence."""

    length: int  # tokens that are equal there
    followers: list[bytes]  # of each place, the newest first, the bytes of the tokens behind it

    def vote(self) -> Proposal:
        """Return what followed most places, token by token; of equally many the newest."""
        if not self.followers:
            return NO_PROPOSAL
        if self.followers.count(self.followers[0]) == (num_places := len(self.followers)):  # most often: all alike
            token_ids = _token_ids(self.followers[0])
            return Proposal(token_ids, (Vote(self.length, num_places, num_places),) * len(token_ids))
        return self._vote_by_token()

    def _vote_by_token(self) -> Proposal:
        token_ids, votes, followers = list[int](), list[Vote](), list(map(_token_ids, self.followers))
        for depth in range(max(map(len, followers))):
            followers = [tokens for tokens in followers if len(tokens) > depth]
            if not followers:
                break
            voted = [tokens[depth] for tokens in followers]
            token_id = max(voted, key=voted.count)  # of equally many the first, which is the newest
            num_alike = voted.count(token_id)
            token_ids.append(token_id)
            votes.append(Vote(self.length, num_alike, len(voted)))
            if num_alike < len(followers):
                followers = [tokens for tokens in followers if tokens[depth] == token_id]
        return Proposal(token_ids, tuple(votes))


class TokenHistory:
    """Tokens in the order of their arrival, and the places in them."""

    __slots__ = ("tokens",)

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.tokens = array("i", token_ids)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        del self.tokens[num_tokens:]

    @classmethod
    def joined(cls, samples: Sequence[bytes], most: int) -> TokenHistory:
        """Return the bytes of several texts as one, the last ones of them up to `most` bytes, and at least the last.
        No ending is found across their borders."""
        num_bytes, first = 0, len(samples)
        while first and (first == len(samples) or num_bytes + len(samples[first - 1]) <= most):
            first -= 1
            num_bytes += len(samples[first])
        whole = cls()
        whole.tokens.frombytes(_BREAK.join(samples[first:]))
        return whole

    def last(self, num_tokens: int) -> bytes:
        """Return the bytes of the last tokens, fewer if there are fewer."""
        return self.tokens[-num_tokens:].tobytes()

    def places(self, ending: bytes, most: int, least: int = 1) -> Places:
        """Return the newest places that the longest part of an ending has, NUM_PLACES at most.

        ending: the bytes of a sequence's last tokens; most: tokens that are told of what followed; least: the length
        below which no part is looked for. A place at the end of this history, which nothing follows yet, does not
        count. There are none where not even the shortest part of LENGTHS is found.
        """
        best, text = Places(0, []), self.tokens.tobytes()
        for length in reversed(LENGTHS):  # where a part is not found, no longer one is
            if length < least:
                continue
            if not (followers := _followers(text, ending, length, most, 1)):
                break
            best = Places(length, followers)
        if best.followers:
            best = Places(best.length, _followers(text, ending, best.length, most, NUM_PLACES))
        return best


def vote(histories: Iterable[TokenHistory], ending: bytes, most: int) -> Proposal:
    """Return what most of the newest places with the longest match in these texts went on with, as `Places.vote`.

    Of NUM_PLACES places, those of the first texts count as the newest. ending, most: as in `TokenHistory.places`.
    """
    if not votes.is_native():
        return gathered(histories, ending, most).vote()
    found = votes.vote([history.tokens for history in histories], ending, most, NUM_PLACES, _ASCENDING)
    if not found.token_ids:
        return NO_PROPOSAL
    return Proposal(found.token_ids, tuple(map(Vote, repeat(found.match), found.num_alike, found.num_voters)))


def gathered(histories: Iterable[TokenHistory], ending: bytes, most: int) -> Places:
    """Return the newest places with the longest match in these texts, NUM_PLACES at most."""
    best = Places(0, [])
    for history in histories:
        found = history.places(ending, most, max(best.length, 1))
        if found.length > best.length:
            best = found
        else:
            best.followers.extend(found.followers)
        if best.length == LENGTHS[0] and len(best.followers) >= NUM_PLACES:
            break
    return Places(best.length, best.followers[:NUM_PLACES])


def _followers(text: bytes, ending: bytes, length: int, most: int, num_places: int) -> list[bytes]:
    """Return the bytes of up to `most` tokens behind each newest place of an ending's last `length` tokens."""
    found: list[bytes] = []
    if length * TOKEN_BYTES > len(ending):
        return found
    part, limit = ending[-length * TOKEN_BYTES :], len(text) - TOKEN_BYTES
    while len(found) < num_places and (end := _find(text, part, limit)) >= 0:
        tokens = text[end : end + most * TOKEN_BYTES]
        if _BREAK in tokens:  # no other two tokens have its bytes between them
            tokens = tokens[: tokens.index(_BREAK)]
        if tokens:
            found.append(tokens)
        limit = end - TOKEN_BYTES
    return found


def _find(text: bytes, part: bytes, limit: int) -> int:
    """Return the end of the newest occurrence of whole tokens before `limit`; -1 without one."""
    at = text.rfind(part, 0, limit)
    for _ in range(_MAX_BETWEEN):
        if at <= 0 or not at % TOKEN_BYTES:
            break
        at = text.rfind(part, 0, at + len(part) - 1)
    return -1 if at < 0 or at % TOKEN_BYTES else at + len(part)
