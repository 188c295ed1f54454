"""`lockstep probe`: sample with a job's model, data and reward before its first run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..grpo.settings.config import JobConfig, load_config
from .arguments.parser import CommandParser

if TYPE_CHECKING:
    from ..grpo.probe import Probe

_WIDTH = 110


def run(arguments: Sequence[str]) -> int:
    """Probe the config and print what was found. Returns the exit code."""
    options = _parse(arguments)
    for name in ("prompts", "samples"):
        if getattr(options, name) < (least := 2 if name == "samples" else 1):
            raise ValueError(f"--{name} must be at least {least}, not {getattr(options, name)}")
    config = load_config(options.config, options.overrides)
    # Heavy imports come after the config, so that a wrong key is reported at once.
    from ..failures import show_place_in_user_code
    from ..grpo.planning.checks import check_job
    from ..grpo.probe import probe, probed_config
    from ..ranks import this_rank

    if (here := os.getcwd()) not in sys.path:  # where `lockstep train` finds the modules of rewards
        sys.path.insert(0, here)
    check_job(probed_config(config, options.prompts, options.samples), 1)
    try:
        found = probe(config, this_rank(config.engine.device), options.prompts, options.samples)
    except ValueError as error:
        show_place_in_user_code(error)  # of a reward, say
        raise
    if options.json:
        print(json.dumps(asdict(found) | {"step_s": found.step_s}))
    else:
        print("\n".join(_lines(found, config, options)))
    return 0


def _lines(found: Probe, config: JobConfig, options: argparse.Namespace) -> Iterator[str]:
    from ..grpo.probe import advice

    numbers = found.statistics
    for example in found.examples:
        yield example + "\n"
    yield f"samples    {options.prompts} prompts x {options.samples}, at temperature {config.rollout.temperature:g}"
    parts = [f"{name.partition('/')[2]} {value:.3f}" for name, value in numbers.items() if name.startswith("reward/")]
    yield f"reward     {found.reward_mean:.3f} in the mean, {numbers['reward_std']:.3f} its deviation" + (
        f"; {', '.join(parts)}" if parts else ""
    )
    if "success" in numbers:
        k = options.samples
        yield f"success    {numbers['success']:.1%}, pass@{k} {numbers[f'pass@{k}']:.1%}"
    yield f"groups     {1 - float(str(numbers['flat_groups'])):.0%} have spread"
    yield (
        f"lengths    {numbers['length_mean']:.1f} tokens ({numbers['length_min']} to {numbers['length_max']}), "
        f"{numbers['truncated_share']:.0%} cut off; entropy {numbers['entropy']:.2f} nats a token"
    )
    yield f"gap        {found.logprob_gap} between the engine's log-probabilities and the trainer's"
    where = "all ranks on this machine's cores" if found.is_on_cpu else f"{max(config.run.num_ranks, 1)} rank(s)"
    yield (
        f"step       about {found.step_s:.1f} s with {where}: {found.generate_s:.1f} s of generating "
        f"({found.tokens_per_s:.0f} tokens/s), {found.reward_s:.1f} s of rewards, {found.train_s:.1f} s of training, "
        f"{found.sync_s:.1f} s of committing"
    )
    minutes = found.step_s * config.run.num_steps / 60
    yield f"run        {config.run.num_steps} steps: about {minutes:.0f} min without evaluations"
    yield f"memory     {found.memory_bytes / 2**20:.0f} MiB at most, of one rank with a whole model"
    for line in advice(found, config):
        yield textwrap.fill(line, _WIDTH, initial_indent="note       ", subsequent_indent=" " * 11)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep probe",
        description="Sample some prompts of a job with its model, data and reward, train on a few of the samples, and "
        "print what that says of the run: rewards, spread, lengths, seconds a step, memory. One process; nothing is "
        "written, and the model's folder stays as it is.",
    )
    parser.add_argument("config", help="a TOML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="number of prompts (16)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="samples of each prompt (8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for other programs")
    return parser.parse_intermixed_args(arguments)
