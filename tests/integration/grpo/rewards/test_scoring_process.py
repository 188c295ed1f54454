"""A process that scores and ends: 0.0 where a completion has ended it, else an error that says how it has ended."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.integration.grpo.rewards.scoring_process import ScoringProcess

# Answers a request with what it is given, then ends by a signal.
WORKER = """#!{python}
import os, signal, sys
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[-1]))
channel.recv()
if {is_loaded}:
    channel.send_bytes(b'{{"loaded": true}}')
os.kill(os.getpid(), {number})
"""


@pytest.fixture
def process() -> Iterator[ScoringProcess]:
    made = ScoringProcess()
    yield made
    made.close()


@pytest.fixture
def run_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that has a script take the place of Python."""

    def install(text: str) -> None:
        script = tmp_path / "python"
        script.write_text(text)
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


def score(process: ScoringProcess) -> float:
    return process.score("follows_schema", ("1", '{"type": "integer"}'), 5.0)


def test_a_process_that_does_not_begin_is_an_error(process: ScoringProcess, run_by: Callable[[str], None]) -> None:
    run_by("#!/bin/sh\nexit 3\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"schema: .*ended by itself \(exit code 3\), before it could score"):
            score(process)


def test_a_limit_of_memory_below_its_own_is_kept(process: ScoringProcess, run_by: Callable[[str], None]) -> None:
    run_by(f'#!/bin/sh\nulimit -v 3000000\nexec {sys.executable} "$@"\n')
    assert score(process) == 1.0


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT])
def test_a_completion_that_ends_the_process_has_0(
    process: ScoringProcess, run_by: Callable[[str], None], number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    run_by(WORKER.format(python=sys.executable, is_loaded=True, number=int(number)))
    with caplog.at_level(logging.WARNING):
        assert [score(process), score(process)] == [0.0, 0.0]
    said = [] if number == signal.SIGPROF else [f"the process that scores has ended by {number.name}"]
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == said


@pytest.mark.parametrize(
    ("number", "is_loaded", "when"),
    [(signal.SIGSEGV, False, "before it could score"), (signal.SIGKILL, True, "in the middle of a completion")],
)
def test_a_process_that_something_else_ends_is_an_error(
    process: ScoringProcess, run_by: Callable[[str], None], number: signal.Signals, is_loaded: bool, when: str
) -> None:
    run_by(WORKER.format(python=sys.executable, is_loaded=is_loaded, number=int(number)))
    with pytest.raises(ValueError, match=rf"ended by itself \({number.name}\), {when}"):
        score(process)
