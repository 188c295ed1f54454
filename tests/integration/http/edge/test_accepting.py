"""Tests of the lines that tell of connections that could not be accepted."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import pytest

from lockstep.integration.http.edge import accepting
from lockstep.integration.http.edge.accepting import tell_of_failures_once


def tell(number: int, message: str = "socket.accept() out of system resource", times: int = 1) -> None:
    """Report failures to an event loop, as asyncio does for each accept."""

    async def report() -> None:
        loop = asyncio.get_running_loop()
        tell_of_failures_once(loop)
        for _ in range(times):
            loop.call_exception_handler({"message": message, "exception": OSError(number, os.strerror(number))})

    asyncio.run(report())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_failures_in_a_row_are_one_line_with_the_limit(caplog, number):
    tell(number, times=50)
    [record] = caplog.records
    assert record.exc_info is None and os.strerror(number) in record.getMessage()
    assert "file descriptors); those that are open go on" in record.getMessage()


def test_the_next_spell_is_told_again(caplog, monkeypatch):
    monkeypatch.setattr(accepting, "_SPELL_S", 0.0)
    tell(errno.EMFILE, times=3)
    assert len(caplog.records) == 3


@pytest.mark.parametrize(("number", "message"), [(errno.EMFILE, "a task failed"), (errno.EPIPE, "accept")])
def test_other_errors_keep_their_tracebacks(caplog, number, message):
    with caplog.at_level(logging.ERROR):
        tell(number, message)
    [record] = caplog.records
    assert record.name == "asyncio" and record.exc_info
