"""The number of kernels that a recorded decode step launches for a layer, counted in Triton's interpreter."""

from __future__ import annotations

import json

import pytest

from lockstep.tests.support.triton.programs import run_on_triton

pytest.importorskip("triton")

MOST_A_LAYER = 14
# A launch is one of Triton's kernels, or an operation of PyTorch that is more than a view of memory, or memory itself.
PROGRAM = """
import collections, json
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from lockstep.kernels.attention import triton_kernels
triton_kernels._check_on_host = lambda *_: None  # a GPU's tables are not checked
from lockstep.kernels import self_test
from lockstep.rollout.check import module_check
# What an engine checks before it generates, which other tests run, would be most of the time in the interpreter.
self_test._first_invariant_product = lambda candidates, *_: (candidates[0], "")
self_test._first_invariant_attention = lambda *_, has_cuts: ("triton", "")
module_check._check_whole = lambda hosted: module_check.Verdict(0, 0.0, None, 0.0)
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.running.recorders import PlainCalls
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.random_models import random_model

counts, inside = collections.Counter(), []
MEMORY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}

class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_view = any(ret.alias_info and not ret.alias_info.is_write for ret in func._schema.returns)
        if not inside and not is_view and name not in MEMORY:
            counts[name] += 1
        return func(*args, **(kwargs or {}))

launch = interpreter.GridExecutor.__call__
def counted(self, *args, **kwargs):
    counts[self.fn.__name__] += not inside
    inside.append(1)
    try:
        return launch(self, *args, **kwargs)
    finally:
        inside.pop()
interpreter.GridExecutor.__call__ = counted

def launches_of(num_layers):
    model = random_model(sys.argv[1], torch.bfloat16, num_hidden_layers=num_layers)
    config = EngineConfig(kv_cache="32 blocks", max_num_seqs=4, cuda_graph_batch_sizes=(2,), speculation="off")
    engine = Engine(model.eval().requires_grad_(False), config)
    graphs = engine.parts.runner._graphs
    graphs._recorder = PlainCalls()
    engine.generate([[5, 6], [7, 8, 9]], [SamplingParams(max_new_tokens=3, sampling_seed=i) for i in range(2)])
    counts.clear()
    with engine.model.rollout_phase(), torch.inference_mode(), Counting():
        graphs._drawing_step(2)()
    engine.close()
    return collections.Counter(counts)

one, two = launches_of(1), launches_of(2)
layer = {name: two[name] - one[name] for name in two if two[name] != one[name]}
print(json.dumps({"layer": layer, "rest": {name: one[name] - layer.get(name, 0) for name in one}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_a_layer_of_a_recorded_step_is_at_most_14_launches(family: str, record_property) -> None:
    counts = json.loads(run_on_triton(PROGRAM, family, is_interpreted=True, timeout_s=300))
    record_property("figures", counts)
    layer = counts["layer"]
    assert sum(layer.values()) <= MOST_A_LAYER, layer
    # q|k|v, o, gate|up and down; two norms with their sums; norms of heads, rotation and KV; attention
    assert {name: num for name, num in layer.items() if not name.startswith("_")} == {}, "PyTorch's own kernels"
    rotation = "_head_kernel" if family == "qwen3" else "_rotary_kernel"  # the first has the norms of heads as well
    assert (layer["_linear_kernel"], layer[rotation], layer["_attend_kernel"], layer["_forward_kernel"]) == (4, 1, 1, 2)
