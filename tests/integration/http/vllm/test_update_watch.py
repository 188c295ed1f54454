"""The clock of an update of vLLM's calls: it strikes until the update is taken back, or its client calls again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lockstep.integration.http.admin.operations import UpdateGate
from lockstep.integration.http.edge.errors import Busy
from lockstep.integration.http.vllm.update_watch import UpdateWatch
from lockstep.rollout.errors import DeadlineExceeded
from lockstep.weight_sync.errors import SessionBusy

PATIENCE = 20.0
IDLE_S = 0.01


class Gate(UpdateGate):
    """The gate of updates, which counts the calls that it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = threading.Semaphore(0)

    @contextmanager
    def enter(self, what: str) -> Iterator[None]:
        try:
            with super().enter(what):
                yield
        except Busy:
            self.refused.release()
            raise


class Service:
    """A service with an open update. error: of its first turn of the weights."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sessions = SimpleNamespace(opened_at=1.0)
        self.lost: list[str] = []
        self.is_taken_back = threading.Event()
        self._error = error

    @contextmanager
    def weights_turn(self, what: str) -> Iterator[float]:
        error, self._error = self._error, None
        if error is not None:
            raise error
        yield 1.0

    def lose_weight_update(self, why: str) -> None:
        self.lost.append(why)
        self.sessions.opened_at = None
        self.is_taken_back.set()


@pytest.mark.parametrize("why", ["", "its tensors were wrong"])
def test_a_clock_that_strikes_while_another_call_holds_the_gate_strikes_again(why):
    service, gate = Service(), Gate()
    watch = UpdateWatch(service, gate, IDLE_S)
    with gate.enter("a call that is none of the update"):
        watch.begin()
        watch.lose(why)
        watch._start()
        assert gate.refused.acquire(timeout=PATIENCE)
        assert not service.lost
    assert service.is_taken_back.wait(PATIENCE)
    assert service.lost == [why or "its client made no call for 0.01 s (update_idle_s)"]


@pytest.mark.parametrize("error", [DeadlineExceeded("no phase came"), SessionBusy("another call is under way")])
def test_a_clock_that_gets_no_turn_of_the_weights_strikes_again(error):
    service = Service(error)
    watch = UpdateWatch(service, Gate(), IDLE_S)
    with watch.call("start_weight_update"):
        watch.begin()
    assert service.is_taken_back.wait(PATIENCE) and len(service.lost) == 1


def test_a_clock_that_was_set_anew_meanwhile_is_not_wound_twice():
    service, gate = Service(), Gate()
    watch = UpdateWatch(service, gate, IDLE_S)
    with watch.call("start_weight_update"):
        watch.begin()
        first = watch._timer = threading.Timer(PATIENCE, lambda: None)
        expire = threading.Thread(target=watch._expire)  # of a clock that struck before this call
        expire.start()
        assert gate.refused.acquire(timeout=PATIENCE)
        expire.join(PATIENCE)
        assert watch._timer is first
    assert service.is_taken_back.wait(PATIENCE) and len(service.lost) == 1


def test_an_update_that_has_ended_is_not_watched():
    service = Service(SessionBusy("another call is under way"))
    watch = UpdateWatch(service, Gate(), IDLE_S)
    with watch.call("start_weight_update"):
        watch.begin()
        service.sessions.opened_at = None
    assert watch._timer is None
