"""Servers of the application: one for a process of its own, and one in a thread beside a trainer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from ...rollout.errors import LockstepError
from ..service import RolloutService
from .app import create_app
from .edge.accepting import queue_connections, tell_of_failures_once
from .edge.config import HttpConfig
from .edge.connections import Connection, Connections, ask_for_descriptors
from .edge.errors import SERVER_ENDED
from .edge.listening import listen, share_address, url_of, uvicorn_config
from .generation.subscriptions import hub_of, stop_taking
from .observe.rollouts import Rollouts

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 10.0  # for everything after the server's own end: the engine, its ranks and its groups
_LOOK_AGAIN_S = 0.05  # between two checks of whether all requests are answered
_YOUNG_OBJECTS = (
    5000  # new objects before the garbage collector looks at them; all objects are looked at 1/110 as often
)
_TURN_S = 0.0002  # a thread that computes gives the interpreter's lock up after so long


class _Server(uvicorn.Server):
    """A server that reports when it listens, and marks the application before it ends.

    After a signal, and where `drains` is set, it drains: its socket stays open, new requests are refused, and open ones
    finish. A second signal ends the wait. A process that has not ended in time is ended firmly.
    """

    drains: Callable[[], bool] | None = None  # whether open requests can still finish; None: drain after a signal only

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None], http: HttpConfig) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._http = http
        self._firm_end: threading.Timer | None = None
        self._is_hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # The event loop waits for the lock after each send and receive, hundreds of times in a busy second.
        sys.setswitchinterval(min(sys.getswitchinterval(), _TURN_S))
        assert isinstance(self.config.app, FastAPI)
        hub_of(self.config.app)  # its threads start now, not when a request needs them
        tell_of_failures_once(asyncio.get_running_loop())
        await super().startup(sockets)
        queue_connections(sockets or ())
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, FastAPI)
        stop_taking(app)
        if self._captured_signals or self.drains is not None:
            await self._drain(app)
        app.state.is_closing = True
        app.state.attendance.close()
        limit_s = max(self.config.timeout_graceful_shutdown or 0, _LOOK_AGAIN_S)
        cutting_off = asyncio.get_running_loop().call_later(limit_s, self._cut_off)  # just before tasks are cancelled
        await super().shutdown(sockets)
        cutting_off.cancel()

    def _cut_off(self) -> None:
        """Close the connections whose clients do not read their answers: those could only be cancelled."""
        ours = [one for one in self.server_state.connections if isinstance(one, Connection)]
        unread = [connection for connection in ours if connection.flow.write_paused]
        if unread:
            logger.warning(
                "%d clients do not read their answers: they are cut off, because the server ends", len(unread)
            )
        for connection in unread:
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. A second signal ends the wait for open requests, a third one all waiting."""
        if self._is_hurried:
            self.force_exit = True
        elif self.should_exit:
            self._is_hurried = True
            return
        else:
            limit_s = self._http.drain_timeout_s + 2 * self._http.shutdown_timeout_s + _CLOSE_TIMEOUT_S
            self._firm_end = threading.Timer(limit_s, _end_firmly, (limit_s,))
            self._firm_end.daemon = True
            self._firm_end.start()
        super().handle_exit(sig, frame)

    def has_ended(self) -> None:
        """Note that the process ends by itself."""
        if self._firm_end is not None:
            self._firm_end.cancel()

    async def _drain(self, app: FastAPI) -> None:
        """Wait for open requests and an update. Requests that are left after `drain_timeout_s` are answered with their
        output so far."""
        can_finish = self.drains or (lambda: True)
        await self._until_idle(app, self._http.drain_timeout_s, lambda: self._is_hurried or not can_finish())
        hub = getattr(app.state, "hub", None)
        if hub is None or not hub.open:
            return
        logger.warning("%d open requests are aborted: the server ends", len(hub.open))
        engine, timeout_s = app.state.service.engine, self._http.shutdown_timeout_s

        def abort() -> None:
            engine.abort_request(abort_all=True, message=SERVER_ENDED, timeout_s=timeout_s)

        try:
            await asyncio.wait_for(app.state.reads.run(abort), timeout_s)
        except (LockstepError, TimeoutError) as error:
            logger.error("the open requests could not be aborted: %s", error or "the engine does not answer")
        await self._until_idle(app, timeout_s, lambda: self.force_exit)

    async def _until_idle(self, app: FastAPI, timeout_s: float, is_over: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline and not is_over():
            hub = getattr(app.state, "hub", None)
            if (hub is None or not hub.open) and not _is_updating(app):
                return
            await asyncio.sleep(_LOOK_AGAIN_S)


class BackgroundServer:
    """A server in a thread of this process, which the process does not wait for."""

    def __init__(
        self, service: RolloutService, config: HttpConfig, kept_samples: Rollouts | None = None, *,
        only_sessions: bool = False,
    ) -> None:  # fmt: skip
        """Bind the address. kept_samples, only_sessions: as `create_app` takes them.

        Raises ValueError for an address without the admin key that it needs, OSError for an address that cannot be
        bound.
        """
        config.check_bind()
        self._service, self._only_sessions = service, only_sessions
        self.app = create_app(service, config, kept_samples, only_sessions=only_sessions)
        self._socket = listen(config)
        self.port: int = self._socket.getsockname()[1]
        self._is_listening = threading.Event()
        self._server = _Server(_settings(self.app, config), self._is_listening.set, config)
        self._was_driven = service.engine.is_started
        self._thread = threading.Thread(target=self._run, name="lockstep-http", daemon=True)

    @property
    def url(self) -> str:
        """Address of the server, with its port."""
        return url_of(self._socket)

    def start(self) -> None:
        """Drive the engine's loop and listen. Returns when requests are answered."""
        self._service.engine.start()
        self._thread.start()
        if not self._is_listening.wait(_START_TIMEOUT_S):
            raise OSError(f"the server on {self.url} did not start within {_START_TIMEOUT_S:g} s")

    def close(self, *, drain: bool = True) -> None:
        """Stop the server. The engine's loop is stopped only if `start` started it. Idempotent; the caller still owns
        the service.

        New requests are refused at once. Open ones, and an update, have `drain_timeout_s` seconds while the engine can
        run them: outside a rollout phase, and while paused without an update, they are not waited for. What is left is
        answered with its output so far. drain: False waits for nothing.
        """
        if drain:
            self._server.drains = self._can_finish
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        if not self._only_sessions:  # whose callers cannot pause: a lease is another server's
            self._service.pause_lease.cancel()
        if not self._was_driven:
            self._service.engine.stop()

    def _can_finish(self) -> bool:
        engine = self._service.engine
        is_stopped = engine.is_paused and not _is_updating(self.app)
        return engine.model.in_rollout_phase and not is_stopped and engine.failure is None

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(drain=error is None)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def serve_in_background(
    service: RolloutService, config: HttpConfig | None = None, kept_samples: Rollouts | None = None, *,
    only_sessions: bool = False,
) -> BackgroundServer:  # fmt: skip
    """Serve a service of this process over HTTP. The server answers until it is closed, also while the engine is paused
    and while the trainer trains. kept_samples, only_sessions: as `create_app` takes them. Raises ValueError and OSError
    as `BackgroundServer`.

    Example: `server = serve_in_background(service, HttpConfig(port=0)); print(server.url)`
    """
    server = BackgroundServer(service, config or HttpConfig(), kept_samples, only_sessions=only_sessions)
    server.start()
    return server


def serve(
    service: RolloutService, config: HttpConfig, on_listening: Callable[[str], None] = lambda url: None,
    listening: socket.socket | None = None,
) -> None:  # fmt: skip
    """Serve in the main thread until SIGINT or SIGTERM, then drain and close the service. on_listening: called with the
    url. listening: the socket of `reserve`, for a service that took long to make.

    Raises ValueError and OSError as `BackgroundServer`, the exception of the signal, and RankFailure if a rank of the
    replica is lost: open requests have been answered with the failure then. The service is not closed in that case,
    because closing would wait for the lost rank."""
    listening = listening or reserve(config)
    share_address(listening)
    ask_for_descriptors()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # uvicorn ends first, then raises the signal again
    service.engine.start()
    app = create_app(service, config)
    gc.collect()
    gc.freeze()  # the million objects of what is imported: a full collection of garbage stops all threads for them
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])  # and one for a queue of thousands takes long, too
    server = _Server(_settings(app, config), lambda: on_listening(url_of(listening)), config)

    def end() -> None:
        server.should_exit = True

    service.engine.ranks.on_loss.append(end)
    try:
        server.run(sockets=[listening])
    finally:
        service.pause_lease.cancel()
        service.engine.ranks.check()
        service.close()
        server.has_ended()


def reserve(config: HttpConfig) -> socket.socket:
    """Return a socket at the server's address, which no other server gets meanwhile, and where connections are refused
    until it serves. Raises as `serve`."""
    config.check_bind()
    listening = listen(config)
    share_address(listening, shares=False)
    return listening


def _is_updating(app: FastAPI) -> bool:
    """Return whether a call writes weights now, or a session of such calls is open."""
    return app.state.updates.age_s is not None or app.state.service.sessions.is_open


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


def _end_firmly(limit_s: float) -> NoReturn:
    logger.error("the server did not end within %g s: it is ended", limit_s)
    os._exit(1)


def _settings(app: FastAPI, config: HttpConfig) -> uvicorn.Config:
    app.state.connections = Connections(config)
    return uvicorn_config(app, config, app.state.connections, has_lifespan=False)
