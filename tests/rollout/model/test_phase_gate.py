"""Tests of the gate to a trainer's rollout phases: admission, waiting, and the end of a phase."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lockstep.rollout.errors import DeadlineExceeded
from lockstep.rollout.model.phase_gate import PhaseGate

PATIENCE_S = 60.0  # far longer than any test here takes
MOMENT_S = 0.05  # long enough for a wrong event to show


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as threads:
        yield threads


class Visit:
    """A guest in a thread of its own, until `end`."""

    def __init__(self, gate: PhaseGate, threads: ThreadPoolExecutor) -> None:
        self.is_in, self._go = threading.Event(), threading.Event()
        self._done = threads.submit(self._visit, gate)

    def _visit(self, gate: PhaseGate) -> None:
        with gate.guest("a visit", PATIENCE_S):
            self.is_in.set()
            assert self._go.wait(PATIENCE_S)

    def end(self) -> None:
        self._go.set()
        self._done.result(PATIENCE_S)


def stays_undone(future: Future) -> bool:
    return threading.Event().wait(MOMENT_S) is False and not future.done()


def test_a_guest_waits_for_the_phase_and_comes_in_as_it_begins(threads):
    gate = PhaseGate()
    visit = Visit(gate, threads)
    assert not visit.is_in.wait(MOMENT_S)
    gate.open()
    assert visit.is_in.wait(PATIENCE_S)
    visit.end()
    gate.close()  # waits for no guest: none is left


def test_a_phase_ends_after_its_guests(threads):
    gate = PhaseGate()
    gate.open()
    visits = [Visit(gate, threads) for _ in range(3)]
    assert all(visit.is_in.wait(PATIENCE_S) for visit in visits)
    closing = threads.submit(gate.close)
    for visit in visits:
        assert stays_undone(closing)
        visit.end()
    closing.result(PATIENCE_S)


def test_nobody_comes_in_while_a_phase_waits_for_its_last_guest(threads):
    gate = PhaseGate()
    gate.open()
    first = Visit(gate, threads)
    assert first.is_in.wait(PATIENCE_S)
    closing = threads.submit(gate.close)
    assert stays_undone(closing)
    second = Visit(gate, threads)
    assert not second.is_in.wait(MOMENT_S)
    first.end()
    closing.result(PATIENCE_S)
    assert not second.is_in.is_set()
    gate.open()
    assert second.is_in.wait(PATIENCE_S)
    second.end()
    gate.close()


def test_of_several_hosts_only_the_last_waits(threads):
    gate = PhaseGate()
    gate.open()
    gate.open()
    visit = Visit(gate, threads)
    assert visit.is_in.wait(PATIENCE_S)
    gate.close()  # at once
    closing = threads.submit(gate.close)
    assert stays_undone(closing)
    visit.end()
    closing.result(PATIENCE_S)


def test_a_guest_for_whom_no_phase_comes_is_told_what_it_waited_for():
    gate, ran = PhaseGate(), []
    says = r"an update waited 0\.05 s for the rollout phase.*will not run"
    with pytest.raises(DeadlineExceeded, match=says), gate.guest("an update", MOMENT_S):
        ran.append(1)
    gate.open()
    gate.close()
    assert not ran


def _nested(gate: PhaseGate) -> list[bool]:
    """Enter as a guest in a guest, then open and close a phase as a host inside both."""
    found = []
    with gate.guest("outer", PATIENCE_S) as outer, gate.guest("inner", 5.0) as inner:
        found += [outer <= PATIENCE_S, inner == 5.0]
        gate.open()
        gate.close()
    return found


def test_a_guest_may_come_in_again_and_does_not_wait_for_itself(threads):
    gate = PhaseGate()
    gate.open()
    assert threads.submit(_nested, gate).result(PATIENCE_S) == [True] * 2
    gate.close()

    def hosts_and_visits() -> None:
        gate.open()
        with gate.guest("of the host's own", PATIENCE_S), gate.guest("inside it, and no guest more", PATIENCE_S):
            gate.close()  # waits for every guest but this one

    threads.submit(hosts_and_visits).result(PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_guest_that_fails_has_left(error: Callable[[], BaseException]):
    gate = PhaseGate()
    gate.open()
    with pytest.raises(error), gate.guest("what fails", PATIENCE_S):
        raise error
    gate.close()  # waits for no guest: none is left
