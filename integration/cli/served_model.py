"""`lockstep serve`: an engine with its HTTP surface, in one process or on the ranks that torchrun started.

The ranks of a replica load their parts of the model together. Its controller listens; the other ranks follow it until
it closes the engine. They ignore signals, because torchrun sends a signal to all ranks at once.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import sys
from dataclasses import replace

import torch

from ...kernels.sampling import cpp as sampling
from ...kernels.sha256 import tiles
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ..http import server
from ..http.edge.config import HttpConfig
from ..lost_ranks import leave, loss_of
from ..ranks import process_group, this_rank
from ..service import RolloutService
from ..service_config import ServiceConfig
from ..warming import record_in_background

logger = logging.getLogger(__name__)

_MEET_TIMEOUT_S = 600.0  # for the first collective: ranks may load the model from disks of different speed before


def serve_model(
    model: str,
    http_config: HttpConfig,
    engine_config: EngineConfig,
    service_config: ServiceConfig,
    adapter: tuple[str, str] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Every rank of a replica calls it. A rank that finds another one lost names it and
    ends its own process with exit code 1. Raises ValueError and OSError as `server.serve`, and a signal's exception.

    adapter: name and folder of an adapter to load first, for one rank.
    """
    if engine_config.tp * engine_config.pp == 1:
        reserved = server.reserve(http_config)  # a model may take minutes to load
        alone = RolloutService(Engine(model, engine_config), service_config)
        if adapter is not None:
            alone.load_lora_adapter(*adapter)
        _serve(model, http_config, alone, reserved)
        return
    ranks = this_rank(engine_config.device or "")
    engine = None
    with process_group(ranks, math.ceil(max(engine_config.rank_timeout_s, _MEET_TIMEOUT_S)), watches=False):
        try:
            listening = server.reserve(http_config) if ranks.rank == 0 else None
            engine = Engine(model, replace(engine_config, device=str(ranks.device)))
            service = RolloutService(engine, service_config)
            if engine.is_controller:
                _serve(model, http_config, service, listening)
            else:
                _follow(service)
        except RuntimeError as error:
            if (failure := loss_of(error, engine.ranks if engine is not None else None)) is None:
                raise
            leave(failure, ranks.rank, "while serving" if engine else "before serving")


def compile_kernels(service: RolloutService) -> None:
    """Compile what the check of the model has not used, draws and checksums, so that no first call waits for it."""
    if service.engine.model.device.type == "cpu":
        sampling.serves(torch.zeros(1, 1, dtype=torch.float32))
        tiles.is_native()
    else:
        record_in_background(service.engine)


def _serve(model: str, config: HttpConfig, service: RolloutService, listening: socket.socket | None) -> None:
    compile_kernels(service)

    def announce(url: str) -> None:
        sys.stderr.write(f"lockstep: serving {model} at {url}\n")  # one write, because other ranks write to stderr too
        sys.stderr.flush()

    server.serve(service, config, announce, listening)


def _follow(service: RolloutService) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while service.engine.follow() != "closed":
        logger.warning("dismissed: following again")
    service.close()
