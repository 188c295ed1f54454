"""A cache of grammars, each compiled once and outside the engine's loop: a request waits for no grammar but its own."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakSet

from ..errors import EngineStopped, GrammarsUnavailable, Overloaded
from ..giving_way import others_compute
from .compiler import Constraint
from .matcher import CompiledGrammar

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 256
MAX_WAITING = 64
MAX_BYTES = 2**30
MAX_TEXT_BYTES = 2**18
_NUM_THREADS = 2
_MAX_REFUSALS = 1024
_REFUSED_S = 600.0  # an error is remembered for so long
_RETRY_AFTER_S = 5.0
T = TypeVar("T")


class Compile(Protocol):
    """The compilation of one grammar. One thread uses it; `close` may be called by any."""

    def __call__(self, constraint: Constraint) -> CompiledGrammar:
        """Compile. Raises ValueError for a wrong grammar, EngineStopped after `close`."""

    def close(self) -> None:
        """End a compilation that runs."""


class Promise(Future[CompiledGrammar]):
    """A future grammar, and the number of callers that wait for it."""

    num_askers = 0


@dataclass(frozen=True)
class _Refusal:
    message: str
    until: float  # on the monotonic clock


class GrammarCache:
    """Keep the most recently used grammars, at most `max_grammars` and those that are being compiled. Thread-safe.

    The error of a wrong grammar is kept for a while too, so that a further request for it costs nothing.
    """

    def __init__(
        self,
        compiler: Callable[[], Compile],
        max_grammars: int = MAX_GRAMMARS,
        max_waiting: int = MAX_WAITING,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Create an empty cache.

        compiler: called once by each thread of the cache. max_bytes: of all grammars together, those included that only
        sequences hold.
        """
        assert max_grammars > 0
        self._make_compiler = compiler
        self._max_grammars, self._max_waiting, self._max_bytes = max_grammars, max_waiting, max_bytes
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Constraint, Promise] = OrderedDict()  # the longest unused first
        self._refusals: OrderedDict[tuple[str, bytes], _Refusal] = OrderedDict()
        self._alive: WeakSet[CompiledGrammar] = WeakSet()
        self._waiting: deque[Constraint] = deque()
        self._has_work = threading.Condition(self._lock)
        self._compilers: list[Compile] = []  # of the threads so far
        self._num_idle = 0
        self._is_closed = False
        self.num_hits = 0
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        return len(self._grammars)

    @property
    def num_bytes(self) -> int:
        """The memory of all compiled grammars that are in use or kept."""
        return sum(grammar.num_bytes for grammar in list(self._alive))

    def __contains__(self, constraint: Constraint) -> bool:
        """Return whether this grammar is compiled, or waits to be."""
        return constraint in self._grammars

    def check_turn(self) -> None:
        """Raise Overloaded if too many grammars wait."""
        if (num_waiting := len(self._waiting)) >= self._max_waiting:
            raise Overloaded(f"{num_waiting} grammars wait to be compiled (max_waiting_grammars)", _RETRY_AFTER_S)

    def ask(self, constraint: Constraint, *, in_turn: bool = True) -> Promise:
        """Return a promise of the compiled grammar. Raises ValueError for a text that is too long to compile, or that
        was refused before, Overloaded if the memory of grammars is used up, or, `in_turn`, if too many wait, and
        GrammarsUnavailable if no thread can be started."""
        if (size := len(constraint.text.encode(errors="surrogatepass"))) > MAX_TEXT_BYTES:
            raise ValueError(f"{constraint.kind}: {size} bytes of grammar, at most {MAX_TEXT_BYTES} are compiled")
        with self._lock:
            if (known := self._grammars.get(constraint)) is not None:
                self._grammars.move_to_end(constraint)
                self.num_hits += 1
                known.num_askers += 1
                return known
            self._raise_refusal(constraint)
            self._check_room(in_turn)
            if len(self._waiting) >= self._num_idle and len(self._compilers) < _NUM_THREADS:
                self._start_thread()  # before there is a promise that none would keep
            promise = self._grammars[constraint] = Promise()
            promise.num_askers = 1
            self._waiting.append(constraint)
            self._has_work.notify()
        return promise

    def _start_thread(self) -> None:
        """Start a thread that compiles. Raises GrammarsUnavailable where the system allows none, and none runs."""
        compiler: Compile | None = None
        try:
            compiler = self._make_compiler()
            # A daemon: neither `close` nor the end of the interpreter waits for a compilation.
            threading.Thread(target=self._run, args=[compiler], name="lockstep-grammar", daemon=True).start()
        except (OSError, RuntimeError) as error:
            if compiler is not None:
                compiler.close()
            if not self._compilers:
                raise GrammarsUnavailable(f"no thread that compiles grammars could be started: {error}") from error
            logger.warning("no further thread that compiles grammars could be started: %s", error)
            return
        self._compilers.append(compiler)

    def leave(self, promises: Iterable[Promise]) -> None:
        """Take back one `ask` for each promise. A grammar that no caller waits for any more is not compiled."""
        with self._lock:
            for promise in promises:
                promise.num_askers -= 1
            for constraint in [one for one in self._waiting if self._grammars[one].num_askers <= 0]:
                self._waiting.remove(constraint)
                self._grammars.pop(constraint).cancel()

    def get_all(self, constraints: Iterable[Constraint | None]) -> list[CompiledGrammar | None]:
        """Return the grammars of one call, waiting for missing ones, however many wait already.

        Equal constraints are compiled once, different ones in parallel. Raises ValueError naming every error in them.
        """
        faults: dict[str, None] = {}
        promises = [
            None if one is None else _kept(faults, partial(self.ask, one, in_turn=False)) for one in constraints
        ]
        grammars = [None if promise is None else _kept(faults, partial(_awaited, promise)) for promise in promises]
        if faults:
            raise ValueError("; ".join(faults))
        return grammars

    def close(self) -> None:
        """End its threads without waiting for them. Grammars that wait fail with EngineStopped."""
        with self._lock:
            self._is_closed = True
            left = [self._grammars.pop(constraint) for constraint in self._waiting]
            self._waiting.clear()
            self._has_work.notify_all()
        for promise in left:
            promise.set_exception(EngineStopped("the engine is closed"))
        for compiler in self._compilers:
            compiler.close()

    def _run(self, compile: Compile) -> None:
        while (constraint := self._next()) is not None:
            promise = self._grammars[constraint]
            started, grammar, fault = time.perf_counter(), None, None
            try:
                grammar = compile(constraint)
            except Exception as error:  # noqa: BLE001  # the thread's first frame: each caller raises it
                fault = error
            with self._lock:
                self.num_compiled += 1
                self.compile_seconds += time.perf_counter() - started
                if grammar is not None:
                    self._alive.add(grammar)
                else:
                    del self._grammars[constraint]
                    if isinstance(fault, ValueError):
                        self._refuse(constraint, str(fault))
            if grammar is not None:
                promise.set_result(grammar)
            else:
                promise.set_exception(fault)
            with self._lock:
                self._drop_unused()
            del grammar, promise, fault  # a thread that waits holds nothing

    def _next(self) -> Constraint | None:
        with self._lock:
            self._num_idle += 1
            while not self._waiting and not self._is_closed:
                self._has_work.wait()
            self._num_idle -= 1
            if self._is_closed:
                return None
            constraint = self._waiting.popleft()
            self._grammars[constraint].set_running_or_notify_cancel()  # from here on it cannot be cancelled
            return constraint

    def _check_room(self, in_turn: bool) -> None:
        if self._is_closed:
            raise EngineStopped("the engine is closed")
        if in_turn:
            self.check_turn()
        while self.num_bytes > self._max_bytes:
            if not self._drop_oldest():
                raise Overloaded(
                    f"the grammars in use take {self.num_bytes >> 20} MiB, at most {self._max_bytes >> 20} may be used "
                    "(grammar_memory_mb)", _RETRY_AFTER_S,
                )  # fmt: skip

    def _drop_unused(self) -> None:
        """Remove the longest unused of too many."""
        num_done = sum(promise.done() for promise in self._grammars.values())
        while num_done > self._max_grammars and self._drop_oldest():
            num_done -= 1

    def _drop_oldest(self) -> bool:
        """Remove the longest unused grammar; returns whether there was one."""
        oldest = next((key for key, promise in self._grammars.items() if promise.done()), None)
        if oldest is not None:
            del self._grammars[oldest]
        return oldest is not None

    def _refuse(self, constraint: Constraint, message: str) -> None:
        self._refusals[_digest(constraint)] = _Refusal(message, time.monotonic() + _REFUSED_S)
        while len(self._refusals) > _MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _raise_refusal(self, constraint: Constraint) -> None:
        refusal = self._refusals.get(key := _digest(constraint))
        if refusal is None:
            return
        if refusal.until > time.monotonic():
            raise ValueError(refusal.message)
        del self._refusals[key]


def _awaited(promise: Promise) -> CompiledGrammar:
    if promise.done():
        return promise.result()
    with others_compute():
        return promise.result()


def _kept(faults: dict[str, None], get: Callable[[], T]) -> T | None:
    """Return the result; None for a ValueError, whose message is added to the faults."""
    try:
        return get()
    except ValueError as error:
        faults[str(error)] = None
        return None


def _digest(constraint: Constraint) -> tuple[str, bytes]:
    return constraint.kind, hashlib.sha256(constraint.text.encode(errors="surrogatepass")).digest()
