"""A sequence, its states, and the one function that moves it from state to state."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum
from operator import attrgetter

from ..errors import IllegalTransition
from ..grammars.jump import Jump


class State(Enum):
    """The state of a sequence."""

    WAITING = "waiting"  # arrived, holds no block
    RUNNING = "running"  # holds blocks, is in the step being run
    PAUSED = "paused"  # holds blocks, between two steps
    WAITING_PREEMPT = "waiting_preempt"  # gave its blocks back, keeps its tokens
    FINISHED = "finished"  # terminal: answered, holds no block
    IGNORED = "ignored"  # terminal: could never have run; answered with the reason

    __hash__ = object.__hash__  # members are singletons; Enum's own __hash__ is Python code that hashes the name


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.IGNORED, State.FINISHED}),
    State.RUNNING: frozenset({State.PAUSED, State.WAITING_PREEMPT, State.FINISHED}),
    State.PAUSED: frozenset({State.RUNNING, State.WAITING_PREEMPT, State.FINISHED}),
    State.WAITING_PREEMPT: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
    State.IGNORED: frozenset(),
}

HOLDS_BLOCKS = frozenset({State.RUNNING, State.PAUSED})
TERMINAL = frozenset({State.FINISHED, State.IGNORED})


class Sequence:
    """The tokens, progress and state of one sequence, in either manager.

    The two progress counters differ only in a pipeline: `num_tokens_step_processed` counts tokens that went through
    all stages (output and stop conditions read it), `num_tokens_stage_processed` tokens that went through this stage,
    so that chunk k+1 may enter the first stage while chunk k is in the second.
    """

    __slots__ = (
        "id",
        "token_ids",
        "num_prompt_tokens",
        "num_tokens_step_processed",
        "num_tokens_stage_processed",
        "has_jump",
        "_state",
        "_replaced",
        "_num_jumped",
        "newest_replaced",
        "num_tokens_kept",
        "num_cuts",
    )

    def __init__(self, id: str, prompt_ids: SequenceOf[int]) -> None:
        self.id = id
        self.token_ids: list[int] = list(prompt_ids)  # the prompt, then the generated tokens
        self.num_prompt_tokens = len(self.token_ids)  # never changes, not at a preemption either
        self.num_tokens_step_processed = 0
        self.num_tokens_stage_processed = 0
        self._state = State.WAITING
        self.has_jump = False  # an unsettled one
        self._replaced: list[int] | None = None  # tokens that it replaces; None without one
        self._num_jumped = 0  # tokens of that jump
        self.newest_replaced: tuple[int, ...] = ()  # tokens that the jump settled last has replaced
        # First tokens that have stayed since the grammar's state, which sets this to their number, has followed them.
        self.num_tokens_kept = self.num_prompt_tokens
        self.num_cuts = 0  # how often tokens were dropped: between two of them the list only grows

    # Read several times a step, for which a getter of the interpreter's own takes a third of a function's time.
    state: State = property(attrgetter("_state"))  # type: ignore[assignment]

    def move(self, to: State) -> None:
        """Enter state `to`. The only writer of the state.

        Raises IllegalTransition, and changes nothing, if the present state does not allow it.
        """
        if to not in TRANSITIONS[self._state]:
            raise IllegalTransition(f"sequence {self.id!r} is {self._state.name} and cannot become {to.name}")
        self._state = to

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def jump_start(self) -> int | None:
        """The index of the unsettled jump's first token; None without such a jump."""
        return None if self._replaced is None else len(self.token_ids) - self._num_jumped

    def settled_output(self, first: int = 0) -> list[int]:
        """Return the output from its token number `first` on, without an unsettled jump."""
        if self._replaced is None:
            return self.token_ids[self.num_prompt_tokens + first :]
        settled = self.token_ids[self.num_prompt_tokens : self.jump_start] + self._replaced
        return settled[first:]

    def begin_jump(self, num_rolled_back: int, token_ids: SequenceOf[int]) -> None:
        """Replace the last `num_rolled_back` output tokens by these, until `settle_jump` or `undo_jump`.

        The KV of the replaced tokens must have been given up.
        """
        assert self._replaced is None and 0 <= num_rolled_back <= self.num_output_tokens, self
        start = self.num_tokens - num_rolled_back
        assert self.num_tokens_stage_processed <= start, self
        self.has_jump, self._replaced, self._num_jumped = True, self.token_ids[start:], len(token_ids)
        if num_rolled_back:
            self.cut(start)
        self.token_ids += token_ids

    def settle_jump(self) -> Jump:
        """Make the unsettled jump, which there is, final. Returns it."""
        assert self._replaced is not None, self
        jump = Jump(len(self._replaced), tuple(self.token_ids[self.jump_start :]))
        self.newest_replaced = tuple(self._replaced)
        self.has_jump, self._replaced, self._num_jumped = False, None, 0
        return jump

    def undo_jump(self) -> None:
        """Restore the tokens before the unsettled jump, if there is one. Call `forget_progress` with it."""
        if self._replaced is not None:
            self.cut(len(self.token_ids) - self._num_jumped)
            self.token_ids += self._replaced
            self.has_jump, self._replaced, self._num_jumped = False, None, 0

    def cut(self, num_tokens: int) -> None:
        """Drop the tokens after the first `num_tokens`. Their progress is not changed."""
        self.num_tokens_kept = min(self.num_tokens_kept, num_tokens)
        self.num_cuts += 1
        del self.token_ids[num_tokens:]

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens other than the last one still lack KV at this stage."""
        return self.num_tokens_stage_processed < len(self.token_ids) - 1

    @property
    def is_terminal(self) -> bool:
        return self._state in TERMINAL

    def stage_processed(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens through this stage. The total never exceeds the known tokens."""
        self.num_tokens_stage_processed += num_tokens
        assert num_tokens > 0 and self.num_tokens_stage_processed <= len(self.token_ids), self

    def step_processed(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens through all stages. The total never exceeds this stage's."""
        self.num_tokens_step_processed += num_tokens
        assert num_tokens > 0 and self.num_tokens_step_processed <= self.num_tokens_stage_processed, self

    def processed(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens through this stage and through all: with one stage, or from the cache."""
        self.num_tokens_stage_processed += num_tokens
        self.num_tokens_step_processed += num_tokens
        is_known = self.num_tokens_step_processed <= self.num_tokens_stage_processed <= len(self.token_ids)
        assert num_tokens > 0 and is_known, self

    def give_up_progress(self, num_tokens: int) -> None:
        """Limit both counters to `num_tokens`: later tokens will be computed again."""
        self.num_tokens_step_processed = min(self.num_tokens_step_processed, num_tokens)
        self.num_tokens_stage_processed = min(self.num_tokens_stage_processed, num_tokens)

    def forget_progress(self) -> None:
        """Set both counters to zero, for freed blocks. Tokens and prompt boundary stay."""
        self.num_tokens_step_processed = 0
        self.num_tokens_stage_processed = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id!r}, {self._state.name}, prompt={self.num_prompt_tokens}, tokens={self.num_tokens}, "
            f"step={self.num_tokens_step_processed}, stage={self.num_tokens_stage_processed})"
        )
