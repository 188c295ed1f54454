"""The second process of `lockstep bench sync`: an engine with its verbs on a socket, and one side of raw copies."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ...push.local_target import run_verb
from ...push.remote_engine import RemoteTarget, VerbServer
from ...service import RolloutService
from .sync_raw import RawEnd, flat_model, memory, restart_peak

ENGINE = EngineConfig(kv_cache="64 blocks", max_num_seqs=8, max_num_batched_tokens=256)
_START_S, _END_S = 180.0, 10.0


class Peer(RemoteTarget):
    """An engine in a new process, as a target, with more verbs for the benchmark, named `raw_...`."""

    def __init__(self, preset: str, num_threads: int, folder: Path) -> None:
        """Start the process and wait until it answers. Raises RuntimeError when it does not start."""
        path = folder / "engine.sock"
        super().__init__(path, "engine")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(preset, num_threads, path, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            ready = self._pipe.poll(_START_S) and self._pipe.recv()
        except EOFError:
            ready = False
        if not ready:
            self.close()
            raise RuntimeError("the engine's process did not come up")

    def close(self) -> None:
        """End the process."""
        self._pipe.close()  # the process ends at this
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(preset: str, num_threads: int, path: Path, pipe: Connection) -> None:
    torch.set_num_threads(num_threads)
    model, block = flat_model(preset)
    service, raw = RolloutService(Engine(model, ENGINE)), RawEnd(model, block)
    service.engine.start()
    raw_verbs: dict[str, Callable[..., object]] = {
        "raw_join": raw.join,
        "raw_broadcast": raw.broadcast,
        "raw_attach": raw.attach,
        "raw_read": raw.read_segment,
        "raw_hash": raw.hash,
        "raw_memcpy": raw.memcpy,
        "raw_memory": memory,
        "raw_restart_peak": restart_peak,
        "model_digest": service.model_digest,
    }

    def run(verb: str, timeout_s: float, arguments: dict[str, object]) -> dict[str, object]:
        if verb in raw_verbs:
            return {"result": raw_verbs[verb](**arguments)}
        return run_verb(service, verb, timeout_s, arguments)

    server = VerbServer(path, run)
    server.start()
    pipe.send(True)
    with contextlib.suppress(EOFError):
        pipe.recv()  # returns when the other process ends
    server.close()
    service.close()
