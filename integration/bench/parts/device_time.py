"""Times of a device's own work: on a GPU events around replays of a captured graph, on a CPU the clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from .runs import clock

_NUM_WARM_UPS = 3


def device_ms(acts: Sequence[Callable[[], object]], device: torch.device, repeats: int = 10) -> float:
    """Return the median milliseconds of one of `acts`, which take turns: the same work on inputs of their own, so that
    no input is still in a cache.

    On a GPU all are captured in one graph, and a replay is timed by events on the device: no launch and no Python is
    in the time. Work that cannot be captured, because the host takes part in it, raises RuntimeError there.
    """
    for act in [*acts] * _NUM_WARM_UPS:
        act()
    if device.type != "cuda":
        return statistics.median(_clocked(acts, device) for _ in range(repeats)) * 1e3 / len(acts)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [act() for act in acts]
    graph.replay()
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / len(acts))
    del kept
    return statistics.median(times)


def _clocked(acts: Sequence[Callable[[], object]], device: torch.device) -> float:
    began = clock(device)
    for act in acts:
        act()
    return clock(device) - began
