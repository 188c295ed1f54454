"""KV and records of decode steps are kept from phase to phase where nothing changed that a forward reads, and dropped
where something may have changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import PhaseError
from lockstep.tests.rollout.engine.callers import sampled

PROMPT = [(7 * i) % 250 for i in range(40)]
ALPHA = 1.0  # read by a hook below


def make(model: torch.nn.Module) -> Engine:
    return Engine(model, EngineConfig(kv_cache="16 blocks", speculation="off"))


def num_cached(engine: Engine) -> int:
    return engine.generate([PROMPT], sampled())[0].num_cached_tokens


def kept(engine: Engine) -> tuple[bool, int]:
    """Return whether a phase finds KV of the one before, and the version of the module's code, which records need."""
    return num_cached(engine) > 0, engine.model.phase.code_version


def toggle_checkpointing(model: torch.nn.Module) -> None:
    model.gradient_checkpointing_enable()
    model.train()(torch.tensor([PROMPT])).logits.sum().backward()
    model.gradient_checkpointing_disable()


def enable_checkpointing(model: torch.nn.Module) -> None:
    model.gradient_checkpointing_enable()


def require_gradients(model: torch.nn.Module) -> None:
    """Register the hook that guides of PEFT have a trainer write."""

    def make_inputs_require_grad(module, input, output):
        output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)


def count(model: torch.nn.Module) -> None:
    model.num_calls = getattr(model, "num_calls", 0) + 1


def pass_and_remove(model: torch.nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, out: None).remove()


def compile_forward(model: torch.nn.Module) -> None:
    layer = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager")


@pytest.mark.parametrize(
    "change",
    [toggle_checkpointing, enable_checkpointing, require_gradients, count, pass_and_remove, compile_forward],
    ids=lambda change: change.__name__,
)
def test_what_changes_no_number_drops_no_kv(make_model, change, caplog):
    model = make_model("qwen3")
    engine = make(model)
    num_cached(engine)
    version = engine.model.phase.code_version
    for _ in range(2):
        change(model)
        assert kept(engine) == (True, version)
    assert "are others" not in caplog.text


def test_checkpointing_of_a_model_with_adapters_drops_no_kv(make_model, caplog):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(target_modules=["q_proj"]))
    engine = make(model)
    num_cached(engine)
    version = engine.model.phase.code_version
    for _ in range(2):
        toggle_checkpointing(model)
        assert kept(engine) == (True, version)
    assert "are others" not in caplog.text


def test_a_phase_inside_the_training_numerics_finds_the_kv_of_the_one_before(make_model, caplog):
    engine = make(make_model("qwen3"))
    num_cached(engine)
    version = engine.model.phase.code_version
    with engine.model.training_numerics():
        assert [kept(engine) for _ in range(2)] == [(True, version)] * 2
    assert kept(engine) == (True, version) and "are others" not in caplog.text


def test_what_changes_inside_the_training_numerics_is_noticed(make_model, caplog):
    model = make_model("qwen3")
    layer = model.model.layers[0]
    engine = make(model)
    with engine.model.training_numerics():
        before = engine.generate([PROMPT], sampled())[0]
        layer.self_attn.scaling = 0.5
        found = engine.generate([PROMPT], sampled())[0]
        assert found.num_cached_tokens == 0 and "(scaling)" in caplog.text
        installed = layer.forward
        layer.forward = lambda *args, **kwargs: 2 * installed(*args, **kwargs)
        doubled = engine.generate([PROMPT], sampled())[0]
        assert doubled.num_cached_tokens == 0 and "(forwards or hooks)" in caplog.text
    assert len({one.logprobs for one in (before, found, doubled)}) == 3
    assert found.logprobs == make(model).generate([PROMPT], sampled())[0].logprobs


def test_a_phase_that_was_refused_changes_nothing(make_model, caplog):
    model = make_model("qwen3")
    first, second = make(model), make(model)
    num_cached(second)
    before = second.model.phase.code_version, second.model.phase.num_begun
    with first.model.rollout_phase(), pytest.raises(PhaseError, match="in use by another engine"):
        num_cached(second)
    assert (second.model.phase.code_version, second.model.phase.num_begun) == before
    assert kept(second) == (True, before[0]) and "are others" not in caplog.text


