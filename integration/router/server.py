"""The servers of a router: one that runs in the calling thread, and one in a background thread."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..http.edge.accepting import queue_connections, tell_of_failures_once
from ..http.edge.connections import Connections, ask_for_descriptors
from ..http.edge.listening import listen, url_of, uvicorn_config
from .app import create_app
from .changes.journal import UpdateJournal
from .config import RouterConfig
from .fleet.roster import Roster
from .fleet.served import ServedFile

_END_MARGIN_S = 30.0  # beyond the times of a router's settings, for its end
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A server that keeps its listening socket until the open requests are done, and ends without the signal's code.

    The first signal begins the drain; a second one ends the open requests at once.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._app, self._drain_timeout_s = app, drain_timeout_s
        self._at_once: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None  # while it drains

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone, which `signals_end` has. (uvicorn would raise them again at the end.)"""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tell_of_failures_once(asyncio.get_running_loop())
        await super().startup(sockets)
        queue_connections(sockets or ())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or end the drain."""
        if self._at_once is not None:
            loop, event = self._at_once
            loop.call_soon_threadsafe(event.set)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close the sockets and the connections."""
        self._at_once = (asyncio.get_running_loop(), asyncio.Event())
        await self._app.state.router.drain(self._drain_timeout_s, self._at_once[1])
        await super().shutdown(sockets)


class RouterServer:
    """A router with its listening socket."""

    def __init__(self, config: RouterConfig) -> None:
        """Open the socket and the files of the state. Raises ValueError for an address or a file that is refused,
        OSError for one that cannot be opened."""
        config.http.check_bind()
        self._socket = listen(config.http, queues=True)
        try:
            self._journal = UpdateJournal(config.journal_path)  # its lock also protects the other files
        except (ValueError, OSError):
            self._socket.close()
            raise
        try:
            roster = Roster(config.roster_path, config.workers)
            served = ServedFile(config.served_path, config.forget_served)
            served.check(roster.changes.workers)
        except (ValueError, OSError):
            self._journal.close()
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._url = url_of(self._socket)  # also of a server that has ended
        app = create_app(config, self._journal, roster, served)
        self._server = _Server(
            uvicorn_config(app, config.http, Connections(config.http, descriptors_each=2), has_lifespan=True),
            app,
            config.drain_timeout_s,
        )

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return self._url

    @contextmanager
    def signals_end(self) -> Iterator[None]:
        """End the server by SIGINT and SIGTERM that come inside the block, also before it runs. In the main thread."""
        before = {number: signal.signal(number, self._server.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        """Serve until `stop`. Then requests that are open may end, see `RouterConfig.drain_timeout_s`."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._journal.close()

    def stop(self) -> None:
        """Ask the server to end. Does not wait."""
        self._server.should_exit = True


class BackgroundRouter:
    """A router in a daemon thread of this process."""

    def __init__(self, config: RouterConfig) -> None:
        """Start the router. Raises as `RouterServer`."""
        self._server = RouterServer(config)
        self._limit_s = config.drain_timeout_s + config.http.shutdown_timeout_s + _END_MARGIN_S
        self._thread = threading.Thread(target=self._server.run, name="lockstep-router", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return self._server.url

    def close(self) -> None:
        """Stop the router as SIGTERM does, and wait for the end. Idempotent."""
        self._server.stop()
        self._thread.join(self._limit_s)

    def __enter__(self) -> BackgroundRouter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def route_in_background(config: RouterConfig) -> BackgroundRouter:
    """Start a router in a thread. Its socket listens at once: early connections wait until it answers.

    Example: `router = route_in_background(RouterConfig((url_a, url_b), HttpConfig(port=0), journal=path))`
    """
    return BackgroundRouter(config)


def route(config: RouterConfig, announce: Callable[[str], None]) -> None:
    """Run a router in this thread until SIGINT or SIGTERM. `announce` gets the URL when the socket listens. Raises
    ValueError and OSError as `RouterServer`."""
    ask_for_descriptors()
    server = RouterServer(config)
    with server.signals_end():
        announce(server.url)
        server.run()
