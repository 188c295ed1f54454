"""Parts of a module that users hook or change: the kernels in their place compute what the module's own code would."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

IDS = torch.arange(5, 29)[None]
UNCALLED = {nn.ModuleList}  # never called itself


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def engine_of(model: nn.Module) -> Engine:
    return Engine(model, EngineConfig(kv_cache="16 blocks", max_num_seqs=4))


@torch.no_grad()
def under_numerics(engine: Engine) -> Tensor:
    with engine.model.training_numerics():
        return engine.model.module(IDS, use_cache=False).logits


@torch.no_grad()
def by_itself(engine: Engine) -> Tensor:
    return engine.model.module(IDS, use_cache=False).logits


def assert_is_its_own(engine: Engine, before: Tensor) -> None:
    expected = by_itself(engine)
    assert (expected - before).abs().max() > 0.01, "the change must show"
    torch.testing.assert_close(under_numerics(engine), expected, atol=1e-4, rtol=1e-4)


def halve_activations(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, out: out * 0.5)


def change_eps(model: nn.Module) -> None:
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [halve_activations, change_eps])
@pytest.mark.parametrize("is_before", [True, False], ids=["before the engine", "after it"])
def test_a_hook_on_an_activation_and_another_eps_are_computed_with(
    make_model, change: Callable[[nn.Module], None], is_before: bool
) -> None:
    model = make_model("llama").eval()
    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
    if is_before:
        change(model)
    engine = engine_of(model)
    if not is_before:
        under_numerics(engine)
        change(model)
    assert_is_its_own(engine, before)
    engine.close()


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_weight_that_a_pre_hook_computes_is_the_new_one_in_the_first_forward_after_a_step(make_model, name) -> None:
    model = make_model("llama").eval()
    layer = getattr(model.model.layers[0].self_attn, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still what people use
        weight_norm(layer)
    engine = engine_of(model)
    for _ in range(2):  # layers of one input share a call after a watched forward
        before = under_numerics(engine)
    with torch.no_grad():
        layer.weight_g.mul_(3)
    found = under_numerics(engine)
    torch.testing.assert_close(found, by_itself(engine), atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 0.01
    engine.close()


def test_the_verdict_of_a_module_is_not_that_of_one_with_hooks_or_a_patched_class(make_model, monkeypatch) -> None:
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "0")
    plain = make_model("llama").eval()
    engine_of(plain).close()
    kind = type(plain.model.layers[0].self_attn)
    forward = kind.forward

    def draws(self, *args, **kwargs):
        out, weights = forward(self, *args, **kwargs)
        return out + out.flatten()[0], weights  # of another row

    hooked = make_model("llama").eval()
    hooked.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: (out[0] + out[0].flatten()[0], out[1]))
    with pytest.raises(ValueError, match=r"differ|other log-prob"):
        engine_of(hooked)
    monkeypatch.setattr(kind, "forward", draws)
    with pytest.raises(ValueError, match=r"differ|other log-prob"):
        engine_of(make_model("llama").eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_hooks_that_change_nothing_change_no_bit(make_model, family: str, dtype: torch.dtype) -> None:
    """DeepSpeed's stage 3 has such hooks on every module of the trainer, and the engine's copy has none."""
    model = make_model(family, dtype=dtype).eval()
    engine = engine_of(model)
    for _ in range(2):
        before = under_numerics(engine)
    calls = []
    for part in model.modules():
        part.register_forward_pre_hook(lambda module, args: calls.append(module))
        part.register_forward_hook(lambda module, args, out: None)
    assert torch.equal(under_numerics(engine), before)
    assert {type(part) for part in calls} >= {type(part) for part in model.model.layers[0].modules()} - UNCALLED
    engine.close()


def test_a_hook_on_the_activation_of_experts_is_computed_with(make_model) -> None:
    model = make_model("qwen3_moe").eval()
    engine = engine_of(model)
    before = under_numerics(engine)
    for layer in model.model.layers:
        layer.mlp.experts.act_fn.register_forward_hook(lambda module, args, out: out * 0.5)
    assert_is_its_own(engine, before)
    engine.close()
