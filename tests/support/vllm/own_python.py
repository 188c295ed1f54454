"""The interpreter that has vLLM, for tests with its own code. VLLM_PYTHON names it: it is no requirement of ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "clients" / "programs" / "vllm_trainer_program.py"
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON names no interpreter with vLLM")


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start `vllm_trainer_program.py`."""
    return subprocess.Popen(
        [VLLM_PYTHON, str(PROGRAM), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def end(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[str, str]:
    """Close the program's input and wait for its end. Returns its output and its errors; it is killed if it is late."""
    try:
        return process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
