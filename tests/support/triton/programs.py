"""Programs whose operations all run on Triton's kernels: on a GPU, or on the CPU in Triton's interpreter.

Each is a new process: the choice of kernels for a device is fixed for a whole process, and a prepared one may have
chosen its products before it hears of LOCKSTEP_NATIVE.
"""

from __future__ import annotations

import os
import subprocess
import sys

# What a program finds: `device`, on which its model goes, and kernels that are chosen there.
BEGINNING = """
import sys
import torch
torch.set_num_threads(1)
from lockstep.kernels.machine import gpu
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    from lockstep.tests.support.triton.interpreter import make_interpreter_fast

    gpu.why_not_triton = lambda device_type: None
    make_interpreter_fast()
"""


def run_on_triton(program: str, *arguments: str, is_interpreted: bool = False, timeout_s: float = 600) -> str:
    """Run a program behind BEGINNING and return the last line that it prints.

    is_interpreted: whether Triton interprets its kernels where there is a GPU too.
    """
    environment = {**os.environ, "LOCKSTEP_NATIVE": "0"}
    if is_interpreted:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program, *arguments], env=environment, capture_output=True, text=True,
        check=False, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.rpartition("\n")[0].rpartition("\n")[2]
