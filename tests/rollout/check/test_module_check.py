"""Tests of the check of a module when its engine is made: planted faults are refused by name, nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3Model

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.check.module_check import _gap, check_hosted
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.sampling_params import SamplingParams

SLIDING = {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2}


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def model(make_model):
    return make_model("qwen3")


def host(model: nn.Module, *, invariant: bool = True) -> Engine:
    return Engine(model, EngineConfig(kv_cache="4 blocks", invariant=invariant))


class TwiceAttention(Qwen3Attention):
    """An attention that attends a second time in the first layer, to its own output."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object):
        out, weights = super().forward(hidden_states, *args, **kwargs)
        if self.layer_idx:
            return out, weights
        return out + super().forward(out, *args, **kwargs)[0], weights


class NearAttention(Qwen3Attention):
    """An attention that hides all but the last eight tokens, through a mask of its own making."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: object, attention_mask=None, **kwargs: object):
        if attention_mask is not None:
            place = torch.arange(hidden_states.shape[1])
            attention_mask = attention_mask.masked_fill(place < place[:, None] - 8, -1e9)
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class ShiftedModel(Qwen3Model):
    """A model that counts positions from 2 where it is given none."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: object):
        if position_ids is None:
            position_ids = torch.arange(2, 2 + input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class OddMLP(Qwen3MLP):
    """An MLP with a function whose last few elements, which fill no vector, are computed by another routine, as in
    PyTorch some are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x[..., :5].flatten()
        whole, rest = values.split([len(values) // 8 * 8, len(values) % 8])
        odd = torch.cat([torch.sinh(whole), (torch.exp(rest) - torch.exp(-rest)) / 2]).view_as(x[..., :5])
        return super().forward(torch.cat([odd, x[..., 5:]], -1))


class HiddenDropoutMLP(Qwen3MLP):
    """An MLP with a dropout that no attribute tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class BoundaryMLP(Qwen3MLP):
    """An MLP whose rows know the number of rows in the call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + x.shape[1])


class LonelyMLP(Qwen3MLP):
    """An MLP that computes one row alone with another routine than several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 1e-4 * (x.numel() == x.shape[-1]))


def plant(model: nn.Module, kind: type[nn.Module]) -> None:
    for part in list(model.modules()):
        if type(part) is kind.__mro__[1]:
            part.__class__ = kind


FAULTS = {
    NearAttention: r"with the engine's attention and operations its log-probabilities differ by up to [0-9.]+ from",
    ShiftedModel: "without position_ids, as a trainer calls it, it counts other positions than from 0",
    OddMLP: r"by up to [0-9.e-]+: the code of OddMLP computes other numbers at the input of model.layers.0.mlp",
    LonelyMLP: r"by up to [0-9.e-]+: the code of LonelyMLP",
    BoundaryMLP: r"by up to [0-9.]+: the code of BoundaryMLP",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda kind: kind.__name__)
def test_a_planted_fault_is_refused_by_name_when_the_engine_is_made(model, fault):
    plant(model, fault)
    with pytest.raises(ValueError, match=f"(?s)^Qwen3ForCausalLM cannot be hosted: .*{FAULTS[fault]}"):
        host(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(part) for part in model.modules())


def test_an_attention_that_one_layer_calls_twice_is_hosted_with_the_trainers_bits(model):
    plant(model, TwiceAttention)
    engine = host(model)
    assert len(engine.model.kv_shapes) == 3  # of two layers
    [answer] = engine.generate([[5, 17, 9]], SamplingParams(max_new_tokens=20, temperature=0.7, ignore_eos=True))
    with engine.model.training_numerics():
        logits = model(torch.tensor([answer.prompt_ids + answer.token_ids]), use_cache=False).logits[0, 2:-1]
    assert list(answer.logprobs) == selected_logprobs(logits, torch.tensor(answer.token_ids), 0.7).tolist()


def test_a_forward_that_was_wrapped_is_named_where_numbers_differ(model):
    own = model.forward

    def in_autocast(*args: object, **kwargs: object) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return own(*args, **kwargs)

    model.forward = in_autocast
    with pytest.raises(ValueError, match=r"log-probabilities differ .* replaced by .*in_autocast of .*unwrap_model"):
        host(model)


def test_a_model_that_counts_other_positions_is_refused_without_invariance_too(make_model):
    model = make_model("qwen3", torch.bfloat16)
    plant(model, ShiftedModel)
    for invariant in (True, False):
        with pytest.raises(ValueError, match=r"it counts other positions than from 0$"):
            host(model, invariant=invariant)


