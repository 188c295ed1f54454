"""The acceptance of connections: a few in each pass of the event loop, and one line of the log where it fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

ACCEPTED_A_PASS = 16  # connections that the event loop accepts before it serves others
_QUEUE = 2048  # connections that wait to be accepted
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SPELL_S = 10.0  # a failure after so long without one is told again; asyncio tries each second


def queue_connections(sockets: Sequence[socket.socket]) -> None:
    """Let more connections wait at listening sockets than the event loop accepts in a pass, which asyncio has taken for
    both."""
    for listening in sockets:
        listening.listen(_QUEUE)


def tell_of_failures_once(loop: asyncio.AbstractEventLoop) -> None:
    """Replace the traceback of each connection that could not be accepted, for lack of a file descriptor or of memory,
    by one line for all in a row. asyncio accepts them when there is one again."""
    last_failed = -_SPELL_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last_failed
        error = context.get("exception")
        is_accept = isinstance(error, OSError) and error.errno in _LACKS and "accept" in context.get("message", "")
        if not is_accept:
            loop.default_exception_handler(context)
            return
        is_new, last_failed = time.monotonic() - last_failed >= _SPELL_S, time.monotonic()
        if is_new:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.error(
                "connections wait, because none can be accepted: %s (this process may have %s file descriptors); those "
                "that are open go on", error, "any number of" if limit == resource.RLIM_INFINITY else limit,
            )  # fmt: skip

    loop.set_exception_handler(handle)
