"""`lockstep bench`: finds the benchmark, and prints its report."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence

from .parser import CommandParser

# name of a module in bench/: what it measures
BENCHMARKS = {
    "rollout": "tokens per second of a batch of prompts, alone or against vLLM and transformers' generate",
    "decode": "time of a decode step by batch and context, beside the floor, and where one step's time goes",
    "soak": "whether memory stays flat over many steps with requests that come, end, are aborted and hit prefixes",
    "gpu": "what a GPU reaches: share of the memory roofline, pauses, weight commits, hashing, kernels",
    "overlap": "what work at delivery costs a step with overlap and without, and what the trace costs",
    "pause": "latency of each kind of pause, and the cost of going on after it",
    "pin": "time to first token after a flood, with a conversation pinned and without, by depth",
    "cache": "what the prefix cache costs: insert and match, by prompt length and by size of the cache",
    "sync": "weight pushes over every path against raw copies of the same bytes, and random group schedules",
    "pipeline": "one long prompt in two stages with sequence pipelining and without; what a replica's controller costs",
    "grammar": "what jump-forward saves on a load with much forced text, and what masks cost a free neighbour",
    "serve": "what HTTP costs: streams over a socket against the same load by the Python API",
    "schedule": "scheduler time per step, by policy and by how many requests wait",
}


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark. Returns the exit code: 1 where its report says that it missed a bar (`passed` is False)."""
    names = "\n".join(f"  {name:10} {what}" for name, what in BENCHMARKS.items())
    parser = CommandParser(
        prog="lockstep bench",
        description="Measure something on this machine.",
        epilog=f"benchmarks:\n{names}\n\n`lockstep bench NAME --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=tuple(BENCHMARKS), metavar="NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see below")
    chosen = parser.parse_args(arguments)
    module = importlib.import_module(f"..bench.{chosen.name}", __package__)
    parser = CommandParser(
        prog=f"lockstep bench {chosen.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, on the last line")
    module.add_arguments(parser)
    options = parser.parse_args(chosen.arguments)
    report = module.run(options)
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:16} {_in_words(value)}")
    return 0 if report.get("passed", True) else 1


def _in_words(value: object, depth: int = 0) -> str:
    """A value of a report as people read it: a list is a range, an object has a line for each of its members, a list of
    objects is a table."""
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
