"""The servers of a router: one that runs in the calling thread, and one in a background thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn

from .app import create_app
from .changes.journal import UpdateJournal
from .config import RouterConfig
from .fleet.roster import Roster

_START_TIMEOUT_S = 30.0


class RouterServer:
    """A router with its listening socket."""

    def __init__(self, config: RouterConfig) -> None:
        """Open the socket, the journal and the roster. Raises ValueError for an address, a journal or a roster that is
        refused, OSError for one that cannot be opened."""
        config.http.check_bind()
        self._socket = _listen(config.http.host, config.http.port)
        try:
            self._journal = UpdateJournal(config.journal_path)  # its lock also protects the roster
        except (ValueError, OSError):
            self._socket.close()
            raise
        try:
            roster = Roster(config.roster_path, config.workers)
        except (ValueError, OSError):
            self._journal.close()
            self._socket.close()
            raise
        self._host, self.port = self._socket.getsockname()[:2]
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(config, self._journal, roster),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=max(1, round(config.http.shutdown_timeout_s)),
                server_header=False,
            )
        )

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM, or until `stop`."""
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
        self._thread = threading.Thread(target=self._server.run, name="lockstep-router", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return self._server.url

    def close(self) -> None:
        """Stop listening and wait for the end. Idempotent."""
        self._server.stop()
        self._thread.join(_START_TIMEOUT_S)

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
    server = RouterServer(config)
    announce(server.url)
    server.run()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, because asyncio sets TCP_NODELAY only then.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening
