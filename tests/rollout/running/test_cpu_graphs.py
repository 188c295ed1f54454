"""Tests of recorded calls: the results of plain calls on other data, in reused memory, and never without a trial."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lockstep.kernels.layers.rms_norm import NormRule, rms_norm
from lockstep.kernels.linear.linear import SOURCE, native_products
from lockstep.kernels.machine import native
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.running.cpu_graphs import LATER_PLAIN_STEPS, PLAIN_STEPS, TRIALS, CPUGraphs, _Step
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.configs import tiny_config
from lockstep.tests.support.covering import covering

pytestmark = pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
BEFORE_TRUST = PLAIN_STEPS + 1 + TRIALS  # the recorded step and the trials


@pytest.fixture(autouse=True)
def _as_a_step_runs(restore_threads):
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


class Counted:
    """A step over one input buffer that counts the runs of its Python."""

    def __init__(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.x, self.compute, self.num_runs = x, compute, 0

    def __call__(self) -> list[Tensor]:
        self.num_runs += 1
        return [self.compute(self.x)]


def step_of(run: Counted, module: nn.Module | None = None) -> _Step:
    step = CPUGraphs(module or nn.Identity()).record(run)
    assert isinstance(step, _Step)
    return step


def results(step: _Step, x: Tensor, count: int, seed: int = 0) -> list[Tensor]:
    """Run `count` steps, each on other numbers, and return their results."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x.copy_(torch.randn(x.shape, generator=generator))
        found.append(step()[0].clone())
    return found


RULE = NormRule(1e-6)
WEIGHT = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))


def with_checked_constants(x: Tensor) -> Tensor:
    """Return the rows times a quantile of a distribution, which reads its parameters on the host to check them."""
    return x * torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95)) * torch.tensor([2.0, 3.0])[1].item()


