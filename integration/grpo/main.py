"""The main job: GRPO under torchrun. It samples from the model that it trains.

torchrun --nproc-per-node 2 -m lockstep.integration.grpo configs/arithmetic_cpu.toml key=value...
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from ..failures import FileFailed, of_path
from ..one_line import in_the_last_line
from .settings.config import JobConfig, load_config
from .settings.unread import unread_settings

if TYPE_CHECKING:
    from ..ranks import Ranks

logger = logging.getLogger(__name__)

REFUSAL_S = 20  # time in which all ranks of one torchrun have read the config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, or with --check print its plan. Returns the exit code: 2 for a mistake of the user, 1 for a file
    that cannot be written or read, 130 after Ctrl-C."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:  # which all ranks get at once
        if os.environ.get("RANK", "0") == "0":
            from ..failures import RESUME

            print(f"lockstep: interrupted; {RESUME}", file=sys.stderr, flush=True)
        return 130


def _main(arguments: Sequence[str] | None) -> int:
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
        from .planning.checks import check_job
        from .planning.description import describe_plan
        from .planning.sampling_check import distortion_warning

        num_ranks = int(os.environ.get("WORLD_SIZE", "0")) or config.run.num_ranks or 1
        check_job(config, num_ranks, resume=options.resume)
        if options.check:
            print(describe_plan(config, num_ranks))
            return 0
        if rank == "0" and (warning := distortion_warning(config)):
            logger.warning(warning)
        if rank == "0" and (unread := unread_settings(config)):
            logger.warning("settings that are not read: %s", "; ".join(unread))
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and of_path(error) is None:
            raise
        # Every rank finds the same faults, before a process group exists that could hang; one rank reports them.
        if rank != "0" and _is_ended_by_launcher():
            return 2
        return _report(error)
    return _run(config, rank, resume=options.resume)


def _run(config: JobConfig, rank: str, *, resume: bool) -> int:
    """Run the job on this rank. Returns the exit code. Of a failure that concerns all ranks one rank reports."""
    from ..failures import EngineFailed, PolicyDiverged, show_place_in_user_code
    from .results.run_folder import owned_folder

    try:
        # Owned before a process group exists: a refused rank 0 leaves no other rank in a collective.
        with owned_folder(config.folder, resume=resume) if rank == "0" else nullcontext():
            run(config, resume=resume)
    except ValueError as error:
        show_place_in_user_code(error)
        return _report(error)
    except (FileFailed, PolicyDiverged) as error:
        if rank != "0" and _is_ended_by_launcher():  # rank 0 has most likely failed at the same
            return 1
        return _report(error, 1)
    except EngineFailed as error:
        return _report(error, 1)
    except Exception as error:  # a boundary of processes
        # Longer than a rank waits that has a failure of its own to report.
        if _is_symptom(error) and "TORCHELASTIC_RUN_ID" in os.environ and _is_ended_by_launcher(2 * REFUSAL_S):
            return 1
        if getattr(error, "__notes__", ()):  # of a call of a user's function: its author wants the line of code, too
            traceback.print_exception(error)
            return _say(in_the_last_line(error, has_class=True), 1)
        raise
    return 0


def _diverged(step: int, error: Exception) -> Exception:
    """Return the one line of logits that are not finite."""
    from ..failures import RESUME, PolicyDiverged

    found = PolicyDiverged(
        f"training step {step}: {error}: the policy has diverged; change what made its steps so large "
        f"(train.learning_rate, say), then {RESUME}"
    )
    found.__cause__ = error
    return found


def _is_symptom(error: Exception) -> bool:
    """Return whether another rank has caused an error, or this rank's engine may have."""
    from ...rollout.ranks.remote_errors import is_of_a_group
    from ..failures import OtherRankFailed

    return isinstance(error, OtherRankFailed) or is_of_a_group(error)


def _is_ended_by_launcher(timeout_s: float | None = None) -> bool:
    """Wait for the SIGTERM that torchrun sends after another rank has ended. Returns whether it came.

    If this rank ended first, torchrun would end rank 0 before rank 0 has reported the fault. If no signal comes, only
    this rank found the fault: its machine has another config, or no such file.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return signal.sigtimedwait({signal.SIGTERM}, REFUSAL_S if timeout_s is None else timeout_s) is not None


def _report(error: Exception, code: int = 2) -> int:
    line = of_path(error) if isinstance(error, OSError) else None
    return _say(line or in_the_last_line(error), code)


def _say(line: str, code: int) -> int:
    with suppress(OSError):  # where the log's disk is full too, the exit code has to do
        print(f"lockstep: error: {line}", file=sys.stderr, flush=True)
    return code


def _set_up_logging(rank: str) -> None:
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def run(config: JobConfig, *, resume: bool) -> None:
    """Run the training to its end. All ranks of torchrun call it together."""
    from ..lost_ranks import outlive_sigterm
    from ..ranks import process_group, this_rank

    ranks = this_rank(config.engine.device)
    with process_group(ranks, config.run.timeout_s, setting="run.timeout_s"):
        if config.parallel.num_ranks > 1:
            outlive_sigterm()  # not before: a rank that waits for the others to come has nothing to report
        _train(config, ranks, resume=resume)


def _train(config: JobConfig, ranks: Ranks, *, resume: bool) -> None:
    from ...rollout.errors import BrokenLogits
    from ..failures import RESUME, EngineFailed, PolicyDiverged
    from ..lost_ranks import leave, loss_of
    from .job import GrpoJob
    from .results.run_folder import say

    started = time.perf_counter()
    job = None
    try:
        with ranks.activity.of("loading"):
            job = GrpoJob(config, ranks, resume=resume)
        job.run()
    except Exception as error:  # a boundary between processes: closing would wait for ranks without this error
        if job is not None and isinstance(error, BrokenLogits):
            error = _diverged(job.step, error)
        if config.parallel.num_ranks == 1 or isinstance(error, ValueError):
            # The other ranks may have waited for this one, which waited for its engine.
            if job is not None and _is_symptom(error) and (lost := job.engine.loss()):
                raise EngineFailed(f"{lost}; {RESUME}") from error
            raise error
        where = f"in training step {job.step}" if job else "before training"
        cause = loss_of(error, job.engine.ranks if job else None) or error
        leave(cause, ranks.rank, where, is_known=isinstance(cause, FileFailed | PolicyDiverged))
    finally:
        if job is not None:
            job.close()
    if ranks.is_first:
        say(f"total {time.perf_counter() - started:.0f} s; results in {config.folder}")
