"""A module that its trainer casts, moves, copies or lends twice after its engine was made, and an engine that is
closed: each is noticed, and says what to do."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped, PhaseError
from lockstep.tests.rollout.engine.callers import sampled

PROMPT = [(7 * i) % 250 for i in range(40)]


def make(model: torch.nn.Module, **settings: object) -> Engine:
    return Engine(model, EngineConfig(kv_cache="16 blocks", speculation="off", **settings))


@pytest.mark.parametrize("size", [200, 300])
def test_a_vocabulary_of_another_size_is_refused_by_name(make_model, size):
    model = make_model("qwen3")  # of 256 tokens
    engine = make(model)
    engine.generate([PROMPT], sampled())
    model.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(ValueError, match=rf"embed_tokens.weight.* is torch.float32 \[{size}, 64\] on cpu and was"):
        engine.generate([PROMPT], sampled())
    assert make(model).generate([[size - 1]], sampled())[0].token_ids


@pytest.mark.parametrize("change", ["bfloat16", "double", "meta", "head"])
@pytest.mark.parametrize("has_generated", [False, True])
def test_a_module_that_was_cast_or_moved_is_refused_until_it_is_as_before(make_model, change, has_generated):
    model = make_model("qwen3")
    engine = make(model)
    if has_generated:
        engine.generate([PROMPT], sampled())
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    if change == "meta":
        model.to("meta")
    elif change == "head":
        model.lm_head.to(torch.bfloat16)
    else:
        getattr(model, change)()
    wanted = {"head": "lm_head.weight .the first is torch.bfloat16", "meta": r"is torch.float32 \[.*\] on meta and was"}
    with pytest.raises(
        ValueError, match=wanted.get(change, r"is torch.(bfloat16|float64) \[.*\] on cpu and was torch.float32")
    ):
        engine.generate([PROMPT], sampled())
    assert not engine.has_work and not engine.model.in_rollout_phase
    model.to(torch.float32) if change != "meta" else model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for name, buffer in make_model("qwen3").named_buffers():
            model.get_buffer(name).copy_(buffer)
    expected = make(make_model("qwen3")).generate([PROMPT], sampled())[0].logprobs
    assert engine.generate([PROMPT], sampled())[0].logprobs == expected


def test_end_tokens_that_were_changed_after_the_engine_was_made_are_refused_until_they_are_as_before(make_model):
    model = make_model("qwen3")
    engine = make(model)
    expected = engine.generate([PROMPT], sampled())[0].token_ids
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [7, expected[2]]
    with pytest.raises(ValueError, match=rf"eos_token_id of Qwen3ForCausalLM's .* say \[{min(7, expected[2])}, "):
        engine.generate([PROMPT], sampled())
    with pytest.raises(ValueError, match="stop_token_ids"), engine.model.rollout_phase():
        pass
    assert not engine.has_work and not engine.model.in_rollout_phase
    [stopped] = make(model).generate([PROMPT], sampled())
    assert stopped.token_ids == expected[:3] and stopped.finish_reason.type == "stop"
    model.generation_config.eos_token_id = before
    assert engine.generate([PROMPT], sampled())[0].token_ids == expected


@pytest.mark.parametrize("invariant", [True, False])
def test_a_module_is_in_one_engines_hands_at_a_time(make_model, invariant):
    model = make_model("qwen3")
    first, second = make(model, invariant=invariant), make(model, invariant=invariant)
    expected = first.generate([PROMPT], sampled())[0].logprobs
    with first.model.rollout_phase():
        for use in (lambda: second.generate([PROMPT], sampled()), lambda: make(model, invariant=invariant)):
            with pytest.raises(PhaseError, match=r"Qwen3ForCausalLM is in use by another engine: .* of one engine"):
                use()
        with pytest.raises(PhaseError, match="in use by another engine"), second.model.training_numerics():
            pass
        assert first.generate([PROMPT], sampled())[0].logprobs == expected
    assert model.config._attn_implementation == "sdpa"
    assert second.generate([PROMPT], sampled())[0].logprobs == expected


def scale(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5


def hook(model: torch.nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, out: 2 * out)


def forward(model: torch.nn.Module) -> None:
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)


@pytest.mark.parametrize("change", [scale, hook, forward], ids=lambda change: change.__name__)
def test_kv_of_other_settings_forwards_or_hooks_is_not_used_again(make_model, change, caplog):
    model = make_model("qwen3")
    engine = make(model)
    before = engine.generate([PROMPT], sampled())[0]
    model.train()  # changes no number
    assert engine.generate([PROMPT], sampled())[0].num_cached_tokens > 0 and "are others" not in caplog.text
    change(model)
    found = engine.generate([PROMPT], sampled())[0]
    assert found.num_cached_tokens == 0 and found.logprobs != before.logprobs
    assert found.logprobs == make(model).generate([PROMPT], sampled())[0].logprobs
    assert "settings, forwards or hooks of Qwen3ForCausalLM are others" in caplog.text
    assert ("is not proven for these" in caplog.text) == (change is not scale)
    assert engine.generate([PROMPT], sampled())[0].num_cached_tokens > 0
    assert caplog.text.count("are others") == 1


def doubled(model: torch.nn.Module, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Double what a class of the first layer's parts, or of the layer itself, computes."""
    kind = type(model.model.layers[0].get_submodule(part))
    own = kind.forward

    def forward(self, *args, **kwargs):
        found = own(self, *args, **kwargs)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize(("part", "invariant"), [("", True), ("", False), ("mlp", False), ("input_layernorm", False)])