def test_a_window_that_only_the_mask_tells_is_refused_by_name(make_model):
    model = make_model("qwen3", **SLIDING)
    host(model)
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(ValueError, match=r"mask of Qwen3Attention has a window of 20 tokens, .* told none .*\[1\]"):
        host(model)


class ShortSightedAttention(Qwen3Attention):
    """An attention with a window of 600 tokens of which it hides the first 40, through a mask of its own making."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: object, attention_mask=None, **kwargs: object):
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            place = torch.arange(hidden_states.shape[1])
            attention_mask = attention_mask & (place >= place[:, None] - 560)
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_layer_of_a_long_window_is_compared_with_its_own_attention(make_model, dtype):
    windows = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    model = make_model("qwen3", dtype, max_position_embeddings=1024, sliding_window=600, **windows)
    state = torch.get_rng_state()
    verdict = check_hosted(HostedModel.adopt(model, dtype=None, device=None, invariant=True))
    assert verdict is not None and verdict.num_tokens == 18
    assert torch.equal(torch.get_rng_state(), state)
    plant(model, ShortSightedAttention)
    with pytest.raises(
        ValueError, match="behind its window of 600 tokens, layer 1's ShortSightedAttention differs from its own"
    ):
        host(model)


def test_dropout_is_refused_by_name_in_train_mode_and_harmless_in_eval_mode(model):
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.25))
    model.model.layers[1].self_attn.attention_dropout = 0.1
    host(model.eval())
    model.train()
    wanted = r"dropout \(0.25\) of Dropout \(model.layers.0.mlp.act_fn.1\); attention_dropout \(0.1\) of Qwen3Attention"
    with pytest.raises(ValueError, match=f"draws random numbers in train mode, .*: .*{wanted}"):
        host(model)


def test_dropout_that_no_attribute_tells_is_found_by_the_forward_and_refused(model):
    plant(model, HiddenDropoutMLP)
    host(model)
    with pytest.raises(ValueError, match=r"draws random numbers \(dropout\) in its forward"):
        host(model.train())


def test_an_engine_that_is_not_invariant_goes_on_with_a_warning_where_only_bits_differ(model, caplog):
    plant(model, OddMLP)
    host(model, invariant=False)
    assert "Qwen3ForCausalLM: whole, as in the trainer, it gives other log-probabilities" in caplog.text
    for layer in model.model.layers:
        layer.mlp.__class__ = BoundaryMLP
    with pytest.raises(ValueError, match="BoundaryMLP"):
        host(model, invariant=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_the_check_leaves_mode_gradients_attention_and_random_numbers_as_they_were(make_model, family):
    model = make_model(family, vocab_size=250).train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, implementations = (
        torch.get_rng_state(),
        (model.config._attn_implementation, model.config._experts_implementation),
    )
    verdict = check_hosted(HostedModel.adopt(model, dtype=None, device=None, invariant=True))
    assert verdict.bits_gap == 0.0 and verdict.difference < 1e-4
    assert verdict.num_tokens == (40 if family == "gemma3" else 18)  # twenty more than its window
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.config._attn_implementation, model.config._experts_implementation) == implementations
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_only_equal_logits_have_no_gap():
    """A verdict of gap 0.0 says that bits are equal, and is kept for other processes."""
    logits = torch.tensor([[50.0, 0.0, 0.0]])
    other = torch.tensor([[50.0, 0.0, 0.25]])  # the likeliest token has the same log-probability
    assert _gap(other, logits) == 0.25
    assert _gap(logits, logits.clone()) == 0.0


def test_a_verdict_is_remembered_for_equal_configurations_and_classes(make_model):
    first = check_hosted(HostedModel.adopt(make_model("qwen3"), dtype=None, device=None, invariant=True))
    assert check_hosted(HostedModel.adopt(make_model("qwen3"), dtype=None, device=None, invariant=True)) is first
    other = make_model("qwen3")
    plant(other, OddMLP)
    with pytest.raises(ValueError, match="OddMLP"):
        check_hosted(HostedModel.adopt(other, dtype=None, device=None, invariant=True))


def test_a_module_without_finite_numbers_is_hosted_unchecked(make_model, caplog):
    model = make_model("qwen3", vocab_size=99)  # of no other test: the verdict is remembered
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    host(model)
    assert "is not checked: its logits are not finite" in caplog.text
