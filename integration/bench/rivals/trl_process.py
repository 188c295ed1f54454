"""TRL as a rival: its worker has a GRPOTrainer that waits before each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .worker_process import WorkerProcess

_WORKER = Path(__file__).with_name("trl_worker.py")


class TrlWorker:
    """A process of TRL with a trainer that is ready."""

    def __init__(self, python: str, settings: Mapping[str, object], threads: int) -> None:
        """Start the worker. settings: as `trl_worker` says. Raises ValueError as `WorkerProcess`."""
        environment = {"OMP_NUM_THREADS": str(threads), "WANDB_DISABLED": "true"}
        self._process = WorkerProcess("TRL", python, "--trl-python", _WORKER, settings, environment)
        self.version = self._process.version

    def step(self) -> tuple[float, int]:
        """Run one step. Returns its seconds and the number of sampled tokens. Raises ValueError with the end of the
        log when the worker ends."""
        answer = self._process.ask({})
        return float(answer["seconds"]), int(answer["num_tokens"])

    def close(self) -> None:
        """End the worker."""
        self._process.close()
