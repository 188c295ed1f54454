"""A time limit for each test, so that a hanging test is named.

pytest-timeout fails the test from a signal: it prints the stack of each thread, and the fixtures still clean up. A
signal does not reach a thread that hangs in C, so a quarter of the limit later faulthandler prints the stacks and ends
the process. Then xdist ends the run and names the test (`--max-worker-restart=0` in the Makefile).
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

# Several times the longest test's time on two busy cores, and more than the deadlines that tests themselves set.
QUICK_S, SLOW_S, EXHAUSTIVE_S = 120, 600, 1800
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # tests have theirs captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a test the limit of its kind, unless it has its own: `@pytest.mark.timeout(600)`."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            kinds = (("exhaustive", EXHAUSTIVE_S), ("slow", SLOW_S))
            limit_s = next((limit for kind, limit in kinds if item.get_closest_marker(kind)), QUICK_S)
            item.add_marker(pytest.mark.timeout(limit_s))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    assert marker is not None
    faulthandler.dump_traceback_later(marker.args[0] * 1.25, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
