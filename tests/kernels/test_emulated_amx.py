"""The AMX paths of products and attention on processors without AMX: built with emulated tiles, they keep a row's bits.

The tests are those of the native paths, run again in a process whose kernels are built so.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lockstep.kernels.linear.linear import SOURCE, native_path
from lockstep.kernels.machine import native

FOLDERS = [f"tests/kernels/{name}" for name in ("linear/test_linear.py", "linear/test_grouped.py", "attention")]
WITHOUT = (
    *("triton", "gradients", "plain", "avx", "torch", "float32", "dtype0"),  # other paths
    *("below", "optimisation", "models_shapes", "openmp"),  # of other processes, or slow
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        native.load(SOURCE) is None or native_path(torch.bfloat16) not in ("avx512_bf16", "amx"),
        reason="emulated tiles need a compiler and AVX512_BF16",
    ),
]


@pytest.mark.parametrize("limit", [None, 2])
def test_rows_of_products_and_attention_by_emulated_tiles_keep_their_bits(limit: int | None) -> None:
    """limit: of the threads that OpenMP starts, where calls ask for more; then of products only."""
    environ = {**os.environ, **({} if limit is None else {"OMP_THREAD_LIMIT": str(limit)})}
    chosen = f"not ({' or '.join(WITHOUT)})" if limit is None else "number_of_threads and amx"
    plugin = ["-p", "lockstep.tests.support.processors.emulated_amx", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugin, "-k", chosen, *FOLDERS]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=native.KERNELS.parent, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
