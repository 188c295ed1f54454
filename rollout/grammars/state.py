"""The position of one sequence in its grammar, and the next tokens that follow from it.

The state is a function of the output tokens: `follow` moves the matcher to them, forwards or back. So nothing has to be
undone here when a step fails, a sequence is preempted, or its end is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .jump import NO_JUMP, Jump
from .jump_forward import MAX_ROLLBACK_TOKENS, JumpMode, plan_text_jump
from .matcher import CompiledGrammar, pack_ids
from .token_text import TokenText


class GrammarState:
    """The grammar state of one sequence. Not thread-safe.

    Under `exact` and `off` an output that reaches forced text continues with a planned stretch of canonical tokens, one
    by one or all at once; the next stretch is planned at the end of this one. So both modes use the same plans.
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
        self.wants_retokenisation = False  # under `text`: the newest token came after a jump
        self._matcher = grammar.matcher()
        self.text = text
        self._plan_stretch = plan_stretch
        self._max_rollback = max_rollback
        self._banned = None if may_stop else pack_ids(grammar.stop_token_ids, len(text.pieces))
        self._followed: list[int] = []  # tokens that the matcher has accepted
        self._mask: np.ndarray | None = None  # mask of the token after them, computed at its first use
        self._stretch: tuple[int, ...] = ()
        self._stretch_start = 0  # index of the output token that it begins with

    def follow(self, output_ids: Sequence[int]) -> None:
        """Move to the position after these tokens, all of which the grammar allowed."""
        followed = self._followed
        num_same = len(followed)
        if followed != list(output_ids[:num_same]):
            pairs = zip(followed, output_ids, strict=False)
            num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(num_same, len(output_ids)))
            self._matcher.roll_back(len(followed) - num_same)
            del followed[num_same:]
            self._mask = None
        for id in output_ids[num_same:]:
            accepted = self._matcher.accept(id)
            assert accepted, f"the grammar refuses token {id} after {len(followed)} that it took"
            followed.append(id)
            self._mask = None

    @property
    def is_lost(self) -> bool:
        """Whether the grammar took too long for a token, so that it constrains no more."""
        return self._matcher.is_lost

    def limit(self, seconds: float) -> None:
        """Let each further token take so much processor time; 0: it follows no further token."""
        self._matcher.limit_s = seconds
        if seconds <= 0:
            self._matcher.is_lost, self._mask = True, None

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

    def plan_exact(self, max_tokens: int) -> Jump:
        """Return the stretches that follow here, up to `max_tokens` tokens. Moves the state behind them."""
        tokens: list[int] = []
        while len(tokens) < max_tokens and (stretch := self._rest_of_stretch()):
            taken = stretch[: max_tokens - len(tokens)]
            self.follow([*self._followed, *taken])
            tokens += taken
        return Jump(0, tuple(tokens)) if tokens else NO_JUMP

    def plan_text(self) -> Jump:
        """Plan a jump by rule `text` from the forced text and the last tokens. Changes nothing."""
        forced = self._matcher.forced()
        if not forced and not self.wants_retokenisation:
            return NO_JUMP
        return plan_text_jump(self._followed, forced, self.text, self._max_rollback)

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
        num_done = len(self._followed) - self._stretch_start
        is_inside = 0 <= num_done < len(self._stretch)
        if not is_inside or tuple(self._followed[self._stretch_start :]) != self._stretch[:num_done]:
            self._stretch, self._stretch_start = self._plan_stretch(self._matcher.forced()), len(self._followed)
            num_done = 0
        return self._stretch[num_done:]
