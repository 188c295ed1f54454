"""The command `lockstep` with its subcommands. Parsing imports no heavy libraries; each subcommand imports its own."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from ..failures import FileFailed
from ..version import version
from .arguments.parser import CommandParser
from .bench import BENCHMARKS

# name of a module beside this one, whose `run` gets the rest of the command line: its line of help
COMMANDS = {
    "generate": "answer the prompts of a file or of standard input",
    "serve": "serve one engine over HTTP",
    "route": "serve many engines at one address",
    "ctl": "pause, continue, flush, pin or inspect a served engine from a shell",
    "probe": "sample with a job's model, data and reward before its first run",
    "train": "check the config of the GRPO job, and run the job under torchrun",
    "rollouts": "show what a run of the job has sampled",
    "explain": "run one sequence in two ways and show where their numbers part",
    "replay": "prove samples by their receipts: draw every token again, and compare",
    "bench": f"run a benchmark: {', '.join(BENCHMARKS)}",
    "warm": "compile and record what an engine of a model will use, before it is needed",
    "doctor": "report which kernels run here and why, and whether a model can be hosted",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2, after one line on stderr, for a mistake of the user; 1 for a file that
    cannot be written."""
    commands = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    parser = CommandParser(
        prog="lockstep",
        description="A rollout engine inside the trainer's torchrun ranks.",
        epilog=f"commands:\n{commands}\n\n`lockstep COMMAND --help` describes the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {version()}")
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see below")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return importlib.import_module(f".{options.command}", __package__).run(options.arguments)
    except ValueError as error:
        print(f"lockstep: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except FileFailed as error:
        print(f"lockstep: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr, flush=True)
        return 130
