"""Servers of the application: one for a process of its own, and one in a thread beside a trainer."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from ..service import RolloutService
from .app import create_app
from .edge.config import HttpConfig

_START_TIMEOUT_S = 30.0


class _Server(uvicorn.Server):
    """A server that reports when it listens, and marks the application before it ends."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.is_closing = True
        await super().shutdown(sockets)


class BackgroundServer:
    """A server in a thread of this process, which the process does not wait for."""

    def __init__(self, service: RolloutService, config: HttpConfig) -> None:
        """Bind the address. Raises ValueError for an address without the admin key that it needs, OSError for an
        address that cannot be bound."""
        config.check_bind()
        self._service = service
        self.app = create_app(service, config)
        self._socket = _listen(config)
        self.port: int = self._socket.getsockname()[1]
        self._is_listening = threading.Event()
        self._server = _Server(_uvicorn_config(self.app, config), self._is_listening.set)
        self._was_driven = service.engine.is_started
        self._thread = threading.Thread(target=self._run, name="lockstep-http", daemon=True)

    @property
    def url(self) -> str:
        """Address of the server, with its port."""
        return _url(self._socket)

    def start(self) -> None:
        """Drive the engine's loop and listen. Returns when requests are answered."""
        self._service.engine.start()
        self._thread.start()
        if not self._is_listening.wait(_START_TIMEOUT_S):
            raise OSError(f"the server on {self.url} did not start within {_START_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Stop the server. Open requests have `shutdown_timeout_s` seconds, then their connections are closed.
        The engine's loop is stopped only if `start` started it. Idempotent; the caller still owns the service."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self.app.state.pause_lease.cancel()
        if not self._was_driven:
            self._service.engine.stop()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def serve_in_background(service: RolloutService, config: HttpConfig | None = None) -> BackgroundServer:
    """Serve a service of this process over HTTP. The server answers until it is closed, also while the engine is paused
    and while the trainer trains. Raises ValueError and OSError as `BackgroundServer`.

    Example: `server = serve_in_background(service, HttpConfig(port=0)); print(server.url)`
    """
    server = BackgroundServer(service, config or HttpConfig())
    server.start()
    return server


def serve(service: RolloutService, config: HttpConfig, on_listening: Callable[[str], None] = lambda url: None) -> None:
    """Serve in the main thread until SIGINT or SIGTERM, then close the service. on_listening: called with the url.

    Raises ValueError and OSError as `BackgroundServer`, the exception of the signal, and RankFailure if a rank of the
    replica is lost: open requests have been answered with the failure then. The service is not closed in that case,
    because closing would wait for the lost rank."""
    config.check_bind()
    listening = _listen(config)
    signal.signal(signal.SIGTERM, _end)  # uvicorn ends first, then raises the signal again
    service.engine.start()
    app = create_app(service, config)
    server = _Server(_uvicorn_config(app, config), lambda: on_listening(_url(listening)))

    def end() -> None:
        server.should_exit = True

    service.engine.ranks.on_loss.append(end)
    try:
        server.run(sockets=[listening])
    finally:
        app.state.pause_lease.cancel()
        service.engine.ranks.check()
        service.close()


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(config: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    return listening


def _uvicorn_config(app: FastAPI, config: HttpConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # the program configures logging
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
        server_header=False,
    )
