"""Servers of the Tinker API: one for a process of its own, and one in a thread."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import uvicorn

from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ...http.edge.accepting import queue_connections, tell_of_failures_once
from ...http.edge.config import HttpConfig
from ...http.edge.connections import Connections, ask_for_descriptors
from ...http.edge.listening import listen, url_of, uvicorn_config
from ...service import RolloutService
from ..training.config import TinkerConfig
from ..training.trainer import Trainer
from .app import create_app

_START_TIMEOUT_S = 60.0


class _Server(uvicorn.Server):
    """A server that reports when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tell_of_failures_once(asyncio.get_running_loop())
        await super().startup(sockets)
        queue_connections(sockets or ())
        self._on_listening()


class TinkerServer:
    """A server of one base model, with its engine and its listening socket."""

    def __init__(self, model: str | Path, config: TinkerConfig, engine: EngineConfig, http: HttpConfig) -> None:
        """Listen, and load the model. Raises ValueError for settings that do not fit, OSError for an address that
        cannot be bound."""
        check(engine, http)
        self._socket = listen(http)
        try:
            self.service = RolloutService(Engine(model, engine))
            self.trainer = Trainer(self.service, config)
        except BaseException:
            self._socket.close()
            raise
        self._is_listening = threading.Event()
        self._told: Callable[[str], None] = lambda url: None
        self._server = _Server(
            uvicorn_config(create_app(self.trainer, config, http), http, Connections(http), has_lifespan=True),
            self._listening,
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address, with its port: the client's `base_url`."""
        return url_of(self._socket)

    def run(self, on_listening: Callable[[str], None] = lambda url: None) -> None:
        """Serve until `stop`, or a signal that uvicorn takes; then close the engine."""
        self._told = on_listening
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.service.close()

    def start(self) -> None:
        """Serve in a thread. Returns when requests are answered."""
        self._thread = threading.Thread(target=self.run, name="lockstep-tinker-http", daemon=True)
        self._thread.start()
        if not self._is_listening.wait(_START_TIMEOUT_S):
            raise OSError(f"the server on {self.url} did not start within {_START_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Stop the server of `start`, and wait for its end."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def _listening(self) -> None:
        self._is_listening.set()
        self._told(self.url)


def serve(
    model: str | Path, config: TinkerConfig, engine: EngineConfig, http: HttpConfig, announce: Callable[[str], None]
) -> None:
    """Serve in the main thread until SIGINT or SIGTERM. announce: called with the URL. Raises as `TinkerServer`, and
    the exception of the signal."""
    ask_for_descriptors()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # uvicorn ends first, then raises the signal again
    TinkerServer(model, config, engine, http).run(announce)


def check(engine: EngineConfig, http: HttpConfig) -> None:
    """Raise ValueError for settings of an engine or a server that this server cannot have."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters need PEFT, the extra `lora`: pip install -e '.[lora]'")
    if engine.tp * engine.pp > 1 or engine.k_blocks > 1:
        raise ValueError("adapters need one rank and k_blocks=1 (tp=1, pp=1)")
    if not engine.invariant:
        raise ValueError("invariant=false: the log-probabilities of samples and of training would differ")
    if http.api_key and not http.api_key.startswith("tml-"):
        raise ValueError("the API key must begin with tml-, because the SDK refuses others")
    if not http.is_loopback and not http.api_key:
        raise ValueError(f"refusing to listen on {http.host!r} without an API key: any client could train (--api-key)")


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)
