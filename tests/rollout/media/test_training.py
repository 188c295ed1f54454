"""A trainer's forward and backward over prompts with images, under the engine's numerics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.media.image_prompts import IMAGE, ImagePrompts, as_trained, trained_logprobs
from lockstep.tests.rollout.model.test_vision_language import ENGINE, make

SAMPLED = SamplingParams(max_new_tokens=8, sampling_seed=5)


def test_gradients_are_those_of_transformers_own_operations():
    own = make("qwen3_vl")
    engine = Engine(copy.deepcopy(own), ENGINE)
    prompt = ImagePrompts(own).prompt((4, 6), (8, 4))
    given = {name: value for name, value in prompt.items() if name != "attention_mask"}
    losses = []
    for model, numerics in ((own, None), (engine.model.module, engine.model.training_numerics())):
        model.train()
        if numerics is None:
            loss = model(**given, use_cache=False, labels=given["input_ids"]).loss
        else:
            with numerics:
                loss = model(**given, use_cache=False, labels=given["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (path, one), (_, other) in zip(own.named_parameters(), engine.model.module.named_parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5), path


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_packed_prompts_with_images_have_the_logprobs_of_the_rollout(name):
    engine = Engine(make(name), ENGINE)
    model = engine.model.module
    make_one = ImagePrompts(model)
    prompts = [make_one.prompt((4, 6), (8, 4)), make_one.prompt((8, 8))]
    completions = engine.generate(prompts, SAMPLED)
    sequences = [torch.tensor([*c.prompt_ids, *c.token_ids]) for c in completions]
    lengths = [len(sequence) for sequence in sequences]
    positions: list[torch.Tensor] = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        types = (sequence == IMAGE).int()[None]
        grid = prompt["image_grid_thw"]
        own, _ = model.model.get_rope_index(sequence[None], mm_token_type_ids=types, image_grid_thw=grid)
        positions.append(own)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ends: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    ends |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    images = {key: torch.cat([prompt[key] for prompt in prompts]) for key in ("pixel_values", "image_grid_thw")}
    with engine.model.training_numerics(), torch.no_grad():
        ids, places = torch.cat(sequences)[None], torch.cat(positions, dim=2)
        logits = model(input_ids=ids, position_ids=places, use_cache=False, **images, **ends).logits[0]
    for row, completion in zip(logits.split(lengths), completions, strict=True):
        own = row[completion.num_prompt_tokens - 1 : -1]
        assert selected_logprobs(own, torch.tensor(completion.token_ids), 1.0).tolist() == list(completion.logprobs)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_checkpointed_layers_give_the_same_bits_and_gradients(name):
    model = make(name)
    engine = Engine(model, ENGINE)
    make_one = ImagePrompts(model)
    prompts = [make_one.prompt((4, 6), (8, 4)), make_one.prompt((8, 8))]
    completions = engine.generate(prompts, SAMPLED)
    given, _ = as_trained(model, prompts, completions)
    found = []
    for checkpoints in (False, True):
        model.train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with engine.model.training_numerics():
            model(**given, use_cache=False, labels=given["input_ids"]).loss.backward()
        found.append({path: one.grad.clone() for path, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys() and any("vis" in path for path in found[0])
    assert all(torch.equal(found[0][path], found[1][path]) for path in found[0])
    assert trained_logprobs(engine, prompts, completions) == [list(c.logprobs) for c in completions]


def test_an_adapter_over_all_layers_trains_the_encoder_too():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make("qwen3_vl"), peft.LoraConfig(r=2, target_modules="all-linear"))
    engine = Engine(adapted, ENGINE)
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_B" in path:
                parameter.normal_(0.0, 0.1)
    prompts = [ImagePrompts(engine.model.module).prompt((4, 6), (8, 4))]
    completions = engine.generate(prompts, SAMPLED)
    assert trained_logprobs(engine, prompts, completions) == [list(c.logprobs) for c in completions]
    with adapted.disable_adapter():
        plain = engine.generate(prompts, SAMPLED)
        assert trained_logprobs(engine, prompts, plain) == [list(c.logprobs) for c in plain]
    assert plain[0].logprobs != completions[0].logprobs
