"""Compiled grammars, and matchers that follow one token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .forced_text import ForcedText
from .processor_time import thread_time
from .shortest_text import NO_BOUND, ForcedBound
from .vocabulary import Vocabulary, pack_ids

MAX_TOKEN_S = 0.25  # of processor time for one token of one sequence


class CompiledGrammar:
    """A grammar that any number of sequences follow. Immutable."""

    def __init__(
        self, vocabulary: Vocabulary, compiled: Any, bound: ForcedBound, nests: bool, *, is_json: bool,
        named: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Wrap a grammar of the library. named: tokens without text that it names."""
        self.vocabulary, self.bound, self.nests = vocabulary, bound, nests
        num_tokens = len(vocabulary.text.pieces)
        allowed = pack_ids((id for id in named if id < num_tokens), num_tokens) & vocabulary.silent
        self._banned = (vocabulary.no_json if is_json else vocabulary.no_text) & ~allowed
        self._compiled = compiled
        self.num_bytes = int(compiled.memory_size_bytes())  # approximate size in memory

    @property
    def names_tokens(self) -> bool:
        """Whether the grammar tells tokens apart that spell the same text."""
        return self.bound == NO_BOUND

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
        return GrammarMatcher(matcher, self.vocabulary, self._banned, self.bound, self.nests)


class GrammarMatcher:
    """The position of one sequence in its grammar. Not thread-safe.

    A grammar that nests may take any time for a byte. So its tokens are accepted byte by byte, and a matcher that takes
    too long is lost: it follows the text no more and allows every token. Its sequence must be ended.
    """

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, banned: np.ndarray, bound: ForcedBound, nests: bool = False
    ) -> None:
        """Create a matcher that has accepted no token.

        banned: a mask of tokens that are never allowed. nests: the grammar's.
        """
        self.is_lost = False
        self.limit_s = MAX_TOKEN_S  # of processor time to accept a token, and to find forced text
        self._nests = nests
        self._matcher, self._vocabulary, self._banned = matcher, vocabulary, banned
        self._row = np.zeros((1, -(-len(vocabulary.text.pieces) // 32)), np.int32)  # filled anew for each mask
        self._forced = ForcedText(matcher, self._row, vocabulary, banned, bound)
        self._names_tokens = bound == NO_BOUND
        self._last_bytes: list[int] = []  # last byte of each accepted token
        self._num_steps: list[int] = []  # of the library, for each accepted token
        self._num_bytes = [0]  # length of the text before each accepted token, and after the last

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches the grammar; the grammar may allow more."""
        return not self.is_lost and bool(self._matcher.is_completed())

    @property
    def has_stopped(self) -> bool:
        """Whether a stop token was accepted: no token follows."""
        return not self.is_lost and bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Accept one more token; returns whether the grammar allows it, and changes nothing if it does not."""
        piece = self._vocabulary.text.pieces[token_id]
        if self.is_lost:
            num_steps = 0
        elif self._nests and len(piece) > 1 and token_id not in self._vocabulary.stop_token_ids:
            num_steps = self._accept_bytes(piece)
            if self._names_tokens and not self.is_lost:  # it is known to take no longer, but the token may be named
                self._matcher.rollback(num_steps)
                num_steps = int(self._matcher.accept_token(token_id, False))
        else:
            num_steps = int(self._matcher.accept_token(token_id, False))
        if not (num_steps or self.is_lost):
            return False
        self._num_steps.append(num_steps)
        self._last_bytes.append((piece or b"\0")[-1])
        self._num_bytes.append(self._num_bytes[-1] + len(piece))
        return True

    def _accept_bytes(self, piece: bytes) -> int:
        """Accept a text byte by byte; returns the number of the library's steps, 0 if it is not allowed or took too
        long."""
        began = thread_time()
        for num_done in range(len(piece)):
            is_allowed = self._matcher.accept_string(piece[num_done : num_done + 1], False)
            self.is_lost = thread_time() - began > self.limit_s
            if not is_allowed or self.is_lost:
                self._matcher.rollback(num_done + is_allowed)
                return 0
        return len(piece)

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last tokens, as if they had never been accepted."""
        if num_tokens:
            if num_steps := sum(self._num_steps[-num_tokens:]):
                self._matcher.rollback(num_steps)
            del self._num_steps[-num_tokens:]
            del self._last_bytes[-num_tokens:]
            del self._num_bytes[-num_tokens:]

    def forced(self) -> bytes:
        """Return the text that every continuation starts with, or its beginning if it may be very long.

        It is made of whole characters; nothing where the text so far ends inside one.
        """
        if self.is_lost:
            return b""
        found = self._forced.find(self._num_bytes[-1], self.limit_s if self._nests else None)
        self.is_lost = self._forced.is_late
        return b"" if self.is_lost else found

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next: one bit each, uint8 [4 * ceil(V / 32)], the first token in the lowest
        bit."""
        if self.is_lost:
            return pack_ids(range(len(self._vocabulary.text.pieces)), len(self._vocabulary.text.pieces))
        self._matcher.fill_next_token_bitmask(self._row, 0, False)
        mask = self._row[0].view(np.uint8) & ~self._banned
        if self._last_bytes and (wrong := self._vocabulary.after_lead.get(self._last_bytes[-1])) is not None:
            mask &= ~wrong
        return mask


def allows(mask: np.ndarray, token_id: int) -> bool:
    """Return whether a mask, as `GrammarMatcher.mask` builds it, allows a token."""
    return bool(mask[token_id // 8] >> (token_id % 8) & 1)
