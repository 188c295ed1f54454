"""The command `lockstep` with its subcommands. Parsing imports no heavy libraries; each subcommand imports its own."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from ..failures import FileFailed, of_path
from ..one_line import in_the_last_line
from ..version import version
from .arguments.parser import CommandParser
from .bench import BENCHMARKS

# name of a module beside this one, whose `run` gets the rest of the command line: its line of help
COMMANDS = {
    "generate": "answer the prompts of a file or of standard input",
    "serve": "serve one engine over HTTP",
    "tinker": "serve the Tinker API: train adapters and sample with them",
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

# Turns that a waiting thread of GNU OpenMP, which PyTorch's wheels use, spins before it sleeps: some tenths of a
# millisecond. Its own 300,000 take milliseconds: where other processes share the cores, it keeps the very thread that
# it waits for from running, and a product takes 2 to 3 times as long (BENCHMARKS.md).
_SPINS = "30000"
NO_OUTPUT, NO_VERDICT = 74, 71  # exit codes of sysexits.h
_WITH_VERDICTS = {"explain", "replay", "bench", "doctor"}  # commands whose exit code 1 is one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2, after one line on stderr, for a mistake of the user; 1, or NO_VERDICT
    of commands whose 1 is a verdict, for a file that cannot be written, for too little memory and for weights that give
    no numbers, and NO_OUTPUT for standard output. It ends quietly once its output has lost its reader."""
    stdout = sys.stdout
    if stdout is None:
        return _run(arguments)
    try:
        with redirect_stdout(cast(TextIO, Output(stdout))):
            try:
                return _run(arguments)
            finally:
                sys.stdout.flush()  # else the interpreter would at its end, and could only complain
    except OutputFailed as error:
        is_read = not (isinstance(error.__cause__, BrokenPipeError) and _reader_is_gone(stdout))
        if is_read:
            print(f"lockstep: error: {error}", file=sys.stderr, flush=True)
        # Else `| head` has seen enough. The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return NO_OUTPUT if is_read else 0


class OutputFailed(Exception):
    """Standard output that cannot be written."""


class Output:
    """Standard output, whose errors can be told from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputFailed(f"standard output cannot be written: {error.strerror or error}") from error


def _reader_is_gone(stdout: TextIO) -> bool:
    """Return whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    """Run one command. Returns the exit code, see `main`."""
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
    wait_briefly(os.environ)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    failed = NO_VERDICT if options.command in _WITH_VERDICTS else 1
    try:
        return importlib.import_module(f".{options.command}", __package__).run(options.arguments)
    except ValueError as error:
        print(f"lockstep: error: {in_the_last_line(error)}", file=sys.stderr, flush=True)
        return 2
    except FileFailed as error:
        print(f"lockstep: error: {in_the_last_line(error)}", file=sys.stderr, flush=True)
        return failed
    except OSError as error:
        if (line := of_path(error)) is None:
            raise
        print(f"lockstep: error: {line}", file=sys.stderr, flush=True)
        return 2
    except (MemoryError, RuntimeError) as error:
        if (line := _condition_of(error)) is None:
            raise
        print(f"lockstep: error: {line}", file=sys.stderr, flush=True)
        return failed
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr, flush=True)
        return 130


def _condition_of(error: Exception) -> str | None:
    """Return the line of an error that the machine or the model's weights have caused; None for others."""
    from ...rollout.errors import BrokenLogits, OutOfMemory
    from ...rollout.model.memory import is_out_of_memory

    if isinstance(error, BrokenLogits | OutOfMemory):
        return in_the_last_line(error)
    return f"out of memory: {str(error).partition(chr(10))[0]}" if is_out_of_memory(error) else None


def wait_briefly(environ: MutableMapping[str, str]) -> None:
    """Have threads that wait for others sleep soon, unless the environment says how they wait. OpenMP reads it when
    PyTorch is loaded, so a subcommand's imports come later."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", _SPINS)
