"""The grammars of one engine, prepared at the first request with a grammar: other requests pay nothing for them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import lru_cache
from typing import cast

from ..sampling_params import SamplingParams
from .cache import MAX_GRAMMARS, GrammarCache
from .compiler import CompiledGrammar, GrammarCompiler, constraint_of
from .jump_forward import MAX_ROLLBACK_TOKENS, JumpMode, plan_stretch
from .state import GrammarState
from .token_text import FastTokenizer, TokenText

_NUM_STRETCHES = 4096  # forced texts whose canonical tokens are remembered


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
        max_grammars: int = MAX_GRAMMARS,
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
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self.cache = GrammarCache(lambda constraint: self._ready().compile(constraint), max_grammars)
        self._plan_stretch = lru_cache(_NUM_STRETCHES)(lambda forced: plan_stretch(forced, self._ready().text))

    def compiled(self, params: Iterable[SamplingParams]) -> list[CompiledGrammar | None]:
        """Return the grammar of each request, or None, waiting for missing ones.

        Raises ValueError for a wrong grammar, and for any grammar if the engine has no tokenizer.
        """
        checked = list(params)
        self.ask(checked)
        return self.cache.get_all([constraint_of(one) for one in checked])

    def ask(self, params: Iterable[SamplingParams]) -> list[Future[CompiledGrammar]]:
        """Start to compile the grammars of these requests; returns the unfinished ones.

        Raises ValueError as `compiled`, except for errors in a grammar.
        """
        constraints = [constraint_of(one) for one in params]
        if any(constraints) and self._tokenizer is None:
            raise ValueError("json_schema, regex, ebnf and structural_tag need a tokenizer: the engine has none")
        promises = [self.cache.ask(constraint) for constraint in constraints if constraint is not None]
        return [promise for promise in promises if not promise.done()]

    def state(self, grammar: CompiledGrammar, params: SamplingParams) -> GrammarState:
        """Create the state of a new sequence. Raises ValueError if the grammar would not allow it a single token."""
        state = GrammarState(
            grammar,
            self._ready().text,
            cast(JumpMode, params.jump_forward or self._mode),
            self._plan_stretch,
            may_stop=not params.ignore_eos,
            max_rollback=self._max_rollback,
        )
        if state.is_over:
            raise ValueError("the grammar allows the empty output only, and without a stop token nothing can end it")
        return state

    def close(self) -> None:
        """End the threads."""
        self.cache.close()

    def _ready(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                assert self._tokenizer is not None
                text = TokenText(self._tokenizer, self._vocab_size)
                self._compiler = GrammarCompiler(text, self._stop_token_ids, any_whitespace=self._any_whitespace)
            return self._compiler
