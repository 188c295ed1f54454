"""The driver of an engine's steps and commands: one lock, one inbox, at most one thread.

The lock is held during each step and released in between; a command runs under it with no step in flight. A call that
waits for an answer runs the steps itself, unless `start()` has begun a thread that runs them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ..completion import FinishReason
from ..errors import EngineStopped, SamplingRefused
from ..loop.answers import Answers
from ..loop.gate import StepGate
from ..loop.on_host import on_host
from ..loop.parts import Parts
from .before_sampling import BeforeSampling
from .command_runner import CommandRunner
from .desk.inbox import Inbox
from .fair_lock import FairLock
from .long_waits import LongWaits
from .own_process import OwnProcess
from .shared_step import KeptPhase, SharedStep
from .turn import Turn
from .waiters import Kick, Waiters

logger = logging.getLogger(__name__)
T = TypeVar("T")
SLICE = 256  # requests that arrive, or that a caller leaves, between two steps: many more would delay the next step


class Driver:
    """Run steps and commands of one engine, from any thread."""

    def __init__(self, parts: Parts, gate: StepGate, inbox: Inbox, answers: Answers) -> None:
        self.process = OwnProcess()
        self.lock = FairLock()
        self._waiters = Waiters(self.lock)
        self._turn = Turn()
        self._kick = Kick()  # of the newest thread; given by every change that it may wait for
        self._model, self._ranks, self._reports = parts.model, parts.ranks, parts.reports
        self._most_steps = parts.config.num_scheduler_steps
        self.inbox = inbox
        inbox.between_steps = self._between_steps
        self._gate, self._loop, self._answers = gate, gate.loop, answers
        self.kept_phase = kept = KeptPhase(self.lock, parts.model.phase, self.process)
        self._commands = CommandRunner(self.lock, parts, self._loop, inbox, self.take_posted, self._wake, kept)
        self.once_per_id = self._commands.once_per_id
        self._long_waits = LongWaits(lambda: gate.why_not)
        self._before_sampling = BeforeSampling(parts.model, gate, lambda: self.has_work)
        self._shared_step = SharedStep(self._settle_and_step)
        self._thread: threading.Thread | None = None  # runs the steps, once started
        self._failure: Exception | None = None  # the error that ended the thread
        self.is_closed = False  # no step runs any more; the inbox is closed before
        self._step_began: float | None = None  # of time.monotonic(); None while no step runs
        self._model.before_phase_ends = self.drain
        self._loop.failed_steps.has_thread = lambda: self.is_started
        self._ranks.on_loss.append(self._on_loss)

    def check_open(self) -> None:
        """Raise EngineStopped from the begin of `Engine.close` on, and ForkedProcess in a fork."""
        self.process.check()
        if self.inbox.is_closed:
            raise EngineStopped("the engine is closed: make another one")

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or a step's output is not delivered yet."""
        return bool(self.inbox) or self._loop.has_work

    def kick(self) -> None:
        """Wake the loop's thread, which may wait for a change that the caller has made."""
        self._kick.give()

    def look(self, read: Callable[[], T]) -> T:
        """Call `read` under the lock. Steps may be in flight, and posted requests in the inbox: thousands would keep
        the lock for long if they were queued here."""
        self.process.check()
        with self.lock:
            return read()

    def take_inbox(self, limit: int | None = None) -> None:
        """Queue the posted requests, at most `limit`, and answer those that are aborted. The caller holds the lock."""
        for request in self.inbox.hand_over(self._loop.queue, limit):
            if request.aborted is not None:  # answered when the inbox has its id no more: it may come again at once
                self._loop.abort(request, request.aborted)

    def take_posted(self) -> None:
        """Queue all requests that are posted by now. Between slices of them other threads have the engine, and steps
        run, unless an outer block of the caller holds the lock."""
        for at in range(0, len(self.inbox), SLICE):
            if at:
                self.lock.give_way()
            self.take_inbox(SLICE)

    def take_back(self, ids: Iterable[str]) -> None:
        """Remove those of these requests that are not queued yet, which count as aborted."""
        with self.lock:
            taken = self.inbox.take_back(ids)
            for request in taken:
                request.finish_reason = FinishReason("abort", message="the caller went away")
                self._reports.on_queued(request)
                self._reports.on_answer(request)
            if taken:  # each call lets go of its requests in the end, and most have ended by themselves
                self._wake()

    # -- health, without waiting -------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether a thread runs the steps."""
        return self._thread is not None

    @property
    def failure(self) -> Exception | None:
        """The error that ended the loop's thread; None: no error."""
        return self._failure

    @property
    def heartbeat(self) -> float:
        """The begin of the running step, of time.monotonic(); without one the time now.

        A loop that is idle, paused, or waits for its phase is healthy.
        """
        began = self._step_began
        return time.monotonic() if began is None else began

    # -- steps ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Call `before_sampling` (it commits a pending weight update, say) if a step is about to run.

        Opens the rollout phase. The caller does not hold the lock: the call may wait for threads that need it. Raises
        SamplingRefused where it cannot succeed yet.
        """
        self.check_open()
        self._before_sampling.run()

    def run_step(self, then: Callable[[], T], most: int = 1) -> T:
        """Run one step in this thread, or up to `most` decode steps, and return `then()`, called before another thread
        has the lock. Runs nothing while paused, or without requests. The caller has checked that the process is the
        engine's. Raises ValueError for another number than a positive integer."""
        if type(most) is not int or most < 1:
            raise ValueError(f"most must be a positive integer, not {most!r}")
        phase = self._model.phase
        with self.lock:
            phase.enter(admits=False)  # a borrower would need the lock
            try:
                self.take_inbox(SLICE)
                self._step(most)
            finally:
                self._waiters.wake_done()
                phase.leave(admits=False)
            self.lock.call_handlers()  # before the answers are taken, which would be lost
            return then()

    def start(self) -> None:
        """Start a thread that runs the steps. Does nothing if it is started already."""
        self.check_open()
        with self.lock:
            self.kept_phase.end()
            if self._thread is None:
                self._failure = None
                self._kick = kick = Kick()  # its own: a stopped thread may not have seen the one that stops it
                self._thread = threading.Thread(target=self._run, args=(kick,), name="lockstep-loop", daemon=True)
                self._thread.start()
                self._waiters.wake_all()

    def stop(self) -> None:
        """End that thread after its current step."""
        self.process.check()
        with self.lock:
            thread, self._thread = self._thread, None
            self._kick.give()
            self._waiters.wake_all()
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """End the thread of coroutines' steps. No step runs afterwards."""
        with self.lock:
            self.is_closed = True
            self._waiters.wake_all()
        self._shared_step.close()

    def _on_loss(self) -> None:
        """Wake all waiting threads after the loss of a rank, so that they notice it. Called from any thread."""
        with self.lock:
            self._kick.give()
            self._waiters.wake_all()

    def _run(self, kick: Kick) -> None:
        me = threading.current_thread()
        try:
            while self._thread is me:
                kick.forget()  # before the check: a later change is noticed in the next round
                try:
                    self._before_sampling.run_in_phase()
                except SamplingRefused as refused:  # the call that lifts the refusal kicks
                    logger.warning("requests wait: %s", refused)
                with self.lock:
                    self._ranks.check()
                    self.take_inbox(SLICE)
                    if self._thread is me:
                        self._ring()  # also where no step can run
                    is_mine = self._thread is me and self._model.in_rollout_phase
                    if is_ready := is_mine and self._gate.can_step:
                        self._long_waits.end()
                        self._step(self._most_steps)
                        self._waiters.wake_done()
                if not is_ready and self._thread is me:  # `stop` may have kicked before the kick was cleared
                    kick.wait(self._long_waits.seconds_left())
                    self._long_waits.tell()
        except Exception as error:
            logger.exception("the loop has ended")
            stopped = EngineStopped("the engine's loop has ended")
            stopped.__cause__ = error
            with self.lock:
                with self.inbox.lock:
                    self._failure, self._thread = error, None
                self._answers.on_failure(stopped)
                self._waiters.wake_all()

    def _step(self, most: int) -> None:
        self.inbox.before_next()
        self._step_began = time.monotonic()
        try:
            with on_host():
                self._gate.step(most)
            self._ring()
        finally:
            self._step_began = None

    def _between_steps(self) -> bool:
        """Note that the next step of a schedule would begin; return whether another thread waits for the lock."""
        self._step_began = time.monotonic()
        return self.lock.is_wanted()

    def _ring(self) -> None:
        """Run the alarm's callback if it is due. The caller holds the lock."""
        alarm, metrics = self.inbox.alarm, self._reports.metrics
        if alarm.is_due(metrics.num_steps):
            self._loop.drain()
            alarm.ring(metrics.num_steps)
            self._waiters.wake_all()

    def drain(self) -> None:
        """Finish all launched steps and wake the callers that wait for their results."""
        self.process.check()
        with self.lock:
            self._loop.drain()
            self._waiters.wake_all()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Return when `is_done()`. Where no thread runs the steps, one of the callers that wait does, for all."""
        self.process.check()
        self._kick.give()  # the rollout phase may have begun with this call
        try:
            while not self._wait_a_step(is_done):
                if self._turn.is_mine:
                    self._before_sampling.run()
        finally:
            self._pass_turn()

    def _wait_a_step(self, is_done: Callable[[], bool], until: Callable[[], bool] | None = None) -> bool:
        """Return True if `is_done()`; else run one schedule, or, where another thread runs them, wait for a change.

        until: the condition for which such a thread is to wake this one; None: is_done.
        """
        with self.lock:
            if is_done():
                return True
            self._check_alive()
            mine = self._thread is None and self._gate.pause_mode is None and self._turn.take()
            if mine and self._gate.before_sampling is None:  # else that comes first, without the lock
                self.run_step(lambda: None, self._most_steps)
            elif not mine:
                if self._gate.pause_mode is not None and self._thread is None:
                    logger.warning("paused (%s): waiting for continue_generation", self._gate.pause_mode)
                self._turn.give_back()
                self._waiters.wait(until or is_done)
            return False

    def _pass_turn(self) -> None:
        """Let another thread that waits run the steps, if this one did, or was woken to do so."""
        if not self._turn.is_mine and not (self._turn.is_free and self._thread is None):
            return  # who has it passes it on later
        self._turn.give_back()
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self.lock:
                    self._wake()
            except KeyboardInterrupt as another:  # were none woken, the others would wait for ever
                interrupt = another
            else:
                break
        if interrupt is not None:
            raise interrupt

    def _check_alive(self) -> None:
        """Raise the error for which no step will run any more."""
        if self.is_closed:
            self.check_open()
        self._ranks.check()
        if self._failure is not None:
            raise EngineStopped("the engine's loop has ended") from self._failure

    async def progress(self, is_done: Callable[[], bool]) -> None:
        """Wait in a coroutine for one step; or, where a thread runs them, until `is_done()` or another change."""
        self.process.check()
        step = self._shared_step.join() if self._thread is None else None
        if step is not None:
            await asyncio.shield(asyncio.wrap_future(step))
            return
        self._kick.give()  # the rollout phase may have begun with this call
        await self._waiters.wait_in_coroutine(is_done, lambda: self._thread is not None)
        if not is_done():
            self._check_alive()

    def _settle_and_step(self) -> None:
        self._before_sampling.run()
        # Then `progress` looks who has an answer, or waits for the thread that was started meanwhile.
        with self.lock:
            if self._gate.pause_mode is None and self._thread is None and not self.is_closed:
                self.kept_phase.keep()
        try:
            self._wait_a_step(lambda: self.is_closed or self._thread is not None, until=lambda: True)
        finally:
            self._pass_turn()

    def _wake(self) -> None:
        """Wake the callers whom a change may concern. The caller holds the lock."""
        self._waiters.wake_done()
        if self._thread is None and self._turn.is_free:
            self._waiters.wake_one()  # it takes the turn

    # -- commands ---------------------------------------------------------------------------------------------------

    def command(
        self, name: str, run: Callable[[], T], op_id: str | None = None, timeout_s: float | None = None,
        **arguments: object,
    ) -> T:  # fmt: skip
        """Call `run` between two steps, with no step in flight. A call repeated under its op_id runs once.

        Raises ValueError for a wrong timeout, DeadlineExceeded if `timeout_s` passed before it began,
        OpIdTaken for an op_id that names another call, and the errors of `run`.
        """
        self.process.check()
        try:
            return self._commands.run(name, run, op_id, timeout_s, arguments)
        finally:
            self._kick.give()

    def control(
        self, name: str, run: Callable[[], T], op_id: str | None = None, timeout_s: float | None = None,
        **arguments: object,
    ) -> T:  # fmt: skip
        """Run a command of the controller. Raises ValueError, naming the command, on a rank that follows."""
        self._ranks.check_controller(name)
        return self.command(name, run, op_id, timeout_s, **arguments)

    def give_way(self) -> None:
        """Let steps, reports and other commands run inside a command that takes long. None is in flight afterwards."""
        if self.lock.give_way():
            self._loop.drain()

    def at_step(self, num_steps: int | None, call: Callable[[], None] = lambda: None) -> None:
        """Set the callback that runs between two steps once `metrics.num_steps` (since the engine was made) is reached.

        It replaces an earlier callback and must not raise. num_steps: None for no callback. The thread that runs the
        steps calls it, soon where they have run already; without one this call does, or the caller that runs the step.
        """

        def set_alarm() -> None:
            self.inbox.alarm.set(num_steps, call)
            if self._thread in (None, threading.current_thread()):
                self.inbox.alarm.ring(self._reports.metrics.num_steps)

        self.command("at_step", set_alarm)

    def start_trace(self, path: str | Path) -> bool:
        """Start to write Chrome-trace events to a file; returns False if a trace is being written already."""
        return self.command("start_trace", lambda: self._reports.trace.start(path))

    def stop_trace(self) -> None:
        """End the trace; its file is then complete."""
        self.command("stop_trace", lambda: None)  # the span of this command is the last
        self._reports.trace.close()
