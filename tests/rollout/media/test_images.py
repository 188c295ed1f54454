"""Prompts with images: the answers are transformers', and their log-probabilities the trainer's, bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.media.reader import ImageReader, image_tensors, sizes_digest
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.media.image_prompts import (
    IMAGE,
    ImagePrompts,
    assert_pauses_change_nothing,
    trained_logprobs,
)
from lockstep.tests.rollout.model.test_vision_language import ENGINE, make

FAMILIES = ["qwen3_vl", "qwen2_5_vl", "llava", "gemma3"]
SAMPLED = SamplingParams(max_new_tokens=8, sampling_seed=5)


def prompts_of(model: PreTrainedModel) -> list[Any]:
    make_one = ImagePrompts(model)
    return [
        make_one.prompt((4, 6), (8, 4)),
        make_one.prompt((4, 4)),
        [1, 2, 3, 4],
        make_one.prompt((8, 8), (4, 4), (4, 8)),
    ]


def answers(engine: Engine, prompts: list[Any], params: Any = SAMPLED, **options: Any) -> list[tuple[Any, Any]]:
    return [(c.token_ids, c.logprobs) for c in engine.generate(prompts, params, **options)]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_transformers(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model)
    expected = []
    for prompt in prompts:
        given = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
        ids = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected.append(ids[0, given["input_ids"].shape[1] :].tolist())
    for source in (model, tmp_path):
        engine = Engine(source, ENGINE)
        assert [
            list(c.token_ids) for c in engine.generate(prompts, {"max_new_tokens": 8, "temperature": 0})
        ] == expected
        engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_the_trainers_alone_and_in_a_padded_batch(name, dtype):
    engine = Engine(make(name, dtype), ENGINE)
    prompts = prompts_of(engine.model.module)
    completions = engine.generate(prompts, SAMPLED)
    reported = [list(c.logprobs) for c in completions]
    alone = [trained_logprobs(engine, [p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert reported == alone
    assert reported == trained_logprobs(engine, prompts, completions)
    assert reported == trained_logprobs(engine, prompts, completions, grad=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 5},
        {"chunked_prefill_size": 512},
        {"overlap": True},
        {"overlap": True, "speculation": "off", "cuda_graph_batch_sizes": [4]},
        {"speculation": {"past": 4, "siblings": 4, "history": 4}},
        {"speculation": "off"},
        {"prefix_cache": False},
        {"kv_cache": "9 blocks"},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_they_are_computed(name, settings):
    model = make(name)
    prompts = prompts_of(model)
    engine = Engine(model, ENGINE)
    expected = answers(engine, prompts)
    engine.close()
    other = Engine(model, replace(ENGINE, **settings))
    assert answers(other, prompts) == expected
    assert answers(other, prompts[::-1]) == expected[::-1]  # with what is cached
    other.close()


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_samples_of_a_prompt_share_its_images_and_no_other_image_does(name):
    engine = Engine(make(name), replace(ENGINE, kv_cache="64 blocks", max_num_seqs=8))
    make_one = ImagePrompts(engine.model.module)
    first, second = (make_one.prompt((8, 8), (4, 4), (4, 4)) for _ in range(2))
    assert torch.equal(first["input_ids"], second["input_ids"])
    expected = [answers(Engine(make(name), ENGINE), [p]) for p in (first, second)]
    assert expected[0] != expected[1]
    [whole] = engine.generate([first], SAMPLED)
    again, other = engine.generate([first, second], SAMPLED)
    assert again.num_cached_tokens >= 16 and other.num_cached_tokens == 0
    assert [(whole.token_ids, whole.logprobs)] == [(again.token_ids, again.logprobs)] == expected[0]
    assert [(other.token_ids, other.logprobs)] == expected[1]
    group = engine.generate([first], replace(SAMPLED, n=4))
    assert [list(c.logprobs) for c in group] == [trained_logprobs(engine, [first], [c])[0] for c in group]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(mode):
    engine = Engine(make("qwen3_vl"), ENGINE)
    assert_pauses_change_nothing(engine, prompts_of(engine.model.module), SAMPLED, mode)


def test_a_started_engine_reads_images_between_its_steps():
    engine = Engine(make("qwen3_vl"), ENGINE)
    prompts = prompts_of(engine.model.module)
    expected = answers(engine, prompts)
    with engine.model.rollout_phase():
        engine.start()
        assert answers(engine, prompts) == expected
        engine.stop()


def test_features_follow_from_the_weights_of_their_step():
    engine = Engine(make("qwen3_vl"), ENGINE)
    prompts = prompts_of(engine.model.module)[:1]
    before = answers(engine, prompts)
    with torch.no_grad():
        for path, parameter in engine.model.module.named_parameters():
            if ".visual." in path:
                parameter.mul_(1.25)
    completions = engine.generate(prompts, SAMPLED)
    assert [(c.token_ids, c.logprobs) for c in completions] != before
    assert [list(c.logprobs) for c in completions] == trained_logprobs(engine, prompts, completions)


def test_a_drawn_token_of_images_keeps_its_embedding_beside_an_image():
    model = make("qwen3_vl")
    draws = SamplingParams(max_new_tokens=6, temperature=0.0, logit_bias={IMAGE: 100.0})
    [alone] = answers(Engine(model, ENGINE), [[1, 2, 3]], draws)
    assert set(alone[0]) == {IMAGE}
    engine = Engine(model, replace(ENGINE, chunked_prefill_size=4))
    [id] = engine.add([1, 2, 3], draws)
    engine.step()
    engine.step()
    engine.add(ImagePrompts(model).prompt((8, 8)), SAMPLED)
    found = []
    while engine.has_work:
        found += engine.step()
    assert [(c.token_ids, c.logprobs) for c in found if c.id == id] == [alone]


def refused(engine: Engine, match: str, prompt: Any = None, **changes: Any) -> None:
    given = {**(prompt or prompts_of(engine.model.module)[0]), **changes}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ValueError, match=match):
        engine.generate([given], {"max_new_tokens": 1})


def test_prompts_that_do_not_fit_are_refused_by_name():
    engine = Engine(make("qwen3_vl"), ENGINE)
    [prompt, *_] = prompts_of(engine.model.module)
    ids, grid, pixels = prompt["input_ids"], prompt["image_grid_thw"], prompt["pixel_values"]
    refused(
        engine,
        r"14 tokens of images \(id 250\) for 2 images, which have \[6, 8\]|13 tokens",
        input_ids=ids[:, :-1][:, 2:],
    )
    refused(engine, "does not fit pixel_values", image_grid_thw=grid[:1])
    refused(engine, "does not fit pixel_values", pixel_values=pixels[:-1])
    refused(engine, "not pixel_values_videos: videos and audio are not supported", pixel_values_videos=pixels)
    refused(engine, "has padding: leave it out", attention_mask=torch.zeros_like(ids))
    refused(engine, r"must be \[P\] or \[1, P\], not \[2,", input_ids=torch.cat([ids, ids]))
    refused(engine, "pixel_values must be a tensor, or numbers", pixel_values="cat.png")
    says = "this image's tensors are refused (.*): the encoder of Qwen3VLForConditionalGeneration fails on them: "
    refused(engine, says, pixel_values=pixels[:, :-1])
    with pytest.raises(ValueError, match=r"placeholders of image input.*pass images as their processor gives them"):
        engine.generate([ids[0].tolist()], {"max_new_tokens": 1})
    assert engine.num_running == 0 and not engine.has_work


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ([[1, 4, 6], [1, 2**26, 2**38]], "does not fit pixel_values"),  # their products are 0 in an int64
        ([[1, 4, 6], [2**40, 2**12, 2**12]], "does not fit pixel_values"),
        ([[1, 4, 14], [1, -4, 0]], "does not fit pixel_values"),
        ([[1, 4, 16], [1, -2, 4]], "does not fit pixel_values"),
        ([[1, 4, 6], [1, 1, 32]], "multiples of 2"),
        ([[1.0, 4.0, 6.0], [1.0, 4.0, 8.0]], "whole numbers, not torch.float32"),
        ([[True, True, True]], "whole numbers, not torch.bool"),
        ([], "whole numbers|does not fit"),
    ],
)
def test_a_grid_that_is_none_of_the_pixels_is_refused_before_the_encoder_runs(grid, says):
    """An encoder takes memory by the numbers of the grid, which a request of some bytes may set."""
    model = make("qwen2_5_vl")
    ran: list[object] = []
    reader = ImageReader(model, lambda inputs: ran.append(inputs) or 6, None, lambda ids, images: None, 64)
    prompt = ImagePrompts(model).prompt((4, 6), (4, 8))
    with pytest.raises(ValueError, match=says):
        reader.read({**prompt, "image_grid_thw": torch.tensor(grid)})
    with pytest.raises(ValueError, match="pixel_values has no image"):
        reader.read({**prompt, "pixel_values": torch.tensor(1.0)})
    assert not ran


def test_a_module_that_takes_images_otherwise_than_the_engine_sees_is_refused(monkeypatch):
    model = make("llava")
    engine = Engine(model, ENGINE)
    forward = type(model.model).forward

    def twice(self: Any, *args: Any, **named: Any) -> Any:
        if named.get("pixel_values") is not None:
            named["pixel_values"] = named["pixel_values"] * 2
        return forward(self, *args, **named)

    monkeypatch.setattr(type(model.model), "forward", twice)
    refused(engine, "LlavaForConditionalGeneration cannot run with images: .* gives other log-probabilities")


def test_positions_that_depend_on_the_other_prompts_of_a_batch_are_refused(monkeypatch):
    model = make("qwen3_vl")
    own = type(model.model).get_rope_index

    @functools.wraps(own)
    def counting(self: Any, *args: Any, **named: Any) -> Any:
        positions, offsets = own(self, *args, **named)
        return positions + torch.arange(positions.shape[1])[:, None], offsets

    monkeypatch.setattr(type(model.model), "get_rope_index", counting)
    refused(Engine(model, ENGINE), "other positions where it is the second of a batch")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hit_that_leaves_the_last_token_of_an_image_alone_leaves_it_its_features(name):
    engine = Engine(make(name), ENGINE)
    prompt = ImagePrompts(engine.model.module).prompt((4, 4), words=([],))
    ids = prompt["input_ids"][0].tolist()
    ids = ids[: len(ids) - ids[::-1].index(IMAGE)]  # it ends with the image, ...
    ids = [*range(1, 1 + (1 - len(ids)) % 16), *ids]  # ... one token behind a block of KV
    prompt = {"input_ids": torch.tensor([ids]), **image_tensors(prompt)}
    params = SamplingParams(max_new_tokens=8, sampling_seed=5, logit_bias={IMAGE: -float("inf")})
    [first] = engine.generate([prompt], params)
    [again] = engine.generate([prompt], params)
    assert again.num_cached_tokens == first.num_prompt_tokens - 1
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    assert list(again.logprobs) == trained_logprobs(engine, [prompt], [again])[0]


def test_sizes_of_images_are_told_apart_by_short_keys():
    grid, mask = torch.tensor([[1, 4, 6]]), torch.ones(1, 5, 64, 64, dtype=torch.bool)
    noise = [torch.randn(24, 8, dtype=torch.float32) for _ in range(2)]
    keys = [sizes_digest({"pixel_values": one, "image_grid_thw": grid, "pixel_attention_mask": mask}) for one in noise]
    assert keys[0] == keys[1] and len(keys[0]) == 64  # of a mask of 20,480 numbers
    padded = mask.clone()
    padded[0, 4, :, 60:] = False
    others = [
        {"image_grid_thw": grid.flip(1), "pixel_attention_mask": mask},
        {"image_grid_thw": grid, "pixel_attention_mask": padded},
        {"image_grid_thw": grid, "pixel_attention_mask": mask.transpose(2, 3)[:, :4]},
    ]
    assert len({keys[0], *(sizes_digest({"pixel_values": noise[0], **one}) for one in others)}) == 4


def test_a_text_model_takes_no_images(make_model):
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="16 blocks"))
    with pytest.raises(ValueError, match="pass the lists in input_ids, without padding"):
        engine.generate([{"input_ids": [[1, 2]], "pixel_values": torch.zeros(1, 3, 8, 8)}], {"max_new_tokens": 1})


def test_steps_that_begin_ahead_have_the_positions_behind_images():
    model = make("qwen3_vl")
    prompts = prompts_of(model)
    expected = answers(Engine(model, ENGINE), prompts)
    engine = Engine(model, replace(ENGINE, overlap=True, speculation="off", cuda_graph_batch_sizes=[1, 2, 3, 4]))
    assert answers(engine, prompts) == expected
    assert engine.parts.runner.num_begun > 4
    engine.close()


def test_a_commit_under_way_draws_answers_over_images_again():
    service = RolloutService(Engine(make("qwen3_vl"), ENGINE))
    engine, model = service.engine, service.engine.model.module
    prompts = prompts_of(model)
    service.commit_in_place("0", source=model.named_parameters())
    for prompt in prompts:
        engine.add(prompt, SAMPLED)
    found = [completion for _ in range(6) for completion in engine.step()]
    assert engine.num_running
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    service.commit_in_place("1", source=model.named_parameters(), in_flight="verify")
    while engine.has_work:
        found += engine.step()
    fresh = {c.prompt_ids: (c.token_ids, c.logprobs) for c in engine.generate(prompts, SAMPLED)}
    of_new = [c for c in found if c.weight_version == "1"]
    assert len(of_new) >= 2
    assert all((c.token_ids, c.logprobs) == fresh[c.prompt_ids] for c in of_new)
    service.close()
