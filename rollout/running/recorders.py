"""Turn a decode step over fixed memory into a function that runs it again: a plain call or a CUDA graph.

`cpu_graphs.py` has the recorder for a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_NUM_WARM_UPS = 2  # before a capture: compiles kernels and allocates the libraries' workspaces

Run = Callable[[], Sequence[Tensor]]


class Recorder(Protocol):
    """The interface of a recorder: it turns a step over fixed memory into a function that runs it again."""

    def record(self, run: Run) -> Run:
        """Return a function with the effect of `run`, whose results the next call may overwrite.

        May call `run` several times. The step's effect is guaranteed only after a call of the returned function.
        """
        ...


class PlainCalls:
    """A recorder that returns the plain call, for modules whose steps cannot be recorded."""

    def record(self, run: Run) -> Run:
        return run


class CUDAGraphs:
    """A recorder that captures CUDA graphs. They run one after another and leave their results in our buffers, so all
    that live share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, run: Run) -> Run:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch's allocator refuses a pool whose last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        # "thread_local": other threads may use the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = run()

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return results

        return replay
