"""The parts of a decode step's time, by kernel where a recorded step is replayed, else by source file.

In a replayed step every call is made and timed by itself; the rest of the step is planning, delivery and that loop.
Otherwise Python's own profiler measures: time in a C++ kernel counts for our function that calls it, and a builtin of
torch counts for its caller. The profiler slows Python code down, so the parts with many calls appear somewhat too
large.
"""

from __future__ import annotations

import cProfile
import pstats
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ....rollout.engine import Engine
from .decode_load import decode_steps

# Parts by pattern of the kernel function's name, the first match counts; torch's operations match none.
KERNELS: tuple[tuple[str, str], ...] = (
    ("attention", "lockstep_attention"),
    ("sampler", "lockstep_draw"),
    ("norms, rotary, activation", "lockstep_(rms_norm|add_rms_norm|rotary|swiglu)"),
    ("products", "lockstep_linear(_grouped)?"),
)
OPERATIONS = "torch's operations"
# Parts by pattern of the path, the first match counts.
PARTS: tuple[tuple[str, str], ...] = (
    ("attention", r"kernels/attention/|rollout/model/attention\.py"),
    ("sampler", r"kernels/sampling/|rollout/running/sampler\.py"),
    ("norms, rotary, activation", r"kernels/layers/|fused_layers"),
    ("products", r"kernels/linear/|torch/nn/modules/linear|rollout/model/(numerics\.py|operations/products\.py)"),
    ("module code", r"/transformers/|/torch/"),
    ("scheduling", r"lockstep|rollout/"),
)
OTHER = "other Python"
CALLS = "kernels/machine/native.py"  # makes the calls of C++ kernels


def profile_decode(engine: Engine, batch: int, context: int, num_steps: int) -> dict[str, float]:
    """Compute each part's share of the time of `num_steps` decode steps; shares add up to 1, the largest first."""
    profiler, seconds = cProfile.Profile(), dict.fromkeys((*(part for part, _ in KERNELS), OPERATIONS), 0.0)
    in_replays = 0.0

    def around(step: Callable[[], object]) -> None:
        nonlocal in_replays
        record = _record_of(engine, batch)
        if record is None:
            profiler.runcall(step)
            return
        with _timed(record, seconds):
            started = time.perf_counter()
            step()
            in_replays += time.perf_counter() - started

    decode_steps(engine, batch, context, num_steps, around)
    if not in_replays:
        return shares(pstats.Stats(profiler))
    seconds["scheduling"] = in_replays - sum(seconds.values())
    return _in_order(seconds)


class HostTime:
    """The seconds of decode steps outside the replay of their record: planning, delivery, text. Pass it as `around`."""

    def __init__(self, engine: Engine, batch: int) -> None:
        self._engine, self._batch = engine, batch
        self.seconds: list[float] = []  # of the steps that replayed a record

    def __call__(self, step: Callable[[], object]) -> None:
        """Run a step, or several of one schedule, and measure each one's share."""
        record = _record_of(self._engine, self._batch)
        if record is None:
            step()
            return
        replay, in_replay = record.replay, 0.0

        def timed() -> Any:
            nonlocal in_replay
            began = time.perf_counter()
            found = replay()
            in_replay += time.perf_counter() - began
            return found

        record.replay = timed
        try:
            started, num_before = time.perf_counter(), self._engine.metrics.num_steps
            step()
            seconds = time.perf_counter() - started - in_replay
            num_steps = self._engine.metrics.num_steps - num_before
            self.seconds += [seconds / max(num_steps, 1)] * num_steps
        finally:
            del record.replay  # the method of its class again


def _record_of(engine: Engine, batch: int) -> Any | None:
    """Return the record that a step of this many rows replays on a CPU; None where it does not replay."""
    runner: Any = engine.parts.runner  # of one rank: it has graphs
    graphs = runner._graphs
    step = graphs and graphs._records.get((graphs.size_for(batch), ""))
    return step._record if getattr(step, "is_trusted", None) else None


@contextmanager
def _timed(record: Any, seconds: dict[str, float]) -> Iterator[None]:
    """Make a replay's calls one by one, time each, and add it to the seconds of its part."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        part = next((part for part, pattern in KERNELS if re.fullmatch(pattern, name)), OPERATIONS)

        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            found = function(*arguments)
            seconds[part] += time.perf_counter() - started
            return found

        return call

    plays = record.plays
    record.plays = [partial(timed(function), *arguments) for function, arguments in record.calls]
    try:
        yield
    finally:
        record.plays = plays


def shares(stats: pstats.Stats) -> dict[str, float]:
    """Compute the share of each part; the own time of a builtin, and of the calls of kernels, counts for the files of
    its callers."""
    seconds = dict.fromkeys((*(part for part, _ in PARTS), OTHER), 0.0)
    for (path, _, _), (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if path != "~" and not path.endswith(CALLS):
            seconds[part_of(path)] += own
            continue
        for (caller_path, _, _), (_, _, own_there, _) in callers.items():
            seconds[part_of(caller_path)] += own_there
    return _in_order(seconds)


def _in_order(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {part: round(spent / total, 4) for part, spent in ordered if spent}


def part_of(path: str) -> str:
    """Return the part of a source file."""
    return next((part for part, pattern in PARTS if re.search(pattern, path)), OTHER)
