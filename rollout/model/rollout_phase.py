"""Lend a trainer's module to the engine for a while: numerics, eval flags, no autograd; all restored afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from ..held_signals import Uninterrupted
from .forward_numerics import ForwardNumerics
from .phase_gate import PhaseGate
from .weight_forms import WeightForms

_AS_A_WHOLE = Uninterrupted()


class RolloutPhase:
    """The rollout phase of one module. Thread-safe; a phase may be entered while it is open.

    While the phase is open, other threads may borrow the module through a `PhaseGate`; its end waits for them.
    """

    def __init__(self, hosted: ForwardNumerics, *, owned: bool) -> None:
        """Start outside the phase. owned: the module is the engine's own, so no caller waits for its phase."""
        self.before_begin: Callable[[], None] = lambda: None  # may raise ValueError: the phase is refused
        self.before_end: Callable[[], None] = lambda: None
        self.num_begun = 0  # phases so far
        self._replaced_versions = 0  # of the code of numerics that were replaced
        self._hosted, self._owned = hosted, owned
        self._forms = None if owned else WeightForms(hosted.module)
        self._lock = threading.RLock()
        self._num_users = 0
        self._exit: ExitStack | None = None  # restores the module when the last user leaves; None outside the phase
        self._gate = PhaseGate()

    @property
    def is_open(self) -> bool:
        """Whether a user is in the phase."""
        return self._num_users > 0

    @property
    def is_set_up(self) -> bool:
        """Whether the module has the engine's numerics and flags, which it keeps until the phase has ended."""
        return self._exit is not None

    @property
    def code_version(self) -> int:
        """A number that grows when a phase finds the module's settings, forwards or hooks changed."""
        return self._replaced_versions + self._hosted.code.version

    @property
    def changed_code(self) -> tuple[str, ...]:
        """Names of the settings that changed last, or "forwards or hooks"."""
        return self._hosted.code.changed

    def entered(self, *, admits: bool) -> AbstractContextManager[None]:
        """Enter the phase. The last user to leave waits for the borrowers, calls `before_end`, and restores the module.

        Raises ValueError for a module whose layers, or whose parameters' dtypes or devices, are others than when it was
        hosted, or that `before_begin` refuses, and PhaseError for one that another engine uses; nothing has changed
        then.
        admits: False if borrowers must wait, because this user holds the engine's lock, which they would need.
        """
        return _Entered(self, admits)

    def enter(self, *, admits: bool) -> None:
        """Become a user of the phase until `leave`, as `entered` describes."""
        with self._lock:
            if self._exit is None:
                self.before_begin()
                self._set_up()
            self._num_users += 1
        if admits:
            self._gate.open()

    def leave(self, *, admits: bool) -> None:
        """End what `enter` began with an equal argument."""
        try:
            if admits:
                self._gate.close()
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = self._num_users == 0
            if is_last:
                self._end()

    @contextmanager
    def borrowed(self, what: str, timeout_s: float) -> Iterator[float]:
        """Wait for a phase and keep it open. Yields the seconds left. Re-entrant.

        Raises DeadlineExceeded if none began for `timeout_s`. The engine's own module is available at once.
        """
        if self._owned:
            yield timeout_s
        else:
            with self._gate.guest(what, timeout_s) as seconds_left:
                yield seconds_left

    def replace(self, make: Callable[[], ForwardNumerics]) -> ForwardNumerics:
        """Take the numerics off the module, and put on those that `make` returns, or the former if it raises.

        Meanwhile the module has its own forward and may be changed. No step is in flight.
        """
        with self._lock:
            is_set_up = self._exit is not None
            if self._exit is not None:
                self._exit.close()
            try:
                former, self._hosted = self._hosted, make()
                self._replaced_versions += former.code.version
            finally:
                if is_set_up:
                    self._set_up()
            return self._hosted

    def _set_up(self) -> None:
        module = self._hosted.module
        if self._forms is not None:
            self._forms.refuse_others()
        with ExitStack() as entered:
            entered.callback(self._forget_exit)
            entered.enter_context(self._hosted.installed())
            entered.enter_context(evaluated(module))
            self._hosted.code.look()  # last: a phase that is refused changes nothing
            self._exit = entered.pop_all()
        self.num_begun += 1

    def _end(self) -> None:
        try:
            # Without our lock: it waits for a step that may be running, and that step may read the phase.
            self.before_end()
        finally:
            with self._lock:
                if self._num_users == 0 and self._exit is not None:
                    self._exit.close()

    def _forget_exit(self) -> None:
        self._exit = None


class _Entered(AbstractContextManager[None]):
    """The context of `RolloutPhase.entered`, which each step enters: a class costs a third of a generator."""

    __slots__ = ("_admits", "_phase")

    def __init__(self, phase: RolloutPhase, admits: bool) -> None:
        self._phase, self._admits = phase, admits

    def __enter__(self) -> None:
        has_entered = False
        try:
            with _AS_A_WHOLE:  # an interrupt in between would leave the module half set up, or in use for good
                self._phase.enter(admits=self._admits)
                has_entered = True
        except BaseException:
            if has_entered:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with _AS_A_WHOLE:
            self._phase.leave(admits=self._admits)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Set a module's flags for evaluation; restores each when the context ends."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training