STEPS = {
    "kernels": lambda x: native_products(x, [(WEIGHT, None)])[0] + 1,
    "views": lambda x: x.view(2, 2, 16).transpose(0, 1).reshape(4, 16)[1:].unsqueeze(0),
    "out variants": lambda x: torch.cat((x.cos() * 2, x.exp()), dim=-1).clone(),
    "no out variant": lambda x: x.to(torch.bfloat16).float().softmax(-1),
    "in place": lambda x: x.clone().mul_(3).index_put_((torch.tensor([1]),), torch.zeros(16)),
    "made of nothing": lambda x: torch.arange(16) * x + torch.ones(4, 1).add_(x[:, :1]),
    "several results": lambda x: torch.add(*x.topk(3), alpha=2) + x.sort(descending=True)[0][:, :3],
    "several results, no out variant": lambda x: torch.add(*torch.frexp(x)),
    "rows by number": lambda x: x[torch.tensor([3, 0])],
    "constants on the host": with_checked_constants,
    "memory used again": lambda x: ((((x + 1) * 2 - 3) / 4).abs() + x).contiguous(),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_replay_gives_what_the_step_itself_gives_on_other_data(name):
    x, again = torch.zeros(4, 16), torch.zeros(4, 16)
    run = Counted(STEPS[name], x)
    step = step_of(run)
    found = results(step, x, 30)
    assert all(map(torch.equal, found, results(Counted(STEPS[name], again), again, 30)))
    assert step.is_trusted and run.num_runs == BEFORE_TRUST


def test_memory_of_what_is_no_longer_needed_is_used_again():
    def chain(x: Tensor) -> Tensor:
        for _ in range(100):
            x = native_products(x, [(turn, None)])[0] * 0.99
        return x

    turn, x = torch.linalg.qr(torch.randn(16, 16))[0].contiguous(), torch.zeros(4, 16)
    run = Counted(chain, x)
    step = step_of(run)
    found = results(step, x, 20)
    assert run.num_runs == BEFORE_TRUST and len(step._record.calls) == 200
    assert sum(map(len, step._record.pieces)) <= 4 * x.nbytes
    assert torch.equal(found[-1], chain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_and_the_norm_behind_it_are_one_call(dtype):
    def layers(x: Tensor) -> Tensor:
        x = x.to(dtype)
        for weight in weights:
            x = x + native_products(rms_norm(x, weight, RULE), [(turn, None)])[0]
        return rms_norm(x, weights[0], RULE) + rms_norm(x + weights[1], weights[1], RULE)

    turn, weights = torch.randn(19, 19).to(dtype), torch.rand(3, 19).to(dtype)
    x, again = torch.zeros(4, 19), torch.zeros(4, 19)
    step = step_of(Counted(layers, x))
    found = results(step, x, 20)
    assert all(map(torch.equal, found, results(Counted(layers, again), again, 20)))
    names = [getattr(function, "__name__", "") for function, _ in step._record.calls]
    assert step.is_trusted
    assert names.count("lockstep_rms_norm") == 2  # the first, and the norm of rows that a weight was added to
    assert names.count("lockstep_add_rms_norm") == 3
    assert len(names) == 10 + (dtype is torch.bfloat16)  # 3 products; the two sums without a joined norm after them


def test_weights_are_read_at_every_replay():
    weight, x = WEIGHT.clone(), torch.zeros(4, 16)
    step = step_of(Counted(lambda x: native_products(x, [(weight, None)])[0], x))
    results(step, x, 20)
    weight.mul_(2)
    [found] = results(step, x, 1)
    assert torch.equal(found, native_products(x, [(weight, None)])[0])


def routed(x: Tensor) -> Tensor:
    """Return the rows, those of each of two experts by its own product, of numbers of rows that the host reads."""
    expert = (x[:, 0] > 5).long()
    counts = torch.nn.functional.embedding(expert, torch.eye(2)).sum(0).long().tolist()
    parts = x[expert.argsort(stable=True)].split(counts)
    return torch.cat([part * (2 + i) for i, part in enumerate(parts)])


UNRECORDABLE = {
    "a number": lambda x: x * x.sum().item(),
    "a mask": lambda x: x[x > 0],
    "chance": lambda x: torch.rand_like(x),
    "a branch": lambda x: x + 1 if (x > 9).any() else x,
    "a start": lambda x: x.narrow(0, (x[0, 0] > 9).long(), 2),
    "repetitions": lambda x: x.repeat_interleave((x[:, 0] < 9).long(), 0),
    "places": lambda x: x + torch.where(x[0] < 9)[0],
    "parts": lambda x: torch.tensor_split(x, (x[0] > 9).long())[0],
    "a list": routed,
    "an array": lambda x: x * float(x.numpy()[0, 0] > 9),
    "an array by numpy": lambda x: x * float(np.asarray(x)[0, 0] > 9),
    "an array by dlpack": lambda x: x * float(np.from_dlpack(x)[0, 0] > 9),
    "numbers in a list": lambda x: x * torch.tensor([x[0, 0] > 9, 1])[0],
    "numbers in a named list": lambda x: x * torch.as_tensor(data=[x[0, 0] > 9, 1])[0],
    "a constant that was written to": lambda x: x * torch.tensor([1.0, 2.0]).add_(x[0, :2])[1].item(),
    "a constant and data": lambda x: x * (torch.tensor([1.0, 2.0]) + x[0, :2])[1].item(),
    "a text": lambda x: x * len(repr(x)),
}


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_a_step_that_cannot_be_recorded_stays_a_plain_call(name, caplog):
    x = torch.zeros(4, 16)
    run = Counted(UNRECORDABLE[name], x)
    step = step_of(run)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            step()
    assert step.is_trusted is False and step._record is None
    assert run.num_runs == 20  # the run that was given up half-way went on
    [line] = caplog.messages
    assert line.startswith("decode steps are not replayed: ") and line.endswith(" depends on the data")


@pytest.mark.parametrize("first", [0, 1])
def test_a_step_whose_python_looks_at_the_data_unseen_is_found_out(first, caplog):
    """first: of the trials, which tells nothing if it is 1."""

    def hidden(x: Tensor) -> Tensor:
        calls.append(ctypes.c_float.from_address(x.data_ptr()).value)
        return x * (calls[-1] if len(calls) > PLAIN_STEPS + 1 + first else 1.0)

    x, again = torch.zeros(4, 16), torch.zeros(4, 16)
    calls: list[float] = []
    step = step_of(Counted(hidden, x))
    with caplog.at_level(logging.WARNING):
        found = results(step, x, 20)
    assert step.is_trusted is False and caplog.messages == ["decode steps are not replayed: a replay had other results"]
    calls.clear()
    assert all(map(torch.equal, found, results(Counted(hidden, again), again, 20)))


def test_a_module_with_hooks_is_called_itself():
    module, x, seen = nn.Sequential(nn.Identity()), torch.zeros(4, 16), []
    run = Counted(module, x)
    step = step_of(run, module)
    results(step, x, 20)
    assert run.num_runs == BEFORE_TRUST
    handle = module[0].register_forward_hook(lambda *_: seen.append(1))
    results(step, x, 3)
    assert len(seen) == 3
    handle.remove()
    results(step, x, 3)
    assert run.num_runs == BEFORE_TRUST + 3


def test_a_call_that_finds_its_input_wrong_leaves_the_error_to_the_step_itself():
    x, broken = torch.zeros(4, 16), []

    def compute(x: Tensor) -> Tensor:
        if native.run(lambda: len(broken)):
            raise ValueError("sequence 3 is too long")
        return x + 1

    step = step_of(Counted(compute, x))
    results(step, x, 20)
    broken.append(1)
    with pytest.raises(ValueError, match="sequence 3 is too long"):
        step()


# Mixtures of experts with shared experts, groups of experts, biased choices, or experts without a gate.
WITH_STATES = ["qwen3_5_moe", "kimi_linear", "nemotron_h", "granitemoehybrid", "lfm2_moe", "inkling", "inkling2"]
WITH_STATES += ["jamba", "mamba2", "falcon_mamba", "zamba", "zamba2"]
WITH_STATES += ["deepseek_v4", "minimax", "zaya"]


@covering(
    1,
    rest="slow",
    family=["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "qwen3_moe", "gpt_oss", *WITH_STATES],
    dtype=[torch.float32, torch.bfloat16],
)
def test_an_engine_that_replays_gives_the_tokens_and_log_probabilities_of_one_that_does_not(make_model, family, dtype):
    model = make_model(family, dtype)
    prompts = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(5)]
    settings = [
        SamplingParams(max_new_tokens=40 + 8 * seed, sampling_seed=seed, ignore_eos=True, top_k=3 if seed == 1 else -1)
        for seed in range(5)
    ]
    answers = []
    for sizes in ((), None):
        engine = Engine(
            model, EngineConfig(kv_cache="96 blocks", max_num_seqs=8, speculation="off", cuda_graph_batch_sizes=sizes)
        )
        answers.append([(c.token_ids, c.logprobs) for c in engine.generate(prompts, settings)])
    assert answers[0] == answers[1]
    records = engine.parts.runner._graphs._records
    assert records[5, ""].is_trusted and records[5, ""]._num_plain == PLAIN_STEPS + 1


def test_once_a_size_is_replayed_others_are_recorded_sooner():
    graphs, x = CPUGraphs(nn.Identity()), torch.zeros(4, 16)
    first, second = (graphs.record(Counted(STEPS["kernels"], x)) for _ in range(2))
    for _ in range(BEFORE_TRUST):
        assert first.is_trusted is None
        results(first, x, 1)
    results(second, x, LATER_PLAIN_STEPS + 1)
    assert first.is_trusted and second.is_trusted is None and second._record is not None
    results(second, x, TRIALS)
    assert second.is_trusted


def test_replays_follow_an_update_of_the_weights_in_place(make_model):
    model = make_model("qwen3")
    ask = [[1, 2, 3]], SamplingParams(max_new_tokens=30, sampling_seed=1, ignore_eos=True)
    engine = Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=2, speculation="off"))
    engine.generate(*ask)
    [record] = engine.parts.runner._graphs._records.values()
    assert record.is_trusted
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.25)
    engine.weights.commit_weights("louder", None)
    fresh = Engine(
        model, EngineConfig(kv_cache="32 blocks", max_num_seqs=2, speculation="off", cuda_graph_batch_sizes=())
    )
    [found], [expected] = engine.generate(*ask), fresh.generate(*ask)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert [record] == list(engine.parts.runner._graphs._records.values())


