"""Who runs the steps, and when commands get their turn: one lock, one inbox, at most one thread.

The lock is held for each step and let go in between; a command runs under it with nothing in flight. Whoever waits for
an answer runs the steps, unless `start()` has put a thread there for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import DeadlineExceeded, EngineStopped, SamplingRefused
from ..loop.commands import Command
from ..loop.core import EngineCore
from ..sequences.request import Request
from .fair_lock import FairLock
from .once_per_id import OncePerId
from .step_alarm import StepAlarm

logger = logging.getLogger(__name__)


class Driver:
    """Steps and commands of one engine core, from any thread."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self.inbox_lock = threading.Lock()
        self._wake = threading.Condition(self.lock)  # type: ignore[arg-type]
        self._inbox: dict[str, Request] = {}  # added, not yet taken up: adding never waits for a step
        self._kick = threading.Event()  # something has changed that the loop's thread may wait for
        self.once_per_id = OncePerId()
        self._num_commands_waiting = 0  # for the lock
        self.alarm = StepAlarm()
        self._stepper = ThreadPoolExecutor(1, "lockstep-step")  # runs the steps that coroutines wait for
        self._turn: Future[None] | None = None  # the latest of them
        self._turn_lock = threading.Lock()
        self._thread: threading.Thread | None = None  # drives the loop, once started
        self._failure: Exception | None = None  # what ended the thread
        self.on_failure: Callable[[EngineStopped], None] = lambda error: None  # told of it, under the lock
        self._step_began: float | None = None  # of time.monotonic(); None while no step runs
        self._core: EngineCore

    def drive(self, core: EngineCore) -> None:
        """Take charge of a core; once, before anything else."""
        self._core = core
        core.model.before_phase_ends = self.drain

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is something to run."""
        return bool(self._inbox) or self._core.loop.has_work

    def is_live(self, id: str) -> bool:
        """Whether a request of that id is queued or runs. The caller holds `inbox_lock`."""
        return id in self._inbox or id in self._core.sequences

    def post(self, requests: list[Request]) -> None:
        """Queue requests with the next step. The caller holds `inbox_lock`, and calls `kick` after it."""
        self._inbox.update((request.id, request) for request in requests)

    def kick(self) -> None:
        """Something has changed that the loop's thread may be waiting for."""
        self._kick.set()

    def take_inbox(self) -> None:
        """Queue what was posted. The caller holds the lock."""
        with self.inbox_lock:
            for request in self._inbox.values():
                self._core.queue(request)
            self._inbox.clear()

    # -- signs of life, without waiting ------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether a thread drives the loop."""
        return self._thread is not None

    @property
    def failure(self) -> Exception | None:
        """What ended the thread that drove the loop; None: nothing did."""
        return self._failure

    @property
    def heartbeat(self) -> float:
        """When the loop was last seen to live, by time.monotonic(): at the beginning of the step that runs, or else
        now. A loop that is idle, paused, or waits for its phase is alive."""
        began = self._step_began
        return time.monotonic() if began is None else began

    # -- steps ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let what has to come before the next step happen, if there is to be one, in the rollout phase that the step
        will be in. The caller does not hold the lock: it may wait for others who need it. Raises SamplingRefused where
        it cannot happen yet."""
        if (call := self._unsettled()) is not None:
            with self._core.model.rollout_phase():
                call()

    def _settle_in_phase(self) -> None:
        """`settle`, but in a phase of the trainer's: where it has the module, the next phase is soon enough."""
        if (call := self._unsettled()) is not None:
            with suppress(DeadlineExceeded), self._core.model.borrowed("what comes before the next step", 0):
                call()

    def _unsettled(self) -> Callable[[], None] | None:
        return self._core.before_sampling if self._core.pause_mode is None and self.has_work else None

    def run_step(self) -> None:
        """Run one step in this thread. Runs nothing while paused, or when there is nothing to run."""
        with self._wake, self._core.model.rollout_phase(admits=False):
            self.take_inbox()
            try:
                self._step()
            finally:
                self._wake.notify_all()

    def start(self) -> None:
        """Let a thread drive the loop. Does nothing when started."""
        with self.lock:
            if self._thread is None:
                self._failure = None
                self._thread = threading.Thread(target=self._run, name="lockstep-loop", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End that thread after the step it is in."""
        with self._wake:
            thread, self._thread = self._thread, None
            self._kick.set()
            self._wake.notify_all()
        if thread is not None:
            thread.join()

    def close(self) -> None:
        self._stepper.shutdown()

    def on_loss(self) -> None:
        """A rank of the replica is lost: whoever waits looks again. From any thread."""
        with self._wake:
            self._kick.set()
            self._wake.notify_all()

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while self._thread is me:
                self._kick.clear()  # before the look: what changes after it is seen the next time
                try:
                    self._settle_in_phase()
                except SamplingRefused as refused:  # the next that changes it kicks
                    logger.warning("requests wait: %s", refused)
                with self._wake:
                    self._core.ranks.check()
                    self.take_inbox()
                    is_mine = self._thread is me and self._core.model.in_rollout_phase
                    if is_ready := is_mine and self._core.can_step:
                        self._step()
                        self._wake.notify_all()
                if not is_ready:
                    self._kick.wait()
        except Exception as error:
            logger.exception("the loop has ended")
            stopped = EngineStopped("the engine's loop has ended")
            stopped.__cause__ = error
            with self._wake:
                with self.inbox_lock:
                    self._failure, self._thread = error, None
                self.on_failure(stopped)
                self._wake.notify_all()

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            self._core.step()
            if self.alarm.is_due(self._core.metrics.num_steps):
                self._core.loop.drain()
                self.alarm.ring(self._core.metrics.num_steps)
        finally:
            self._step_began = None

    def drain(self) -> None:
        """Finish what is in the air, whoever's it is, and tell those who wait for it."""
        with self._wake:
            self._core.loop.drain()
            self._wake.notify_all()

    # -- waiting ----------------------------------------------------------------------------------------------------

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Return when `is_done()`; drives the loop meanwhile where no thread does."""
        self._kick.set()  # the rollout phase may have begun with this call
        self._settle_unless_driven()
        while not self._wait_a_step(is_done):
            self._settle_unless_driven()

    def _wait_a_step(self, is_done: Callable[[], bool]) -> bool:
        """Run one step, or wait until something happens where somebody else runs them; returns `is_done()` before."""
        with self._wake:
            if is_done():
                return True
            self._core.ranks.check()
            if self._failure is not None:
                raise EngineStopped("the engine's loop has ended") from self._failure
            if self._thread is None and self._core.pause_mode is None:
                if self._core.before_sampling is None:  # or settle comes first
                    self.run_step()
            else:
                if self._thread is None:
                    logger.warning("paused (%s): waiting for continue_generation", self._core.pause_mode)
                self._wake.wait()
            return False

    async def progress(self, is_done: Callable[[], bool]) -> None:
        """From a coroutine: let a step happen.

        Coroutines that want one at the same time get the same one, or each would wait for as many as there are others.
        """
        if self._thread is not None:
            await asyncio.to_thread(self.wait_until, is_done)
            return
        with self._turn_lock:
            if self._turn is None or self._turn.done():
                self._turn = self._stepper.submit(self._settle_and_step)
            turn = self._turn
        await asyncio.shield(asyncio.wrap_future(turn))

    def _settle_unless_driven(self) -> None:
        if self._thread is None:
            self.settle()

    def _settle_and_step(self) -> None:
        self.settle()
        self._wait_a_step(lambda: False)

    # -- commands ---------------------------------------------------------------------------------------------------

    def is_interrupted(self) -> bool:
        """Whether something is to happen after the step under way, before the next."""
        return self._num_commands_waiting > 0 or self.alarm.is_due(self._core.metrics.num_steps)

    def command(
        self,
        name: str,
        run: Callable[[], Any],
        op_id: str | None = None,
        timeout_s: float | None = None,
        **arguments: object,
    ) -> Any:
        """Run something between two steps, with nothing in flight; the same op_id, with these arguments, runs once.

        Raises ValueError for a timeout that is not positive, DeadlineExceeded when `timeout_s` passed before it began,
        OpIdTaken where the op_id stands for another call, and whatever `run` raises.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")

        def drained() -> Any:
            with self._core.trace.span(name):
                self.take_inbox()
                self._core.loop.drain()
                try:
                    return run()
                finally:
                    self._core.ledger.events.flush()

        reply, is_new = self.once_per_id.claim(op_id, name, arguments)
        if is_new:
            self._run_command(Command(name, drained, reply, timeout_s))
        return reply.result()

    def _run_command(self, command: Command) -> None:
        with self._counted():
            seconds = command.seconds_left
            has_lock = self.lock.acquire(timeout=-1 if seconds is None else seconds)
        if not has_lock:
            command.give_up()
            return
        try:
            command.execute()
            self._wake.notify_all()
        finally:
            self.lock.release()
        self._kick.set()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """A command waits in here."""
        with self.inbox_lock:
            self._num_commands_waiting += 1
        try:
            yield
        finally:
            with self.inbox_lock:
                self._num_commands_waiting -= 1
