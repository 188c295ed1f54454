"""Tests of steps whose last layer leaves out the rows that nobody reads: with the same bits, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from lockstep.kernels.attention.paged import PagedStep
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.steps.context import StepContext
from lockstep.rollout.model.steps.pools import step_pools
from lockstep.tests.support.random_models import spread_weights

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"]
WITH_STATES = ["falcon_h1", "lfm2", "nemotron_h", "mamba"]  # their last layer keeps a state of all rows
NUMS = (9, 5, 12)  # rows of the sequences of a step; the second has a context before them
EARLIER = (0, 7, 0)


@pytest.fixture(autouse=True)
def _one_thread(restore_threads: None) -> None:
    torch.set_num_threads(1)


def adopt(module: Any, invariant: bool = True) -> HostedModel:
    return HostedModel.adopt(module, dtype=None, device=None, invariant=invariant)


def step_of(hosted: HostedModel) -> tuple[Tensor, Tensor, StepContext]:
    """Return the positions and the token ids of a step of three sequences, and its context."""
    blocks = torch.tensor([[3, 1], [0, 5], [4, 2]])
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(NUMS))
    positions = torch.cat([torch.arange(first, first + num) for first, num in zip(EARLIER, NUMS, strict=True)])
    starts = torch.tensor([0, *torch.tensor(NUMS).cumsum(0)], dtype=torch.int32)
    lens = torch.tensor([first + num for first, num in zip(EARLIER, NUMS, strict=True)], dtype=torch.int32)
    keys, values, *_ = step_pools(hosted.kv_shapes, {}, 6, 8, 0, hosted.device)
    for pool in (*keys, *values):  # the context of the second sequence is not empty
        pool[0] = torch.randn(pool[0].shape, generator=torch.Generator().manual_seed(1)).to(pool.dtype)
    slots = blocks[owner, positions // 8] * 8 + positions % 8
    return positions, positions * 7 % 250, StepContext(slots, PagedStep(blocks.int(), starts, lens), keys, values)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of rows is added whenever the last layer leaves rows out."""
    found: list[int] = []
    own = StepContext.of_wanted

    def of_wanted(step: StepContext) -> StepContext:
        found.append(len(step.slots) - len(step.wanted))
        return own(step)

    monkeypatch.setattr(StepContext, "of_wanted", of_wanted)
    return found