def louder_attention(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scaling *= 1.7


def louder_layer(model: nn.Module) -> None:
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5


@pytest.mark.parametrize("change", [louder_attention, louder_layer])
def test_replays_follow_a_change_of_the_modules_code_between_phases(make_model, change):
    model = make_model("qwen3")
    ask = [[1, 2, 3]], SamplingParams(max_new_tokens=30, sampling_seed=1, ignore_eos=True)
    engine = Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=2, speculation="off", prefix_cache=False))
    [before] = engine.generate(*ask)
    [again] = engine.generate(*ask)
    assert again.logprobs == before.logprobs and engine.parts.runner._graphs._records
    change(model)
    [found] = engine.generate(*ask)
    ids = torch.tensor([[*found.prompt_ids, *found.token_ids]])
    with engine.model.training_numerics():
        logits = model(ids, use_cache=False).logits[0, 2:-1]
    expected = selected_logprobs(logits, torch.tensor(found.token_ids), 1.0)
    assert list(found.logprobs) == expected.tolist() and found.logprobs != before.logprobs


@pytest.mark.parametrize("seed", range(3))
def test_a_family_whose_router_counts_rows_on_the_host_has_the_trainers_log_probabilities(seed, caplog):
    torch.manual_seed(seed)
    with torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(tiny_config("jetmoe"), dtype=torch.float32).eval()
    engine = Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=2, speculation="off"))
    for sampling_seed in range(3):
        prompt = [(37 * seed + 11 * sampling_seed + 7 * i) % 240 for i in range(7)]
        ask = SamplingParams(max_new_tokens=16, sampling_seed=sampling_seed, ignore_eos=True)
        [found] = engine.generate([prompt], ask)
        ids = torch.tensor([[*prompt, *found.token_ids]])
        with engine.model.training_numerics():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert list(found.logprobs) == selected_logprobs(logits, ids[0, len(prompt) :], 1.0).tolist()
    assert "decode steps are not replayed: tolist depends on the data" in caplog.messages
