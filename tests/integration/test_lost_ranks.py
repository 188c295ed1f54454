"""The end of a rank whose peers are lost: what it owns outside its memory goes with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.tests.support import prepared_python

SENDER = """
import os, signal, sys
from lockstep.integration.lost_ranks import leave, outlive_sigterm
from lockstep.weight_sync.same_host.segment import Segment
from pathlib import Path

segment = Segment(Path(sys.argv[1]), 4096)
print("ready", flush=True)
"""
ENDS = {
    "leaves": 'leave(ValueError("lost"), 0, "here")',
    "is ended by its launcher": "outlive_sigterm(); os.kill(os.getpid(), signal.SIGTERM)\nwhile True: signal.pause()",
}


@pytest.mark.parametrize(("end", "code"), [("leaves", 1), ("is ended by its launcher", 128 + 15)])
def test_a_rank_that_ends_at_once_leaves_no_segment(tmp_path, end, code):
    command = [sys.executable, "-c", SENDER + ENDS[end], str(tmp_path)]
    ended = prepared_python.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, "ready\n"), ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_log_is_on_a_full_disk_leaves_too_and_writes_its_error_file(tmp_path):
    command = [sys.executable, "-c", SENDER + ENDS["leaves"] + "\nprint('stayed')", str(tmp_path)]
    error_file = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}
    with open("/dev/full", "w") as full:
        ended = prepared_python.run(
            command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60, env=environment
        )
    assert (ended.returncode, ended.stdout) == (1, "ready\n")
    assert "rank 0 stops here: ValueError: lost" in error_file.read_text()
    assert list(tmp_path.iterdir()) == [error_file]
