"""Compiled grammars, and matchers that follow one token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .forced_text import ForcedText
from .shortest_text import ForcedBound


class Pieces(Protocol):
    """A vocabulary: the bytes that each token spells."""

    @property
    def pieces(self) -> Sequence[bytes]: ...


@dataclass(frozen=True)
class Vocabulary:
    """The part of a vocabulary that is the same for every grammar. Masks are those of `GrammarMatcher.mask`."""

    library: Any
    text: Pieces
    stop_token_ids: Sequence[int]
    no_text: np.ndarray  # tokens that are part of no UTF-8 text
    no_json: np.ndarray  # these, and control characters, which JSON text does not have
    after_lead: Mapping[int, np.ndarray]  # tokens that are not allowed after this byte
    byte_ids: np.ndarray  # int64 [256]: the token that spells this byte alone, -1: none


class CompiledGrammar:
    """A grammar that any number of sequences follow. Immutable."""

    def __init__(self, vocabulary: Vocabulary, compiled: Any, bound: ForcedBound, *, is_json: bool) -> None:
        self.vocabulary, self.bound, self.is_json = vocabulary, bound, is_json
        self._compiled = compiled
        self.num_bytes = int(compiled.memory_size_bytes())  # approximate size in memory

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that a model may generate once the grammar has ended."""
        return self.vocabulary.stop_token_ids

    def serialized(self) -> str:
        """Return the library's text of this grammar."""
        return str(self._compiled.serialize_json())

    def matcher(self) -> GrammarMatcher:
        """Create a matcher at the beginning of the grammar."""
        library = self.vocabulary.library
        matcher = library.GrammarMatcher(self._compiled, None, False, -1, None)
        banned = self.vocabulary.no_json if self.is_json else self.vocabulary.no_text
        return GrammarMatcher(matcher, self.vocabulary, banned, self.bound)


class GrammarMatcher:
    """The position of one sequence in its grammar. Not thread-safe."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, banned: np.ndarray, bound: ForcedBound) -> None:
        """Create a matcher that has accepted no token.

        banned: a mask of tokens that are never allowed.
        """
        self._matcher, self._vocabulary, self._banned = matcher, vocabulary, banned
        self._row = np.zeros((1, -(-len(vocabulary.text.pieces) // 32)), np.int32)  # filled anew for each mask
        self._forced = ForcedText(matcher, self._row, vocabulary.byte_ids, bound)
        self._last_bytes: list[int] = []  # last byte of each accepted token
        self._num_bytes = [0]  # length of the text before each accepted token, and after the last

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches the grammar; the grammar may allow more."""
        return bool(self._matcher.is_completed())

    @property
    def has_stopped(self) -> bool:
        """Whether a stop token was accepted: no token follows."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Accept one more token; returns whether the grammar allows it, and changes nothing if it does not."""
        is_accepted = bool(self._matcher.accept_token(token_id, False))
        if is_accepted:
            piece = self._vocabulary.text.pieces[token_id]
            self._last_bytes.append((piece or b"\0")[-1])
            self._num_bytes.append(self._num_bytes[-1] + len(piece))
        return is_accepted

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last tokens, as if they had never been accepted."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._last_bytes[-num_tokens:]
            del self._num_bytes[-num_tokens:]

    def forced(self) -> bytes:
        """Return the text that every continuation starts with, or its beginning if it may be very long.

        It may end, or begin, inside a character.
        """
        return self._forced.find(self._num_bytes[-1])

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next: one bit each, uint8 [4 * ceil(V / 32)], the first token in the lowest
        bit."""
        self._matcher.fill_next_token_bitmask(self._row, 0, False)
        mask = self._row[0].view(np.uint8) & ~self._banned
        if self._last_bytes and (wrong := self._vocabulary.after_lead.get(self._last_bytes[-1])) is not None:
            mask &= ~wrong
        return mask


def pack_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Build the mask of these ids, in the format of `GrammarMatcher.mask`."""
    bits = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")
