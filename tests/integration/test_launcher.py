"""A rank ends with its launcher, however the launcher ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

# The launcher starts a rank as torchrun does, from its main thread and in a session of its own, and waits.
RANK = """
import os, signal
from lockstep.integration.launcher import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
signal.pause()
"""
LAUNCHER = """
import os, subprocess, sys
rank = [sys.executable, "-c", sys.argv[1]]
subprocess.Popen(rank, env=os.environ | {"TORCHELASTIC_RUN_ID": "test"}, start_new_session=True).wait()
"""


def test_a_rank_ends_when_its_launcher_is_killed():
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        rank = int(launcher.stdout.readline())
        handle = os.pidfd_open(rank)
        try:
            launcher.kill()
            assert launcher.stdout.read() == ""  # returns when no process has the pipe: the rank has ended
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def test_a_process_without_torchrun_is_not_concerned(monkeypatch):
    from lockstep.integration import launcher

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(launcher.ctypes, "CDLL", None)  # would fail
    launcher.end_with_launcher()


def test_a_rank_whose_launcher_ended_before_the_kernel_knew_ends_too():
    # The first answer is the launcher's, the second one that of the process that took the rank over.
    script = (
        "import os\nfrom lockstep.integration import launcher\n"
        "answers = iter([os.getppid() + 1, os.getppid()])\nos.getppid = lambda: next(answers)\n"
        "launcher.end_with_launcher()\nprint('goes on')\n"
    )
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "test"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "") and "the launcher of this rank has ended" in ended.stderr
