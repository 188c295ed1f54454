"""The main job: GRPO under torchrun. It samples from the model that it trains.

torchrun --nproc-per-node 2 -m lockstep.integration.grpo configs/arithmetic_cpu.toml key=value...
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config import JobConfig, load_config

if TYPE_CHECKING:
    from ..ranks import Ranks

REFUSAL_S = 20  # time in which all ranks of one torchrun have read the config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, or with --check print its plan. Returns the exit code: 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="lockstep.integration.grpo", description=__doc__)
    parser.add_argument("config", help="a TOML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--check", action="store_true", help="validate the config, print the plan and stop")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of this run")
    options = parser.parse_intermixed_args(arguments)
    rank = os.environ.get("RANK", "0")
    _set_up_logging(rank)
    try:
        config = load_config(options.config, options.overrides)
        # Heavy imports come after the config, so that a wrong key is reported at once.
        from .plan import check_job, describe_plan

        num_ranks = int(os.environ.get("WORLD_SIZE", "0")) or config.run.num_ranks or 1
        check_job(config, num_ranks)
        if options.check:
            print(describe_plan(config, num_ranks))
            return 0
    except ValueError as error:
        # Every rank finds the same faults, before a process group exists that could hang; one rank reports them.
        if rank != "0" and _is_ended_by_launcher():
            return 2
        return _refuse(error)
    try:
        run(config, resume=options.resume)
    except ValueError as error:
        return _refuse(error)
    return 0


def _is_ended_by_launcher() -> bool:
    """Wait for the SIGTERM that torchrun sends after another rank has ended. Returns whether it came.

    If this rank ended first, torchrun would end rank 0 before rank 0 has reported the fault. If no signal comes, only
    this rank found the fault: its machine has another config, or no such file.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return signal.sigtimedwait({signal.SIGTERM}, REFUSAL_S) is not None


def _refuse(error: ValueError) -> int:
    print(f"lockstep: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2


def _set_up_logging(rank: str) -> None:
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def run(config: JobConfig, *, resume: bool) -> None:
    """Run the training to its end. All ranks of torchrun call it together."""
    from ..lost_ranks import outlive_sigterm
    from ..ranks import process_group, this_rank

    if config.parallel.num_ranks > 1:
        outlive_sigterm()
    ranks = this_rank(config.engine.device)
    with process_group(ranks, config.run.timeout_s):
        _train(config, ranks, resume=resume)


def _train(config: JobConfig, ranks: Ranks, *, resume: bool) -> None:
    from ..lost_ranks import leave, loss_of
    from .job import GrpoJob

    if ranks.is_first:
        prepare_folder(config.folder, resume=resume)
    started = time.perf_counter()
    job = None
    try:
        job = GrpoJob(config, ranks, resume=resume)
        job.run()
    except Exception as error:  # a boundary between processes: closing would wait for ranks without this error
        if config.parallel.num_ranks == 1 or isinstance(error, ValueError):
            raise
        where = f"in training step {job.step}" if job else "before training"
        leave(loss_of(error, job.engine.ranks if job else None) or error, ranks.rank, where)
    finally:
        if job is not None:
            job.close()
    if ranks.is_first:
        print(f"total {time.perf_counter() - started:.0f} s; results in {config.folder}", flush=True)


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Make the run's folder. An existing one is used with `resume` and renamed without; it is never overwritten."""
    if folder.exists() and not resume:
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        shutil.move(folder, aside)
        print(f"an earlier run of this name was moved to {aside}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
