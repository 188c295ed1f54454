"""The command `lockstep`: one subcommand a job. Parsing imports nothing heavy; a subcommand imports what it
runs.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from ..version import version
from .bench import BENCHMARKS
from .parser import CommandParser

# name of a module beside this one, whose `run` takes the rest of the command line: what it does
COMMANDS = {
    "generate": "offline generation from a file or standard input",
    "serve": "the HTTP surface over one engine",
    "route": "one address for many engines",
    "ctl": "pause, continue, flush, pin, look into a served engine: its verbs from a shell",
    "train": "the GRPO job, checked and then run under torchrun",
    "bench": f"benchmarks: {', '.join(BENCHMARKS)}",
    "doctor": "which kernels run here and why",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2, after one line on stderr, for what the user got wrong."""
    commands = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    parser = CommandParser(
        prog="lockstep",
        description="A rollout engine inside the trainer's torchrun ranks.",
        epilog=f"commands:\n{commands}\n\n`lockstep COMMAND --help` tells more.",
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
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr, flush=True)
        return 130
