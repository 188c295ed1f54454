"""The position of one sequence in its grammar, and the next tokens that follow from it.

The state is a function of the output tokens: `follow` moves the matcher to them, forwards or back. So nothing has to be
undone here when a step fails, a sequence is preempted, or its end is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from .jump import NO_JUMP, Jump
from .jump_forward import MAX_ROLLBACK_TOKENS, JumpMode, cut_jump, plan_text_jump
from .matcher import CompiledGrammar
from .token_text import TokenText
from .vocabulary import pack_ids


class _Stretch(NamedTuple):
    """Canonical tokens of a forced text, which an output takes one after another."""

    start: int  # index of the output token that it begins with
    token_ids: tuple[int, ...]


class GrammarState:
    """The grammar state of one sequence. Not thread-safe.

    Under `exact` and `off` an output that reaches forced text continues with a planned stretch of canonical tokens, one
    by one or all at once; the next stretch is planned at the end of this one. So both modes use the same plans. Planned
    stretches are kept: an output that is taken back into one of them goes on with it.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        text: TokenText,
        mode: JumpMode,
        plan_stretch: Callable[[bytes], tuple[int, ...]],
        *,
        may_stop: bool = True,
        max_rollback: int = MAX_ROLLBACK_TOKENS,
    ) -> None:
        """Create the state of a sequence without output tokens.

        may_stop: whether a stop token ends the sequence; if not, only the grammar's end does. plan_stretch: the rule of
        `exact` and `off` for this vocabulary.
        """
        self.mode = mode
        self._grammar, self._may_stop = grammar, may_stop
        self._matcher, self._nests = grammar.matcher(), grammar.nests
        self.text = text
        self._plan_stretch = plan_stretch
        self._max_rollback = max_rollback
        self._banned = None if may_stop else pack_ids(grammar.stop_token_ids, len(text.pieces))
        self._followed: list[int] = []  # tokens that the matcher has accepted
        self.num_kept = 0  # first tokens of them that have stayed since a caller has set this to their number
        self._mask: np.ndarray | None = None  # mask of the token after them, computed at its first use
        self._stretches: list[_Stretch] = []  # in their order, up to the position that was followed furthest

    def begin_again(self) -> GrammarState:
        """Return the state of the same sequence without output tokens."""
        return GrammarState(
            self._grammar, self.text, self.mode, self._plan_stretch,
            may_stop=self._may_stop, max_rollback=self._max_rollback,
        )  # fmt: skip

    def follow(self, output_ids: Sequence[int], start: int = 0) -> None:
        """Move to the position after these tokens, all of which the grammar allowed.

        start: the output token that they begin with. The state must stand behind all tokens before it, or further:
        these are not compared, so that a token does not cost more the longer the output is.
        """
        followed = self._followed
        assert start <= len(followed), f"the state has followed {len(followed)} tokens, not {start}"
        there = followed[start:]
        num_same = len(there)
        if there != list(output_ids[:num_same]):
            pairs = zip(there, output_ids, strict=False)
            num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(num_same, len(output_ids)))
            self.num_kept = min(self.num_kept, start + num_same)
            self._matcher.roll_back(len(there) - num_same)
            del followed[start + num_same :]
            self._mask = None
        for index, id in enumerate(output_ids[num_same:]):
            if index and self.mode == "off":
                self._rest_of_stretch()  # as if each of these tokens had been waited for: plans are made on the way
            accepted = self._matcher.accept(id)
            assert accepted, f"the grammar refuses token {id} after {len(followed)} that it took"
            followed.append(id)
            self._mask = None

    @property
    def nests(self) -> bool:
        """Whether a rule of the grammar recurs in the middle, so that a token may take any time."""
        return self._nests

    @property
    def is_lost(self) -> bool:
        """Whether the grammar took too long for a token, so that it constrains no more."""
        return self._matcher.is_lost

    def limit(self, seconds: float) -> None:
        """Let each further token take so much processor time; 0: it follows no further token."""
        self._matcher.limit_s = seconds
        if seconds <= 0:
            self._matcher.is_lost, self._mask = True, None

    @contextmanager
    def looking_ahead(self, seconds: float) -> Iterator[None]:
        """Follow tokens that may never come; afterwards the state is as before, also where one of them took too long.

        seconds: of processor time that each of them may take. The state must not be lost.
        """
        assert not self.is_lost
        start, tail = self._tail()
        num_kept, self.num_kept = self.num_kept, len(self._followed)
        stretches, limit_s = list(self._stretches), self._matcher.limit_s
        self._matcher.limit_s = seconds
        try:
            yield
        finally:
            assert self.num_kept >= start, "no more tokens than those of the tail are taken back"
            self._matcher.is_lost, self._mask, self._stretches = False, None, stretches
            self.follow(tail, start)
            self._matcher.limit_s, self.num_kept = limit_s, num_kept

    @property
    def is_over(self) -> bool:
        """Whether no token can follow, not even a stop token."""
        return not self._next_mask().any()

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches the grammar."""
        return self._matcher.is_complete

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next, as `GrammarMatcher.mask`; inside a canonical stretch only its next
        token."""
        if self.mode == "text" or not (stretch := self._rest_of_stretch()):
            return self._next_mask()
        return pack_ids(stretch[:1], len(self.text.pieces))

    def plan(self, max_output: int, *, follows_jump: bool) -> Jump:
        """Plan the jump here, after which there are at most `max_output` output tokens. Moves the state behind it.

        It is a function of the followed tokens and these arguments. follows_jump: the last token was sampled after a
        jump, so that under `text` it may join the tokens before it. At least one token is left to be sampled.
        """
        if self.mode == "off":
            return NO_JUMP
        start, tail = self._tail()
        room = max_output - len(self._followed)
        jump = self._plan_text(follows_jump) if self.mode == "text" else self._plan_exact(room)
        jump = self._cut(jump, tail, start, max_output)
        if jump and self.is_over:
            jump = self._cut(jump, tail, start, len(self._followed) - 1)
        return jump

    def _tail(self) -> tuple[int, list[int]]:
        """Return the last followed tokens, which are all that a jump may replace, and the number of those before."""
        start = max(len(self._followed) - self._max_rollback, 0)
        return start, self._followed[start:]

    def _cut(self, jump: Jump, tail: list[int], start: int, max_output: int) -> Jump:
        """Cut a jump after the output that ends with `tail` to at most `max_output` output tokens. Moves the state
        behind it. start: the number of tokens before the tail."""
        num_left = start + len(tail) - jump.num_rolled_back
        jump = cut_jump(jump, tail, max_output - num_left, self.text)
        self.follow([*tail[: len(tail) - jump.num_rolled_back], *jump.token_ids], start)
        return jump

    def _plan_exact(self, max_tokens: int) -> Jump:
        """Return the stretches that follow here, up to `max_tokens` tokens. Moves the state behind them."""
        tokens: list[int] = []
        while len(tokens) < max_tokens and (stretch := self._rest_of_stretch()):
            taken = stretch[: max_tokens - len(tokens)]
            self.follow(taken, len(self._followed))
            tokens += taken
        return Jump(0, tuple(tokens)) if tokens else NO_JUMP

    def _plan_text(self, follows_jump: bool) -> Jump:
        """Plan a jump by rule `text` from the forced text and the last tokens."""
        forced = self._matcher.forced()
        if not forced and not follows_jump:
            return NO_JUMP
        jump = plan_text_jump(self._followed, forced, self.text, self._max_rollback)
        return jump if not (jump and self._grammar.names_tokens) or self._takes(jump) else NO_JUMP

    def _takes(self, jump: Jump) -> bool:
        """Return whether the grammar, which tells tokens of the same text apart, takes those of a jump."""
        start = len(self._followed) - jump.num_rolled_back
        replaced = self._followed[start:]
        self.follow((), start)
        num_taken = next((i for i, id in enumerate(jump.token_ids) if not self._matcher.accept(id)), None)
        self._matcher.roll_back(len(jump.token_ids) if num_taken is None else num_taken)
        self.follow(replaced, start)
        return num_taken is None

    def _next_mask(self) -> np.ndarray:
        if self._mask is None:
            if self._matcher.has_stopped:
                self._mask = pack_ids((), len(self.text.pieces))
            else:
                self._mask = self._matcher.mask()
                if self._banned is not None:
                    self._mask &= ~self._banned
        return self._mask

    def _rest_of_stretch(self) -> tuple[int, ...]:
        """Return the rest of the stretch here; plan a new one if it has ended or the output has left it."""
        position, stretches = len(self._followed), self._stretches
        while stretches and stretches[-1].start > position:
            stretches.pop()
        if stretches:
            start, tokens = stretches[-1]
            num_done = position - start
            if num_done < len(tokens) and tuple(self._followed[start:]) == tokens[:num_done]:
                return tokens[num_done:]
        if tokens := self._plan_stretch(self._matcher.forced()):
            stretches.append(_Stretch(position, tokens))
        return tokens
