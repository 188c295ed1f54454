"""The process that compiles grammars: `python -m lockstep.rollout.grammars.worker PARENT_PID`.

A grammar is a program of a stranger's. So it is compiled, and tried, here: under limits of processor time, memory and
stack, each of which ends the process, and never in the process that trains. This one ends with its parent.

    stdin   setup | grammar | grammar ...
    stdout  ready | answer  | answer  ...
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from .compiler import Constraint, GrammarCompiler
from .frames import CompilerAnswer, CompilerSetup, read_frame, write_frame
from .library import load_library_alone
from .rehearsal import rehearse

STACK_BYTES = 8 << 20
_MAX_ERROR_CHARS = 2000
_MOST_NICE = 5  # the steps of the engine come first
_PAGE = resource.getpagesize()


def main() -> None:
    """Answer grammars until the input ends."""
    _end_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # texts that a library prints are no frames
    os.nice(_MOST_NICE)
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library, read = load_library_alone(), partial(os.read, 0)
    if (frame := read_frame(read)) is None:
        return
    setup = CompilerSetup.unpacked(frame)
    compiler = GrammarCompiler(library, setup, setup.stop_token_ids, any_whitespace=setup.any_whitespace)
    first_num_bytes = _num_bytes()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (first_num_bytes + setup.num_bytes, most))
    write_frame(answers, CompilerAnswer().packed())  # ready
    while (frame := read_frame(read)) is not None:
        kind, text = json.loads(frame)
        signal.setitimer(signal.ITIMER_PROF, setup.timeout_s)  # its signal ends the process, also inside a C function
        try:
            answer = answer_to(compiler, Constraint(kind, text), setup)
        except MemoryError:
            answer = CompilerAnswer("memory", is_last=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = answer.is_last or _num_bytes() > first_num_bytes + setup.num_bytes // 2
        write_frame(answers, replace(answer, is_last=is_last).packed())
        if is_last:
            return


def answer_to(compiler: GrammarCompiler, constraint: Constraint, setup: CompilerSetup) -> CompilerAnswer:
    """Compile one grammar and try it. Raises MemoryError."""
    try:
        grammar = compiler.compile(constraint)
        if grammar.num_bytes > setup.max_grammar_bytes:
            size, most = grammar.num_bytes >> 20, setup.max_grammar_bytes >> 20
            raise ValueError(f"takes {size} MiB when compiled, at most {most} MiB (1/16 of grammar_memory_mb) are kept")
        rehearse(grammar)
        return CompilerAnswer(None, grammar.bound, grammar.serialized(), nests=grammar.nests)
    except RecursionError:
        return CompilerAnswer(f"{constraint.kind}: nested too deeply")
    except ValueError as error:
        message = str(error)
        if "bad_alloc" in message:  # the library's exception for it is one for errors in the grammar
            raise MemoryError from error
        if len(message) > _MAX_ERROR_CHARS:
            message = f"{message[:_MAX_ERROR_CHARS]} ... ({len(message)} characters)"
        return CompilerAnswer(message if message.startswith(constraint.kind) else f"{constraint.kind}: {message}")


def _num_bytes() -> int:
    """Return the address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * _PAGE


def _end_with(parent: int) -> None:
    """End this process when its parent does, whatever it is doing."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != parent:
        os._exit(0)

    def wait() -> None:
        select.select([watched], [], [])
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
