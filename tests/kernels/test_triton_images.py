"""A test of images whose tokens see each other both ways on all Triton kernels: on a GPU, or in its interpreter."""

from __future__ import annotations

import pytest

from lockstep.tests.support.triton.programs import run_on_triton

pytest.importorskip("triton")

PROGRAM = """
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.media import test_both_ways as both_ways

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
    run_on_triton(PROGRAM, dtype)
