"""`lockstep bench`: run one benchmark and print its report."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType

from .arguments.parser import CommandParser
from .machine import machine

# name of a module in bench/: the quantities that it measures
BENCHMARKS = {
    "rollout": "tokens per second of a batch of prompts, alone or against vLLM and transformers' generate",
    "decode": "time of a decode step by batch and context, compared with the floor, and the parts of a step's time",
    "startup": "time to the first token of a new engine of a model folder, against transformers, in new processes",
    "soak": "whether memory stays constant over many steps with requests that start, end, are aborted and hit prefixes",
    "gpu": "share of the memory roofline, pauses, weight commits, hashing and kernels on a GPU",
    "overlap": "cost of work at delivery for a step, with overlap and without, and cost of the trace",
    "pause": "latency of each kind of pause, and the cost of continuing after it",
    "pin": "time to first token after a flood of requests, with a conversation pinned and without, by depth",
    "cache": "cost of the prefix cache: insert and match, by prompt length and by size of the cache",
    "sync": "weight pushes over every path against raw copies of the same bytes, and random group schedules",
    "pipeline": "one long prompt in two stages, with sequence pipelining and without; cost of a replica's controller",
    "ranks": "tokens per second of a replica of several ranks, beside one rank with as many threads",
    "grammar": "time saved by jump-forward on a load with much forced text, and cost of masks for requests without one",
    "speculation": "time saved by drafts that are often right, lost to drafts that never are, and saved in a long tail",
    "ahead": "time saved by rollouts ahead of training, with an engine beside the trainer and in a long tail",
    "job": "seconds of a step of the job, alone or against TRL's GRPOTrainer with its own generation",
    "replay": "samples proven per second over samples generated per second, and the cost of receipts",
    "serve": "cost of HTTP: streams over a socket against the same load by the Python API",
    "schedule": "scheduler time per step, by policy and by number of waiting requests",
}


_IN_ROOMS = {"pipeline": "several_ranks.pipeline", "ranks": "several_ranks.ranks"}


def module_of(name: str) -> ModuleType:
    """Import the module of a benchmark."""
    return importlib.import_module(f"..bench.{_IN_ROOMS.get(name, name)}", __package__)


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark and print its report, which names the processor and the path of products. Returns the exit
    code: 1 where it missed one of its bars (`passed` is False in its report)."""
    names = "\n".join(f"  {name:10} {what}" for name, what in BENCHMARKS.items())
    parser = CommandParser(
        prog="lockstep bench",
        description="Run a benchmark on this machine.",
        epilog=f"benchmarks:\n{names}\n\n`lockstep bench NAME --help` describes the options of a benchmark.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=tuple(BENCHMARKS), metavar="NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see below")
    chosen = parser.parse_args(arguments)
    module = module_of(chosen.name)
    parser = CommandParser(
        prog=f"lockstep bench {chosen.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, on the last line")
    module.add_arguments(parser)
    options = parser.parse_args(chosen.arguments)
    needed: dict[str, str] = module.environment(options) if hasattr(module, "environment") else {}
    if any(os.environ.get(name) != value for name, value in needed.items()):
        command = [sys.executable, "-m", "lockstep.integration.cli", "bench", chosen.name, *chosen.arguments]
        return subprocess.run(command, env={**os.environ, **needed}, check=False).returncode
    found = module.run(options)
    report = {**machine(), **found}  # later: the benchmark may set a limit before kernels are loaded
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:16} {_in_words(value)}")
    return 0 if report.get("passed", True) else 1


def _in_words(value: object, depth: int = 0) -> str:
    """Format a value of a report for people: a list as a range, an object with a line for each member, and a list of
    objects as a table."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        columns = [[name, *(_in_words(item[name], depth + 1) for item in value)] for name in value[0]]
        widths = [max(map(len, column)) for column in columns]
        rows = ("  ".join(map(str.rjust, cells, widths)) for cells in zip(*columns, strict=True))
        return "".join(f"\n  {row}" for row in rows)
    if isinstance(value, list):
        return " .. ".join(map(str, value))
    if not isinstance(value, dict):
        return str(value)
    if depth:
        return "".join(f"{name:>8}: {_in_words(item, depth + 1):8}" for name, item in value.items())
    return "".join(f"\n  {name:14} {_in_words(item, depth + 1)}" for name, item in value.items())
