"""A test of images whose tokens see each other both ways on all Triton kernels: on a GPU, or in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Runs in its own process: the choice of kernels for a device is fixed for a whole process.
ON_TRITON = """
import sys
import torch
torch.set_num_threads(1)
from lockstep.kernels.machine import gpu
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    gpu.why_not_triton = lambda device_type: None
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.media import test_both_ways as both_ways

if device == "cpu":
    from lockstep.tests.support.triton_interpreter import make_interpreter_fast

    make_interpreter_fast()
engine = Engine(both_ways.make(getattr(torch, sys.argv[1])).to(device), both_ways.ENGINE)
assert engine.model.numerics.guarantee.attention == "triton"
prompts = both_ways.prompts_of(engine.model.module)[1:3]
params = SamplingParams(max_new_tokens=3, sampling_seed=5)
completions = engine.generate(prompts, params)
if device == "cpu":
    reported = [list(c.logprobs) for c in completions]
    assert reported == both_ways.trained_logprobs(engine, prompts, completions, grad=True)
again = engine.generate(prompts[:1], params)
assert (again[0].token_ids, again[0].logprobs) == (completions[0].token_ids, completions[0].logprobs)
assert again[0].num_cached_tokens >= 16
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemma_3_with_images_keeps_the_trainers_bits_on_triton_kernels(dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_TRITON, dtype],
        env={**os.environ, "LOCKSTEP_NATIVE": "0"}, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
