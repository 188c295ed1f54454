"""Deadlines by the time in which this process runs: a stop of the process brings none nearer."""

from __future__ import annotations

import pytest

from lockstep.weight_sync import deadline as module
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.transaction.lease import Lease


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Return a list with the seconds in which the process ran."""
    now = [100.0]
    monkeypatch.setattr(module, "running_time", lambda: now[0])
    return now


def test_a_deadline_passes_when_the_process_has_run_so_long(clock):
    deadline, never, earlier = Deadline.after(10), Deadline.within(None), Deadline.after(10).at_most(4)
    clock[0] += 5  # however long it was stopped beside
    assert deadline.left_s == 5 and not deadline.has_passed and earlier.has_passed
    clock[0] += 5
    assert deadline.has_passed and deadline.left_s == 0 and deadline.left.total_seconds() > 0
    assert not never.has_passed and Deadline.within(0).has_passed
    with pytest.raises(ValueError, match="must be positive"):
        Deadline.after(0)


def test_a_lease_ends_when_its_keeper_has_run_so_long(clock):
    lease = Lease(10)
    clock[0] += 9
    assert not lease.is_over and lease.left_s == 1
    lease.renew()
    clock[0] += 9
    assert not lease.is_over
    clock[0] += 2
    assert lease.is_over
