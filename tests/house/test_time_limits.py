"""Check that a hanging test is named within its time limit, and that the tests after it still run."""

import os
import subprocess
import sys

HANGING = """
import ctypes, threading
import pytest

@pytest.fixture
def cleaned(request):
    yield
    print("cleaned up")

def hang(library):  # a locked mutex is locked again, and no signal ends that
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

@pytest.mark.timeout(1)
def test_join(cleaned):
    threading.Thread(target=threading.Event().wait, daemon=True, name="waits for ever").start()
    next(t for t in threading.enumerate() if t.name == "waits for ever").join()

@pytest.mark.timeout(1)
def test_c_call():
    hang(ctypes.CDLL(None))

@pytest.mark.timeout(1)
def test_c_call_that_stops_python():
    hang(ctypes.PyDLL(None))

def test_next():
    pass
"""


def run(folder, *arguments):
    (folder / "test_hanging.py").write_text(HANGING)
    plugins = ("pytest_timeout", "xdist", "lockstep.tests.support.time_limits")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *(f"-p{name}" for name in plugins), *arguments], cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    return done.stdout, done.stderr


def test_processes_of_xdist_name_each_test_that_hangs_and_go_on(tmp_path):
    output, errors = run(tmp_path, "-n", "1")
    assert "3 failed, 1 passed" in output
    assert "FAILED test_hanging.py::test_join" in output and "Timeout (>1.0s)" in output
    assert "waits for ever" in output and "cleaned up" in output
    for name in ("test_c_call", "test_c_call_that_stops_python"):
        assert f"crashed while running 'test_hanging.py::{name}'" in output
        assert f"in {name}\n" in errors


def test_one_process_ends_and_shows_the_function_that_hangs(tmp_path):
    name = "test_c_call_that_stops_python"
    output, errors = run(tmp_path, f"test_hanging.py::{name}")
    assert "passed" not in output and "failed" not in output
    assert "Timeout" in errors and f"in {name}\n" in errors
