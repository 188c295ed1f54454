"""Decode steps recorded before requests need them, one at a time between the engine's steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

from ..rollout.engine import Engine
from ..rollout.running.model_runner import ModelRunner

Tell = Callable[[int, int, int], None]  # sizes recorded so far, all of them, and the size that was recorded last


def record_sizes(engine: Engine, tell: Tell = lambda done, of, size: None) -> int:
    """Record each decode size that has no record yet; returns their number. Kernels that no step has used are compiled.

    Requests are served in between: each waits for one recording at most. A size is left to the step that needs it while
    no KV block is free. Returns 0 for a replica of several ranks, whose steps are not recorded.
    """
    runner = engine.parts.runner
    if not isinstance(runner, ModelRunner):
        return 0
    sizes, num_recorded = runner.unrecorded_sizes, 0
    for number, size in enumerate(sizes):
        num_recorded += engine.between_steps("record a decode step", partial(_record, engine, runner, size))
        tell(number + 1, len(sizes), size)
    return num_recorded


def _record(engine: Engine, runner: ModelRunner, size: int) -> bool:
    block = next(iter(engine.parts.ledger.free_blocks()), None)  # it stays free: what is written to it is never read
    if block is None or size not in runner.unrecorded_sizes:
        return False
    with engine.model.rollout_phase():
        runner.record_ahead(size, block)
    return size not in runner.unrecorded_sizes


def record_in_background(engine: Engine) -> threading.Thread:
    """Start a thread that records all sizes while the engine serves, with a line of progress on stderr."""
    thread = threading.Thread(target=_record_and_tell, args=(engine,), name="lockstep-record", daemon=True)
    thread.start()
    return thread


def _record_and_tell(engine: Engine) -> None:
    try:
        record_sizes(engine, say_progress)
    except RuntimeError as error:  # the engine was closed, or its memory released, in between
        sys.stderr.write(f"lockstep: decode steps are recorded when they are needed: {error}\n")


def say_progress(done: int, of: int, size: int) -> None:
    """Write a line of progress to stderr, over the last one on a terminal."""
    end = "\r" if sys.stderr.isatty() and done < of else "\n"
    if end == "\n" and done < of and done % 8:
        return  # a log gets a line for every eighth size
    sys.stderr.write(f"lockstep: recorded {done} of {of} decode steps (the last has {size} rows){end}")
    sys.stderr.flush()
