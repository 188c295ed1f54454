"""An engine behind a socket in a process of its own, which faulty senders send to."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.integration.bench.parts.chaos import Forked
from lockstep.integration.push.local_target import run_verb
from lockstep.integration.push.remote_engine import VerbServer
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.weight_sync.transaction.faulty_senders import SENDERS, Fault, units_of
from lockstep.tests.weight_sync.transaction.two_states import (
    CALL_S,
    LATE_S,
    NUM_ATTEMPTS,
    NUM_TOKENS,
    PROMPT,
    State,
    tiny_model,
)
from lockstep.weight_sync.errors import SessionError
from lockstep.weight_sync.transaction.lease import LEASE_THREAD


class EngineUnderTest:
    """A real engine behind a socket, and the records of its calls."""

    def __init__(self, folder: Path, states: tuple[State, State], lane: int) -> None:
        model = tiny_model()
        config = EngineConfig(kv_cache="16 blocks", max_num_seqs=2, max_num_batched_tokens=32)
        self.service = RolloutService(Engine(model, config), ServiceConfig(weight_timeout_s=CALL_S))
        self.folder, self.path = folder, folder / f"{lane}.sock"
        self.states, self.current, self.version = states, 0, self.service.engine.weight_version
        self.latest_s = 0.0  # the longest time by which a call passed its deadline
        self._num_calls, self._idle = 0, threading.Condition()
        self._server = VerbServer(self.path, self._run)
        self._server.start()

    def _run(self, verb: str, timeout_s: float, arguments: dict[str, object]) -> dict[str, object]:
        with self._idle:
            self._num_calls += 1
        started = time.monotonic()
        try:
            return run_verb(self.service, verb, timeout_s, arguments)
        finally:
            late_s = time.monotonic() - started - timeout_s
            with self._idle:
                self.latest_s = max(self.latest_s, late_s)
                self._num_calls -= 1
                self._idle.notify_all()

    def inject(self, fault: Fault, version: str) -> str:
        """Run a sender with that fault. Returns whether the weights are the old ones or the new ones after it.

        A sender that fails before its fault, because another process took its port meanwhile, is run again.
        """
        for attempt in range(NUM_ATTEMPTS):
            outcome, happened, said = self._inject(fault, f"{version}.{attempt}")
            if happened:
                return outcome
            assert outcome == "old", f"{fault}: it did not happen"
        raise AssertionError(f"{fault}: it did not happen; {said}")

    def _inject(self, fault: Fault, version: str) -> tuple[str, bool, str]:
        """Run one attempt and return the outcome, whether the fault happened, and the sender's report."""
        old, new = self.states[self.current], self.states[1 - self.current]
        reader, writer = os.pipe()
        fault.note = lambda: os.write(writer, b".")
        sender = Forked(partial(SENDERS[fault.path], fault, self.path, self.folder, old, new, version))
        os.close(writer)
        try:
            happened = self._watch(sender, fault, reader)
            self._settle(str(fault))
            outcome = self._check(fault, sender, version)
        finally:
            os.close(reader)
            sender.end()
        if outcome == "new":
            self.current = 1 - self.current
        return outcome, happened, str(sender.result)

    def _watch(self, sender: Forked, fault: Fault, news: int) -> bool:
        """Wait until the sender is gone, or stopped where it should stop. Returns whether the fault happened."""
        limit_s = 3 * (CALL_S + LATE_S)
        # The report comes right before the fault; a sender that ends without a fault closes the pipe.
        assert _is_readable(news, limit_s), f"{fault}: the sender waits beyond its deadlines"
        happened = os.read(news, 1) == b"."
        if not (happened and fault.kind == "hang"):
            assert sender.wait(limit_s), f"{fault}: the sender waits beyond its deadlines"
        assert sender.error is None, f"{fault}: {sender.error}"
        return happened or (fault.kind == "none" and sender.result == "")

    def _settle(self, what: str) -> None:
        """Wait until no verb runs, and until a session without a client has expired."""
        with self._idle:
            is_idle = self._idle.wait_for(lambda: self._num_calls == 0, 2 * CALL_S + LATE_S)
        assert is_idle, f"{what}: the engine waits beyond its deadlines"
        assert self.latest_s < LATE_S, f"{what}: a call took {self.latest_s:.1f} s longer than its deadline"
        for thread in threading.enumerate():
            if thread.name == LEASE_THREAD:
                thread.join(2 * CALL_S + LATE_S)
                assert not thread.is_alive(), f"{what}: the session outlives its lease"

    def _check(self, fault: Fault, sender: Forked, version: str) -> str:
        """Check that the engine has the old weights or the new ones, reports which, and generates from them."""
        engine = self.service.engine
        for name, state in self.service.groups.state().items():  # groups that a killed sender leaves
            assert state
            self.service.destroy_weights_update_group(name)
        if self.service.state()["weight_update"]["state"] == "rolled_back":
            self._acknowledge()
        if engine.is_paused:
            self.service.continue_generation()
        base = {f"{version} base": self.current} if fault.path.startswith("delta") else {}
        known = {self.version: self.current, **base, version: 1 - self.current}
        assert engine.weight_version in known, f"{fault}: {engine.weight_version} is neither version"
        holds = self.states[known[engine.weight_version]]
        assert self.service.model_digest() == holds.digest, f"{fault}: torn, or labelled wrongly"
        assert engine.weight_digest in (holds.digest, None if engine.weight_version == "default" else holds.digest)
        assert engine.refusal is None, f"{fault}: {engine.refusal}"
        assert self.generate() == holds.tokens, f"{fault}: tokens of other weights"
        self.version = engine.weight_version
        outcome = "new" if engine.weight_version == version else "old"
        if sender.finished:
            assert "stranded" not in sender.result, f"{fault}: {sender.result}"
            assert (outcome == "new") == (sender.result == ""), f"{fault}: {outcome}, the sender says {sender.result!r}"
        return outcome

    def _acknowledge(self) -> None:
        """Accept that a session ended without its client: until then only another session may write."""
        try:
            self.service.abort_weight_update()
        except SessionError:
            return  # its client knew

    def generate(self) -> list[int]:
        (completion,) = self.service.engine.generate(
            [PROMPT], SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
        )
        return list(completion.token_ids)

    def close(self) -> None:
        self._server.close()
        self.service.close()


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def run_lane(
    faults: Sequence[Fault], folder: Path, states: tuple[State, State], lane: int
) -> list[tuple[str, str, str]]:
    """Run all of these faults on one engine, one after the other. Returns path, kind and outcome of each."""
    engine, rows = EngineUnderTest(folder, states, lane), []
    try:
        for number, fault in enumerate(faults):
            outcome = engine.inject(fault, f"{number}")
            rows.append((fault.path, fault.kind, outcome))
            assert outcome in expected_outcome(fault, states), f"{fault}: {outcome}"
    finally:
        engine.close()
    return rows


def expected_outcome(fault: Fault, states: tuple[State, State]) -> tuple[str, ...]:
    """Return the possible outcomes. Only a sender that runs until the commit gives the new weights."""
    if fault.kind == "none":
        return ("new",)
    num_units = len(units_of(fault.path, *states))
    if (fault.path, fault.kind) == ("delta by memory", "duplicate bucket"):
        # The same bytes once more, of which the digests are one, but behind the last of them a delta begins anew.
        return ("new",) if fault.unit < num_units - 1 else ("old",)
    # Tensors of one request are complete after the last one, and any call of `continue_generation` commits them.
    whole_from = (num_units - 1, True) if fault.path == "tensor by tensor" else (num_units, True)
    may_commit = fault.kind in ("kill", "hang") and (fault.unit, fault.within) >= whole_from
    return ("old", "new") if may_commit else ("old",)
