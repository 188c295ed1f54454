"""Check that prepared programs run and end as those of a new interpreter do."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from lockstep.tests.support import prepared_python

TELL = "import os, sys; print(sys.argv, os.getcwd(), os.environ['WORD'], os.getppid(), sys.stdin.read())"
ENDS = {
    "by itself": "print('done')",
    "with a code": "import sys; sys.exit(3)",
    "with words": "import sys; sys.exit('no such thing')",
    "by an error": "raise ArithmeticError('wrong')",
    "by a signal": "import os; os.kill(os.getpid(), 9)",
    "by an interruption": "raise KeyboardInterrupt",
    "after its threads": "import threading; threading.Timer(0.1, print, ['late']).start()",
}


@pytest.fixture(params=[prepared_python.run, subprocess.run], ids=["prepared", "new"])
def run(request):
    return request.param


def test_a_program_has_its_own_arguments_folder_environment_and_streams(run, tmp_path):
    command = [sys.executable, "-c", TELL, "a", "b c"]
    environment = os.environ | {"WORD": "here"}
    done = run(command, input="given", cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == f"['-c', 'a', 'b c'] {tmp_path} here {os.getpid()} given\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_and_a_module_run_as_main(run, tmp_path):
    (tmp_path / "program.py").write_text("import sys, __main__\nprint(__name__, __main__.__name__, sys.argv[1:])\n")
    for command in ([str(tmp_path / "program.py")], ["-m", "program"]):
        done = run([sys.executable, *command, "x"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "__main__ __main__ ['x']\n"


def test_a_program_collects_garbage(run):
    done = run([sys.executable, "-c", "import gc; print(gc.isenabled(), gc.get_threshold())"], capture_output=True)
    assert done.stdout.decode() == f"True {gc.get_threshold()}\n"


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_under_a_new_interpreter(how):
    command = [sys.executable, "-c", ENDS[how]]
    prepared, new = (f(command, capture_output=True, text=True) for f in (prepared_python.run, subprocess.run))
    assert (prepared.returncode, prepared.stdout) == (new.returncode, new.stdout)
    assert prepared.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


# pytest keeps a log handler on /dev/null, whose descriptor's number a program could get again.
OPEN = """
import logging, os
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(99)]
logging.shutdown()
for descriptor in opened:
    os.fstat(descriptor)
"""


def test_nothing_that_pytest_had_open_closes_a_descriptor_of_the_program():
    prepared_python.run([sys.executable, "-c", OPEN], check=True)