def steer(alpha: float) -> Callable[..., torch.Tensor]:
    return lambda module, inputs, out: alpha * out


def global_steer(module: torch.nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
    return ALPHA * out


class Steering:
    """A hook with state of its own."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def hook(self, module: torch.nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
        return self.alpha * out


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("kind", ["closure", "partial", "global", "method"])
def test_a_hook_of_each_phase_is_another_one_where_it_may_compute_otherwise(
    make_model, kind, is_same, monkeypatch, caplog
):
    model = make_model("qwen3")
    engine = make(model)
    steering = Steering(1.5)

    def generate(alpha: float) -> int:
        monkeypatch.setitem(globals(), "ALPHA", alpha)
        steering.alpha = alpha
        by_partial = functools.partial(lambda alpha, module, inputs, out: alpha * out, alpha)
        hooks = {"closure": steer(alpha), "partial": by_partial, "global": global_steer, "method": steering.hook}
        handle = model.model.layers[0].register_forward_hook(hooks[kind])
        try:
            return num_cached(engine)
        finally:
            handle.remove()

    generate(1.5)
    # A method's object has state, which is not compared: a hook of it is another one whenever it is registered.
    keeps = is_same and kind != "method"
    assert (generate(1.5 if is_same else 2.5) > 0) == keeps
    assert ("forwards or hooks of Qwen3ForCausalLM are others" in caplog.text) != keeps
    assert num_cached(engine) == 0, "the hook is gone"


def test_a_second_hook_of_the_same_function_counts(make_model):
    model = make_model("qwen3")
    engine = make(model)
    model.model.layers[0].register_forward_hook(steer(1.5))
    num_cached(engine)
    assert num_cached(engine) > 0
    model.model.layers[0].register_forward_hook(steer(1.5))
    assert num_cached(engine) == 0


def test_forwards_that_follow_each_other_at_one_address_are_told_apart(make_model):
    model = make_model("qwen3")
    layer = model.model.layers[0]
    engine = make(model)

    def scaled(by: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: by * type(layer).forward(layer, *args, **kwargs)

    for scale in range(1, 12):
        layer.forward = scaled(torch.tensor(float(scale)))
        assert num_cached(engine) == 0
        del layer.forward


class Scaled(torch.nn.Module):
    """A layer that reads a setting which may be missing."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "late_scale", 1.0) * self.inner(x)


def test_a_new_attribute_counts_where_a_forward_may_read_it(make_model, caplog):
    model = make_model("qwen3")
    layer = model.model.layers[0]
    layer.mlp = Scaled(layer.mlp)
    engine = make(model)
    num_cached(engine)
    layer.mlp.late_scale = 2.0
    assert num_cached(engine) == 0 and "(late_scale)" in caplog.text
    layer.mlp.num_calls = 1  # no code of the module has this name
    assert num_cached(engine) > 0


def test_an_attribute_from_before_the_engine_counts_and_is_named(make_model, caplog):
    """Where code reads it cannot be ruled out: names may be put together."""
    model = make_model("qwen3")
    model.num_calls = 0
    engine = make(model)
    num_cached(engine)
    model.num_calls += 1
    assert num_cached(engine) == 0 and "(num_calls)" in caplog.text


def test_a_copy_of_a_module_with_hooks_is_hosted_by_itself(make_model):
    model = make_model("qwen3")
    model.gradient_checkpointing_enable()
    num_cached(make(model))
    engine = make(copy.deepcopy(model))
    num_cached(engine)
    assert num_cached(engine) > 0


def test_a_hook_of_all_modules_and_a_setting_of_numpys_numbers_count(make_model):
    model = make_model("qwen3")
    value = model.model.layers[0].self_attn.v_proj
    for layer in model.model.layers:
        layer.self_attn.scaling = np.float64(0.2)
    engine = make(model)
    num_cached(engine)
    assert num_cached(engine) > 0
    for layer in model.model.layers:
        layer.self_attn.scaling = np.float64(0.4)
    assert num_cached(engine) == 0

    def doubled() -> int:
        hook = lambda module, inputs, out: 2 * out if module is value else None  # noqa: E731 - anew each time
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            return num_cached(engine)
        finally:
            handle.remove()

    assert doubled() == 0
    assert doubled() > 0, "the same one again"
    assert num_cached(engine) == 0