def test_kv_of_another_forward_of_a_class_is_not_used_again(make_model, part, invariant, monkeypatch, caplog):
    model = make_model("qwen3")
    engine = make(model, invariant=invariant)
    before = engine.generate([PROMPT], sampled())[0]
    doubled(model, part, monkeypatch)
    found = engine.generate([PROMPT], sampled())[0]
    assert found.num_cached_tokens == 0 and found.logprobs != before.logprobs
    assert found.logprobs == make(model, invariant=invariant).generate([PROMPT], sampled())[0].logprobs
    assert engine.generate([PROMPT], sampled())[0].num_cached_tokens > 0
    assert caplog.text.count("are others than in the rollout phase before") == 1
    monkeypatch.undo()
    again = engine.generate([PROMPT], sampled())[0]
    assert again.num_cached_tokens == 0 and again.logprobs == before.logprobs


def test_classes_that_exchange_their_forwards_are_others(make_model, monkeypatch):
    model = make_model("qwen3")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    kind = type(first)
    kinds = [
        type(name, (kind,), {"forward": lambda self, x, by=by: kind.forward(self, x) * by})
        for name, by in (("A", 1), ("B", 2))
    ]
    first.__class__, second.__class__ = kinds
    engine = make(model, invariant=False)
    engine.generate([PROMPT], sampled())
    forwards = [one.forward for one in kinds]
    for one, forward in zip(kinds, reversed(forwards), strict=True):
        monkeypatch.setattr(one, "forward", forward)
    found = engine.generate([PROMPT], sampled())[0]
    assert found.num_cached_tokens == 0
    assert found.logprobs == make(model, invariant=False).generate([PROMPT], sampled())[0].logprobs


@pytest.mark.parametrize("part", ["mlp", "mlp.gate_proj", "mlp.act_fn", "input_layernorm", "self_attn"])
def test_another_forward_of_a_class_that_the_engine_computes_itself_is_refused(make_model, part, monkeypatch):
    model = make_model("qwen3")
    engine = make(model)
    expected = engine.generate([PROMPT], sampled())[0].logprobs
    doubled(model, part, monkeypatch)
    name = type(model.model.layers[0].get_submodule(part)).__name__
    for use in (lambda: engine.generate([PROMPT], sampled()), lambda: engine.model.training_numerics().__enter__()):
        with pytest.raises(ValueError, match=f"^{name}: the forward of the class was changed after the engine"):
            use()
    assert not engine.has_work and not engine.model.in_rollout_phase
    if part in ("mlp", "input_layernorm", "self_attn"):  # its own code calls the operations
        found = make(model).generate([PROMPT], sampled())[0].logprobs
        assert found != expected
    monkeypatch.undo()
    assert engine.generate([PROMPT], sampled())[0].logprobs == expected


def test_an_attention_that_is_replaced_inside_the_phase_generates_nothing(make_model):
    model = make_model("qwen3")
    engine = make(model)
    expected = engine.generate([PROMPT], sampled())[0].logprobs
    with engine.model.rollout_phase():
        model.set_attn_implementation("eager")
        with pytest.raises(PhaseError, match="attention was replaced inside the rollout phase"):
            engine.generate([PROMPT], sampled())
    assert engine.generate([PROMPT], sampled())[0].logprobs == expected


def test_a_module_is_copied_outside_of_its_phase_only(make_model):
    """A copy has the forwards of the original, which compute with the original's weights."""
    model = make_model("qwen3")
    engine = make(model)
    with engine.model.rollout_phase():
        for part in (model, model.model, model.model.layers[0]):
            with pytest.raises(PhaseError, match="copy it outside the rollout phase"):
                copy.deepcopy(part)
    copied = copy.deepcopy(model)
    assert not any("forward" in vars(part) for part in copied.modules())
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        assert torch.equal(copied(ids).logits, model(ids).logits)


def test_a_closed_engine_takes_no_request_and_starts_no_thread(make_model):
    model = make_model("qwen3").train()
    engine = make(model)
    engine.add(PROMPT, sampled())
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate([PROMPT], sampled()),
        lambda: engine.add(PROMPT, sampled()),
        lambda: list(engine.stream(PROMPT, sampled())),
        lambda: asyncio.run(engine.agenerate([PROMPT], sampled())),
        engine.step,
        engine.start,
        engine.weights.resume_kv,
    ):
        with pytest.raises(EngineStopped, match="the engine is closed: make another one"):
            use()
    assert engine.kv_bytes == 0 and not engine.is_started and model.training
    assert make(model).generate([PROMPT], sampled())[0].token_ids


UNCLOSED = """
import sys
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

service = RolloutService(Engine(sys.argv[1], EngineConfig(kv_cache="16 blocks")))
service.update_weights_from_disk(sys.argv[1])
service.commit_implicit_update()
"""


def test_a_process_that_closes_no_engine_ends_without_an_error(make_model, tmp_path):
    """The phase of an engine's own module ends with the interpreter, when the module may be gone already."""
    make_model("qwen3").save_pretrained(tmp_path)
    ended = subprocess.run([sys.executable, "-c", UNCLOSED, tmp_path], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Exception ignored" not in ended.stderr, ended.stderr
