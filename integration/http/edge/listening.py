"""Listening sockets, and the settings of uvicorn that all servers here have."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from .accepting import ACCEPTED_A_PASS, queue_connections
from .config import HttpConfig
from .connections import Connections


def listen(config: HttpConfig, *, queues: bool = False) -> socket.socket:
    """Return a socket at the address of the settings. queues: connections wait from now on; else they are refused until
    the server starts. Raises OSError naming an address that cannot be bound."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    share_address(listening)
    try:
        listening.bind((config.host, config.port))
        if queues:
            queue_connections([listening])
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    return listening


def share_address(listening: socket.socket, *, shares: bool = True) -> None:
    """Let the address be bound beside a socket that does not listen, as Linux does by `SO_REUSEADDR`: a server that
    listens needs that for the one that follows it, whose connections of before may linger. Or refuse it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shares))


def url_of(listening: socket.socket) -> str:
    """Return the address of a listening socket, with its port."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_config(app: FastAPI, config: HttpConfig, connections: Connections, *, has_lifespan: bool) -> uvicorn.Config:
    """Return uvicorn's settings for an application. has_lifespan: whether it has a startup and a shutdown."""
    return uvicorn.Config(
        app,
        http=connections.protocol(),  # type: ignore[arg-type]
        loop="asyncio",  # whose transports `Connection` knows; by itself uvicorn takes uvloop where that is installed
        ws="none",
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        log_config=None,  # the program configures logging
        log_level="warning",
        access_log=False,
        lifespan="on" if has_lifespan else "off",
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
        server_header=False,
        backlog=ACCEPTED_A_PASS,
    )
