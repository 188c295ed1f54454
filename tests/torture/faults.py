"""Faults of the machine, put into the server's own process: a full disk, a stop, a clock that jumps, little memory."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.tests.torture.attackers import Attacker
from lockstep.tests.torture.own_server import HEADROOM, Process

SETTLES_S = 1.0  # after a fault its effects may still show
UNLIMITED = resource.RLIM_INFINITY


class Faults(Attacker):
    """Inject one fault at a time, each for a short moment."""

    name = "faults"
    needs_own = True

    def step(self, draw: random.Random) -> None:
        if self.scene.over.wait(draw.uniform(0.5, 4)):
            return
        own = self.scene.own
        assert own is not None
        kinds = ["stop", "full_disk", "little_memory"] + ["clock"] * own.has_clock
        kind = draw.choice(kinds)
        sent = self.wire.record.open(self.name, self.wire.step, kind, b"")
        try:
            getattr(self, f"_{kind}")(draw, own)
        except ProcessLookupError:
            self.wire.record.close(sent, "gone")  # the watch reports it
            self.scene.over.wait(1)
        else:
            self.wire.record.close(sent, "done")

    @contextmanager
    def _excused(self, is_late: bool = False) -> Iterator[None]:
        """Excuse named errors, and late answers if `is_late`, from here on until a while after the block."""
        began, verdict = time.monotonic(), self.scene.verdict
        span = (began, began + 3600, is_late)
        verdict.excuses.append(span)
        try:
            yield
        finally:
            verdict.excuse(began, time.monotonic() + SETTLES_S, is_late)
            verdict.excuses.remove(span)

    def _stop(self, draw: random.Random, own: Process) -> None:
        """Stop the process for a moment, as a debugger or a frozen host does."""
        with self._excused(is_late=True):
            own.signal(signal.SIGSTOP)
            try:
                self.scene.over.wait(draw.uniform(0.05, 1.0))
            finally:
                own.signal(signal.SIGCONT)

    def _full_disk(self, draw: random.Random, own: Process) -> None:
        """Let every write into a file fail, while a profile begins and ends and requests are traced."""
        # torch's profiler begins, and ends, while it holds the interpreter: an administrator's doing.
        with self.scene.admin_turn, self._excused(is_late=True):
            try:
                if begins_before := draw.random() < 0.5:
                    self._profile("start")
                own.limit(resource.RLIMIT_FSIZE, 0)
                if not begins_before:
                    self._profile("start")
                # Long enough that the buffered events of a trace are written.
                params = {"max_new_tokens": 500, "ignore_eos": True}
                self.wire.call("POST", "/generate", {"text": "a", "sampling_params": params})
                self._profile("stop")
            finally:
                own.limit(resource.RLIMIT_FSIZE, UNLIMITED)

    def _profile(self, verb: str) -> None:
        if self.scene.is_admin_allowed:
            body = {"output_dir": str(self.scene.scratch / "profile"), "activities": ["CPU"]} if verb == "start" else {}
            self.wire.call("POST", f"/{verb}_profile", body, admin=True)

    def _clock(self, draw: random.Random, own: Process) -> None:
        """Let the wall clock jump; no answer may depend on it, so nothing is excused."""
        own.move_clock(draw.choice([3600, -3600, 86400 * 400, -86400]))
        self.scene.over.wait(draw.uniform(0.2, 3))
        own.move_clock(0)

    def _little_memory(self, draw: random.Random, own: Process) -> None:
        """Let allocations fail: the address space may grow by little more."""
        with self._excused():
            own.cap_memory(draw.choice([16, 64, 256]) << 20)
            try:
                prompt = [draw.randrange(2, 90) for _ in range(900)]
                body = {"input_ids": [prompt] * 64, "sampling_params": {"max_new_tokens": 3}}
                self.wire.call("POST", "/generate", body)
                self.scene.over.wait(draw.uniform(0.1, 1.0))
            finally:
                own.cap_memory(HEADROOM)
