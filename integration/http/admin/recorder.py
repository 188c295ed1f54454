"""The recorder of profiles, one at a time: a Chrome trace of torch's operations, and one of the engine's steps."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ....rollout.engine import Engine
from ..edge.errors import Busy, HttpError

logger = logging.getLogger(__name__)

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


@dataclass(eq=False)
class _Profile:
    """A requested profile."""

    torch: profile
    path: Path  # of torch's trace
    num_steps: int | None  # after which it ends by itself; None: it ends with `stop`
    has_begun: bool = False
    is_ending: bool = False
    has_trace: bool = False  # whether this profile started the engine's trace
    begun: Future[None] = field(default_factory=Future)  # for the caller of `start`, unless it begins later
    ended: Future[None] = field(default_factory=Future)  # for the caller of `stop`
    written: Future[Path] = field(default_factory=Future)

    def write(self) -> None:
        """Write torch's trace to its file; slow for a long profile. An error goes to `written`."""
        try:
            self.path.unlink(missing_ok=True)
            self.torch.export_chrome_trace(str(self.path))
            if not self.path.is_file():  # torch only logs that it could not write, and removes the part
                raise OSError(f"torch could not write {self.path}: its log has the reason; is the disk full?")
            self.written.set_result(self.path)
        except Exception as error:  # noqa: BLE001 - a thread boundary: the caller of `stop` gets the error
            self.written.set_exception(error)


class Profiler:
    """Start and stop torch's profiler between two steps of an engine. Any thread may call.

    Only the thread that runs the model is recorded, and the profiler begins and ends in that thread: torch crashes
    where it begins or ends for threads that run operations meanwhile, and a weight update or a trainer may run some.
    The state of this class changes only under the engine's lock.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._current: _Profile | None = None  # begun, or to begin
        self._ended: _Profile | None = None  # ended by itself; `stop` has not asked for its file yet

    def start(
        self,
        folder: str | None = None,
        activities: Sequence[str] = ("CPU", "GPU"),
        *,
        prefix: str = "",
        profile_id: str | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        start_step: int | None = None,
        num_steps: int | None = None,
    ) -> Path:
        """Begin a profile at once, or when `start_step` steps have run since the engine was made. It ends with `stop`,
        or after `num_steps` steps. Returns the path that torch's trace will have. The engine's trace is written beside
        it, as .engine.json, unless the engine already writes a trace.

        Raises Busy while another profile runs or waits for its start, ValueError for an unknown activity or a
        folder with control characters in its name, OSError for a folder that cannot be made or written.
        """
        if unknown := sorted(set(activities) - set(ACTIVITIES)):
            raise ValueError(f"activities: unknown {', '.join(unknown)}; known: {', '.join(ACTIVITIES)}")
        chosen = [ACTIVITIES[name] for name in activities]
        if not torch.cuda.is_available():
            chosen = [ProfilerActivity.CPU]
        target = Path(folder or os.environ.get("SGLANG_TORCH_PROFILER_DIR") or tempfile.gettempdir())
        if not str(target).isprintable():
            raise ValueError(f"torch cannot write into {str(target)!r}, whose name has control characters")
        target.mkdir(parents=True, exist_ok=True)
        if not os.access(target, os.W_OK):
            raise PermissionError(f"the folder {target} cannot be written")
        name = f"{prefix}{profile_id or time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json"
        new = _Profile(
            profile(activities=chosen, with_stack=with_stack, record_shapes=record_shapes), target / name, num_steps
        )
        if self._engine.between_steps("start_profile", lambda: self._schedule(new, start_step or 0)):
            self._engine.driver.wait_until(new.begun.done)
            new.begun.result()
        return new.path

    def stop(self) -> Path:
        """End the profile, write it, and return its file; also for a profile that has ended by itself. Raises HttpError
        400 if there is no profile, or if it has not begun: it is cancelled then."""
        profile, is_written = self._engine.between_steps("stop_profile", self._stop)
        if not is_written:
            self._engine.driver.wait_until(profile.ended.done)
            profile.ended.result()
            profile.write()
        return profile.written.result()

    # -- under the engine's lock ------------------------------------------------------------------------------------

    def _schedule(self, new: _Profile, start_step: int) -> bool:
        """Set the profile's begin; returns whether it is now."""
        if self._current is not None:
            raise Busy("a profile is being taken: stop_profile first")
        self._current, self._ended = new, None
        is_now = start_step <= self._engine.metrics.num_steps
        act = self._begin_at_once if is_now else lambda new: self._by_itself(new, self._begin)
        self._engine.driver.at_step(start_step, lambda: act(new))
        return is_now

    def _begin_at_once(self, new: _Profile) -> None:
        """Begin in the loop's thread. An error goes to the caller of `start`."""
        try:
            self._begin(new)
        except BaseException as error:  # noqa: BLE001 - a thread boundary
            self._current = None
            new.begun.set_exception(error)
        else:
            new.begun.set_result(None)

    def _begin(self, new: _Profile) -> None:
        path = new.path.with_name(new.path.name.replace(".trace.", ".engine."))
        new.has_trace = self._engine.driver.start_trace(path)
        try:
            self._engine.parts.runner.call(new.torch.start)
        except BaseException:
            if new.has_trace:
                self._engine.driver.stop_trace()
            raise
        new.has_begun = True
        if new.num_steps is not None:
            end = self._engine.metrics.num_steps + new.num_steps
            self._engine.driver.at_step(end, lambda: self._by_itself(new, self._end_by_itself))

    def _end_at_once(self, current: _Profile) -> None:
        """End in the loop's thread. An error goes to the caller of `stop`."""
        try:
            self._end(current)
        except BaseException as error:  # noqa: BLE001 - a thread boundary
            current.ended.set_exception(error)
        else:
            current.ended.set_result(None)

    def _end(self, current: _Profile) -> None:
        self._current = None
        self._engine.driver.at_step(None)
        try:
            self._engine.parts.runner.call(current.torch.stop)
        finally:
            if current.has_trace:
                self._engine.driver.stop_trace()

    def _end_by_itself(self, current: _Profile) -> None:
        self._end(current)
        self._ended = current
        # Written on another thread, because the loop's thread must run steps.
        threading.Thread(target=current.write, name="lockstep-profile", daemon=True).start()

    def _by_itself(self, current: _Profile, act: Callable[[_Profile], None]) -> None:
        """Run `act` in the loop's thread. An error must not end the loop: it goes to the caller of `stop`."""
        try:
            act(current)
        except Exception as error:
            logger.exception("the profile %s failed", current.path)
            self._current, self._ended = None, current
            current.written.set_exception(error)

    def _stop(self) -> tuple[_Profile, bool]:
        """Set the end of the profile to now; returns it, and whether it has ended by itself before."""
        current, ended = self._current, self._ended
        if current is None or current.is_ending:
            if ended is None:
                raise HttpError(400, "no profile is being taken: start_profile first")
            self._ended = None
            return ended, True
        if not current.has_begun:
            self._current = None
            self._engine.driver.at_step(None)
            why = HttpError(400, "the profile had not begun: it is cancelled")
            current.begun.set_exception(why)
            raise why
        current.is_ending = True
        self._engine.driver.at_step(0, lambda: self._end_at_once(current))
        return current, False