def logits_and_kv(hosted: HostedModel, rows: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    positions, ids, step = step_of(hosted)
    with hosted.rollout_phase(), torch.inference_mode():
        logits = hosted.forward(ids, positions, rows, step)
    return logits, [*step.key_caches, *step.value_caches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_kv_of_a_step_that_leaves_rows_out_are_those_of_a_whole_one(make_model, monkeypatch, family, dtype):
    hosted = adopt(make_model(family, dtype))
    left_out = counted(monkeypatch)
    whole, kv = logits_and_kv(hosted, None)
    assert not left_out
    rows = torch.tensor([25, 8, 13, 10])  # in no order, two of one sequence
    few, kv_of_few = logits_and_kv(hosted, rows)
    assert left_out == [7, 22]  # of the trial, and of the step
    assert torch.equal(few, whole[rows])
    assert all(map(torch.equal, kv_of_few, kv))


def gemma4(dtype: torch.dtype, num_shared: int) -> Any:
    config = transformers.Gemma4TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=20, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=256, num_kv_shared_layers=num_shared, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    return spread_weights(transformers.AutoModelForCausalLM.from_config(config).to(dtype)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_shared", "leaves_out"), [(0, True), (2, False)], ids=["own keys", "shared keys"])
def test_inputs_of_single_layers_have_rows_too(monkeypatch, dtype, num_shared, leaves_out):
    """A last layer that takes the keys of an earlier one does not run twice: they are of all rows."""
    hosted = adopt(gemma4(dtype, num_shared))
    left_out = counted(monkeypatch)
    whole, kv = logits_and_kv(hosted, None)
    rows = torch.tensor([25, 8, 13, 10])
    few, kv_of_few = logits_and_kv(hosted, rows)
    assert (22 in left_out, hosted.numerics.last_layer._is_recognised) == (leaves_out, leaves_out)
    assert torch.equal(few, whole[rows])
    assert all(map(torch.equal, kv_of_few, kv))


def test_a_step_that_is_read_at_many_rows_leaves_none_out(make_model, monkeypatch):
    hosted = adopt(make_model("qwen3"))
    left_out = counted(monkeypatch)
    rows = torch.arange(0, 26, 3)
    few, _ = logits_and_kv(hosted, rows)
    assert not left_out
    assert torch.equal(few, logits_and_kv(hosted, None)[0][rows])


def test_a_hook_in_the_last_layer_gets_all_rows(make_model, monkeypatch):
    model = make_model("qwen3")
    hosted = adopt(model)
    left_out, seen = counted(monkeypatch), []
    hook = model.model.layers[-1].mlp.register_forward_hook(lambda part, inputs, out: seen.append(out.shape))
    logits_and_kv(hosted, torch.tensor([3]))
    assert seen == [(1, 26, 64)] and not left_out
    hook.remove()
    logits_and_kv(hosted, torch.tensor([3]))
    assert left_out == [7, 25]


@pytest.mark.parametrize("place", ["model", "model.norm"])
def test_a_hook_behind_the_last_layer_gets_all_rows(make_model, monkeypatch, place):
    model = make_model("qwen3")
    hosted = adopt(model)
    left_out, seen = counted(monkeypatch), []
    model.get_submodule(place).register_forward_hook(lambda part, inputs, out: seen.append(out[0].shape[-2:]))
    logits_and_kv(hosted, torch.tensor([3]))
    assert seen == [(26, 64)] and not left_out


def test_a_hook_that_was_there_first_sees_no_trial(make_model):
    model, seen = make_model("qwen3"), []
    model.model.layers[-1].mlp.register_forward_hook(lambda part, inputs, out: seen.append(out.shape[1]))
    hosted = adopt(model)
    del seen[:]  # of the start-up forward
    logits_and_kv(hosted, torch.tensor([3]))
    assert seen == [26]


def test_hooks_that_transformers_left_for_hidden_states_do_not_count(make_model, monkeypatch):
    model = make_model("qwen3")
    hosted = adopt(model)
    with hosted.training_numerics(), torch.no_grad():
        asked = model(torch.tensor([[1, 2, 3]]), use_cache=False, output_hidden_states=True)
    assert len(asked.hidden_states) == 3 and any(layer._forward_hooks for layer in model.model.layers)
    left_out = counted(monkeypatch)
    logits_and_kv(hosted, torch.tensor([3]))
    assert left_out == [7, 25]


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_last_layer_with_states_runs_whole(make_model, monkeypatch, family):
    model = make_model(family)
    hosted = adopt(model)
    left_out = counted(monkeypatch)
    assert hosted.numerics.last_layer is not None and not hosted.numerics.last_layer._try(hosted)
    assert not left_out


class ScalesByLength(Qwen3DecoderLayer):
    """A layer whose result depends on the number of its rows."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) * hidden_states.shape[1]


class TakesMore(Qwen3DecoderLayer):
    """A layer that is called with a tensor of its own kind."""

    def forward(self, hidden_states: Tensor, gains: Tensor | None = None, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **kwargs)


def test_a_layer_whose_rows_depend_on_their_number_is_not_recognised(make_model):
    model = make_model("qwen3")
    model.model.layers[-1].__class__ = ScalesByLength
    hosted = adopt(model)
    few, _ = logits_and_kv(hosted, torch.tensor([3]))
    assert hosted.numerics.last_layer._is_recognised is False
    assert torch.equal(few, logits_and_kv(hosted, None)[0][3:4])


def test_a_tensor_whose_rows_are_not_known_is_refused_by_name(make_model):
    model = make_model("qwen3")
    model.model.layers[-1].__class__ = TakesMore
    hosted = adopt(model)
    logits_and_kv(hosted, torch.tensor([3]))
    assert hosted.numerics.last_layer._is_recognised
    positions, ids, step = step_of(hosted)
    last = model.model.layers[-1]
    with hosted.rollout_phase(), torch.inference_mode():
        narrowed = last.forward
        last.forward = lambda hidden, **kwargs: narrowed(hidden, torch.ones(2, 26), **kwargs)
        try:
            with pytest.raises(ValueError, match=r"TakesMore takes gains \[2, 26\], and its rows are not known"):
                hosted.forward(ids, positions, torch.tensor([3]), step)
        finally:
            last.forward = narrowed


def test_without_invariance_no_row_is_left_out(make_model):
    assert adopt(make_model("qwen3"), invariant=False).numerics.last_layer is None
