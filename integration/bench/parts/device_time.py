"""Times of a device's own work: on a GPU events around replays of a captured graph, on a CPU the clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from .runs import clock

_NUM_WARM_UPS = 3
_LEAST_MS = 2.0  # of a replay: its launch, some ten microseconds, is in its time
_MOST_ACTS = 256  # of a graph


def device_ms(acts: Sequence[Callable[[], object]], device: torch.device, repeats: int = 10) -> float:
    """Return the median milliseconds of one of `acts`, which take turns: the same work on inputs of their own, so that
    no input is still in a cache.

    On a GPU a graph captures them all, again and again until it has some milliseconds of work, and a replay is timed by
    events on the device: no launch and no Python is in the time. Every call is made on one stream of its own, gradients
    too if an act runs its forward at its first call. Work that cannot be captured, because the host takes part in it,
    raises RuntimeError.
    """
    if device.type != "cuda":
        for act in [*acts] * _NUM_WARM_UPS:
            act()
        return statistics.median(_clocked(acts, device) for _ in range(repeats)) * 1e3 / len(acts)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for act in [*acts] * _NUM_WARM_UPS:
            act()
        ms = _between_events(lambda: [act() for act in acts])
    rounds = max(1, min(_MOST_ACTS // len(acts), round(_LEAST_MS / max(ms, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for act in acts:
                act()
    graph.replay()
    torch.cuda.current_stream(device).wait_stream(stream)
    return statistics.median(_between_events(graph.replay) for _ in range(repeats)) / (rounds * len(acts))


def _between_events(run: Callable[[], object]) -> float:
    """Return the milliseconds between events before and after a call, on the current stream."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def _clocked(acts: Sequence[Callable[[], object]], device: torch.device) -> float:
    began = clock(device)
    for act in acts:
        act()
    return clock(device) - began
