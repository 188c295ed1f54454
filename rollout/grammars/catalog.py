"""The grammars of one engine, prepared at the first request with a grammar: other requests pay nothing for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from ..errors import GrammarError, LockstepError
from ..sampling_params import SamplingParams
from .cache import MAX_GRAMMARS, MAX_WAITING, GrammarCache, Promise
from .compiler import Constraint, GrammarCompiler, constraint_of
from .frames import CompilerSetup
from .jump_forward import MAX_ROLLBACK_TOKENS, JumpMode, plan_stretch
from .library import load_library
from .matcher import CompiledGrammar
from .process import CompilerProcess
from .state import GrammarState
from .token_text import FastTokenizer, TokenText

_NUM_STRETCHES = 4096  # forced texts whose canonical tokens are remembered
_SHARE_OF_ONE = 16  # a compiled grammar may take this part of the memory of all


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of the grammars of one engine."""

    max_grammars: int = MAX_GRAMMARS  # compiled ones that are kept
    max_waiting: int = MAX_WAITING  # grammars that wait to be compiled
    timeout_s: float = 20.0  # processor time to compile one
    num_bytes: int = 2**30  # memory to compile one; memory of all compiled ones


class Grammars:
    """Compile grammars and create the state of each sequence. Thread-safe."""

    def __init__(
        self,
        tokenizer: FastTokenizer | None,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        mode: JumpMode = "text",
        any_whitespace: bool = False,
        limits: GrammarLimits | None = None,
        max_rollback: int = MAX_ROLLBACK_TOKENS,
    ) -> None:
        """Create an empty catalog.

        mode: of requests that do not choose one. stop_token_ids: tokens that end a sequence.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._mode: JumpMode = mode
        self._any_whitespace = any_whitespace
        self._max_rollback = max_rollback
        self._limits = limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._text: TokenText | None = None
        self.cache = GrammarCache(
            lambda: _ForeignCompiler(self), limits.max_grammars, limits.max_waiting, limits.num_bytes
        )
        self._plan_stretch = lru_cache(_NUM_STRETCHES)(lambda forced: plan_stretch(forced, self._token_text()))

    def compiled(self, params: Iterable[SamplingParams]) -> list[CompiledGrammar | None]:
        """Return the grammar of each request, or None, waiting for missing ones.

        Raises GrammarError for a wrong grammar, and for any grammar if the engine has no tokenizer.
        """
        constraints = [constraint_of(one) for one in params]
        self._check_tokenizer(constraints)
        with _as_grammar_errors():
            return self.cache.get_all(constraints)

    def ask(self, params: Iterable[SamplingParams]) -> list[Promise]:
        """Start to compile the grammars of these requests; returns the unfinished ones.

        All of them wait together, or none: Overloaded is raised where too many wait already. Raises GrammarError as
        `compiled`, except for errors in a grammar that was not compiled before, and for more grammars than may wait.
        """
        constraints = [constraint_of(one) for one in params]
        self._check_tokenizer(constraints)
        different = list(filter(None, dict.fromkeys(constraints)))
        if len(different) > self._limits.max_waiting:
            raise GrammarError(
                f"{len(different)} different grammars are more than the {self._limits.max_waiting} that may wait to be "
                "compiled (max_waiting_grammars): send several requests"
            )
        if any(constraint not in self.cache for constraint in different):
            self.cache.check_turn()
        promises: list[Promise] = []
        try:
            with _as_grammar_errors():
                for constraint in different:
                    promises.append(self.cache.ask(constraint, in_turn=False))
        except (LockstepError, ValueError):
            self.cache.leave(promises)
            raise
        return [promise for promise in promises if not promise.done()]

    def leave(self, promises: Iterable[Promise]) -> None:
        """Wait no more for these grammars, which `ask` has returned."""
        self.cache.leave(promises)

    def state(self, grammar: CompiledGrammar, params: SamplingParams) -> GrammarState:
        """Create the state of a new sequence. Raises GrammarError if the grammar would not allow it a single token."""
        state = GrammarState(
            grammar,
            self._token_text(),
            cast(JumpMode, params.jump_forward or self._mode),
            self._plan_stretch,
            may_stop=not params.ignore_eos,
            max_rollback=self._max_rollback,
        )
        if state.is_over:
            raise GrammarError("the grammar allows the empty output only, and without a stop token nothing can end it")
        return state

    def setup(self) -> CompilerSetup:
        """Return the first message to a process that compiles for this engine."""
        limits, text = self._limits, self._token_text()
        return CompilerSetup(
            text.pieces,
            tuple(self._stop_token_ids),
            self._any_whitespace,
            limits.timeout_s,
            limits.num_bytes,
            limits.num_bytes // _SHARE_OF_ONE,
        )

    def restorer(self) -> GrammarCompiler:
        """Return the compiler of this process, which only restores grammars that another process has compiled."""
        text = self._token_text()
        with self._lock:
            if self._compiler is None:
                library = load_library()
                self._compiler = GrammarCompiler(
                    library, text, self._stop_token_ids, any_whitespace=self._any_whitespace
                )
            return self._compiler

    def close(self) -> None:
        """End the threads and the processes, without waiting for a compilation."""
        self.cache.close()

    def _check_tokenizer(self, constraints: Iterable[Constraint | None]) -> None:
        if any(constraints) and self._tokenizer is None:
            raise GrammarError("json_schema, regex, ebnf and structural_tag need a tokenizer: the engine has none")

    def _token_text(self) -> TokenText:
        with self._lock:
            if self._text is None:
                assert self._tokenizer is not None
                self._text = TokenText(self._tokenizer, self._vocab_size)
            return self._text


@contextmanager
def _as_grammar_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise GrammarError(str(error)) from error


class _ForeignCompiler:
    """The compilation of grammars in a process of its own, for one thread of the cache."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._process = CompilerProcess(grammars.setup)

    def __call__(self, constraint: Constraint) -> CompiledGrammar:
        """Compile one grammar. Raises ValueError with the error in it, or the limit that it met."""
        answer = self._process.compile(constraint)
        if answer.error is not None:
            raise ValueError(answer.error)
        restorer = self._grammars.restorer()
        return restorer.restore(answer.serialized, answer.bound, answer.nests, constraint)

    def close(self) -> None:
        """End the process; a compilation that runs raises EngineStopped."""
        self._process.close()
