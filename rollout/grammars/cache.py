"""A cache of grammars, each compiled once and outside the engine's loop: a request waits for no grammar but its own."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from .compiler import CompiledGrammar, Constraint

MAX_GRAMMARS = 256
MAX_TEXT_BYTES = 2**18
_NUM_THREADS = 2


class GrammarCache:
    """Keep the most recently used grammars, at most `max_grammars` and those that are being compiled. Thread-safe.

    A wrong grammar is not kept: a further request for it compiles it again and gets the error again.
    """

    def __init__(self, compile: Callable[[Constraint], CompiledGrammar], max_grammars: int = MAX_GRAMMARS) -> None:
        """Create an empty cache.

        compile: raises ValueError for a wrong grammar; runs on threads of the cache.
        """
        assert max_grammars > 0
        self._compile = compile
        self._max_grammars = max_grammars
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Constraint, Future[CompiledGrammar]] = OrderedDict()  # the longest unused first
        self._threads: ThreadPoolExecutor | None = None  # None until there is something to compile
        self.num_hits = 0
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self._grammars)

    def ask(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """Return a future of the compiled grammar. Raises ValueError for a text that is too long to compile."""
        if (size := len(constraint.text.encode())) > MAX_TEXT_BYTES:
            raise ValueError(f"{constraint.kind}: {size} bytes of grammar, at most {MAX_TEXT_BYTES} are compiled")
        with self._lock:
            if (known := self._grammars.get(constraint)) is not None:
                self._grammars.move_to_end(constraint)
                self.num_hits += 1
                return known
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_NUM_THREADS, "lockstep-grammar")
            promise = self._grammars[constraint] = self._threads.submit(self._timed, constraint)
        promise.add_done_callback(lambda done: self._settle(constraint, done))
        return promise

    def get_all(self, constraints: Iterable[Constraint | None]) -> list[CompiledGrammar | None]:
        """Return the grammars of one call, waiting for missing ones.

        Equal constraints are compiled once, different ones in parallel. Raises ValueError naming every error in them.
        """
        promises = [None if constraint is None else self.ask(constraint) for constraint in constraints]
        faults = {str(p.exception()): p.exception() for p in promises if p is not None and p.exception() is not None}
        for fault in faults.values():
            if fault is not None and not isinstance(fault, ValueError):
                raise fault
        if faults:
            raise ValueError("; ".join(faults))
        return [None if promise is None else promise.result() for promise in promises]

    def close(self) -> None:
        """End its threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _timed(self, constraint: Constraint) -> CompiledGrammar:
        started = time.perf_counter()
        try:
            return self._compile(constraint)
        finally:
            with self._lock:
                self.num_compiled += 1
                self.compile_seconds += time.perf_counter() - started

    def _settle(self, constraint: Constraint, done: Future[CompiledGrammar]) -> None:
        """Remove a wrong grammar, and the longest unused of too many."""
        with self._lock:
            is_kept = self._grammars.get(constraint) is done
            if is_kept and (done.cancelled() or done.exception() is not None):
                del self._grammars[constraint]
            finished = [key for key, promise in self._grammars.items() if promise.done()]
            for key in finished[: max(len(finished) - self._max_grammars, 0)]:
                del self._grammars[key]
