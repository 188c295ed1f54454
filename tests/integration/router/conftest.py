"""Routers over fake workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockstep.tests.support.fake_workers import FakeWorker, Fleet


@pytest.fixture
def make_fleet(tmp_path) -> Iterator[Callable[..., Fleet]]:
    from lockstep.tests.support.fake_workers import FakeWorker, Fleet

    fleets: list[Fleet] = []

    def make(workers: int | list[FakeWorker] = 2, **settings: object) -> Fleet:
        fakes = [FakeWorker() for _ in range(workers)] if isinstance(workers, int) else workers
        fleets.append(Fleet(tmp_path, fakes, **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def fleet(make_fleet) -> Fleet:
    return make_fleet(2)
