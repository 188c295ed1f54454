"""Turn a decode step over fixed memory into a function that runs it again: as it is, or as a CUDA graph.

`cpu_graphs.py` has the recorder for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_NUM_WARM_UPS = 2  # before a capture: compiles kernels, and makes the workspaces that libraries keep

Run = Callable[[], Sequence[Tensor]]


class Recorder(Protocol):
    """How a step that reads and writes fixed memory becomes something to be run again."""

    def record(self, run: Run) -> Run:
        """A function that does what `run` does, whose results the next call may overwrite. May call `run` several
        times, and need not have its effect yet."""
        ...


class PlainCalls:
    """For a CPU and a module whose steps cannot be recorded."""

    def record(self, run: Run) -> Run:
        return run


class CUDAGraphs:
    """Captures. All graphs share one memory pool: they run one after another, and what they leave is in our buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may talk to the device meanwhile: what they do is not ours to forbid.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = run()

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return results

        return replay
