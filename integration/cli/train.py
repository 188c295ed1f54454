"""`lockstep train`: check a config, and start the GRPO job under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..grpo.settings.config import load_config
from .arguments.parser import PACKAGE, CommandParser


def run(arguments: Sequence[str]) -> int:
    """Check the config and print the plan, then replace this process by torchrun. With --check, return exit code 0
    instead."""
    options = _parse(arguments)
    config = load_config(options.config, options.overrides)
    # Heavy imports come after the config, so that a wrong key is reported at once.
    import torch

    from ..grpo.planning.checks import check_job
    from ..grpo.planning.description import describe_plan

    if (here := os.getcwd()) not in sys.path:  # where the ranks find the modules of rewards, for Python starts them -m
        sys.path.insert(0, here)
    num_ranks = options.nproc_per_node
    if num_ranks is None:
        num_ranks = config.run.num_ranks or torch.cuda.device_count() or 2
    if num_ranks < 1:
        raise ValueError(f"--nproc-per-node must be at least 1, not {num_ranks}")
    check_job(config, num_ranks, resume=options.resume)
    print(describe_plan(config, num_ranks))
    if options.check:
        return 0
    print(f"starting   {num_ranks} rank{'' if num_ranks == 1 else 's'} with torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", f"{PACKAGE}.integration.grpo", options.config, *options.overrides]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--resume"] if options.resume else [])])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep train",
        description="Check a config, then run the GRPO job under torchrun on this machine. For several machines, call "
        "torchrun -m lockstep.integration.grpo yourself.",
    )
    parser.add_argument("config", help="a TOML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="number of ranks; default: run.num_ranks, else one per GPU, else 2",
    )
    parser.add_argument("--check", action="store_true", help="print the plan and stop")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of this run")
    return parser.parse_intermixed_args(arguments)
