"""Prompts with images on ranks that share the model: the bits of one rank and of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.media.reader import image_token
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.media.image_prompts import ImagePrompts, trained_logprobs
from lockstep.tests.rollout.media.test_turns import joined, make

COMMON = {"k_blocks": 2, "kv_cache": "64 blocks", "max_num_seqs": 8, "chunked_prefill_size": 13, "rank_timeout_s": 60.0}
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "llava", "gemma3"]
RunWorld = Callable[..., list[object]]


def draws(engine: Engine, **more: Any) -> SamplingParams:
    banned = {image_token(engine.model.module): -float("inf")}
    return SamplingParams(max_new_tokens=8, sampling_seed=5, logit_bias=banned, **more)


def prompts_of(model: Any) -> list[Any]:
    make_one = ImagePrompts(model)
    return [make_one.prompt((4, 6), (8, 4)), [1, 2, 3, 4], make_one.prompt((8, 8), (4, 4), (4, 8))]


def outcome(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.index, c.prompt_ids, c.token_ids, c.logprobs, c.num_cached_tokens) for c in completions]


def conversation(engine: Engine, prompts: list[Any]) -> list[Completion]:
    """Return answers to prompts as groups, and to the next turn of the first one, with one more image."""
    asked = prompts if engine.is_controller else None
    first = engine.generate(asked, draws(engine, n=2))
    later = joined(prompts[0], first[0].token_ids, ImagePrompts(engine.model.module, 9).prompt((4, 4)))
    return [*first, *engine.generate([later] if engine.is_controller else None, draws(engine))]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_two_ranks_are_those_of_one_and_the_trainers(name: str, run_world: RunWorld, tmp_path: Path) -> None:
    model = make(name)
    prompts = prompts_of(model)
    alone = Engine(model, EngineConfig(**COMMON))
    completions = conversation(alone, prompts)
    expected = outcome(completions)
    assert completions[-1].num_cached_tokens >= 16
    for one, prompt in zip(completions[:-1:2], prompts, strict=True):
        assert list(one.logprobs) == trained_logprobs(alone, [prompt], [one])[0]
    alone.close()
    model.save_pretrained(tmp_path)

    def rank(rank: int) -> object:
        found = []
        for source in (model, tmp_path):
            engine = Engine(source, EngineConfig(tp=2, **COMMON))
            answers = conversation(engine, prompts)
            found.append((outcome(answers), [one.drawn_with.images.digest for one in (answers[0], answers[-1])]))
            engine.close()
        return found

    digests = [one.drawn_with.images.digest for one in (completions[0], completions[-1])]
    for found in run_world(2, rank):
        assert found == [(expected, digests)] * 2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_commit_covers_the_encoder_and_has_the_digest_of_one_rank(name: str, run_world: RunWorld) -> None:
    def answers(**config: Any) -> object:
        model = make(name)
        service = RolloutService(Engine(model, EngineConfig(**COMMON, **config)))
        engine, prompts = service.engine, prompts_of(model)
        service.commit_in_place("0", source=model.named_parameters())
        before = outcome(engine.generate(prompts if engine.is_controller else None, draws(engine)))
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "visual" in path or "vision" in path:
                    parameter.mul_(1.25)
        service.commit_in_place("1", source=model.named_parameters())
        found = engine.generate(prompts if engine.is_controller else None, draws(engine))
        assert outcome(found) != before
        service.close()
        return before, outcome(found), {one.weight_digest for one in found}

    expected = answers()
    assert len(expected[-1]) == 1 and None not in expected[-1]
    assert run_world(2, lambda rank: answers(tp=2)) == [expected] * 2


def test_pauses_and_samples_of_one_prompt_are_those_of_one_rank(run_world: RunWorld) -> None:
    model = make("qwen2_5_vl")
    prompts = prompts_of(model)
    alone = Engine(model, EngineConfig(**COMMON))
    expected = sorted(outcome(alone.generate(prompts, draws(alone, n=3))))

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(tp=2, **COMMON))
        if not engine.is_controller:
            engine.follow()
            engine.close()
            return expected
        sent = engine.parts.runner._writer._images
        for prompt in prompts:
            engine.add(prompt, draws(engine, n=3))
        found, num_steps = [], 0
        while engine.has_work:
            found += engine.step()
            num_steps += 1
            if num_steps in (4, 9):
                engine.pause_generation("retract")
                engine.continue_generation()
        num_sent, left = sent._num_sent, len(sent._numbers)
        engine.dismiss()
        engine.close()
        assert (num_sent, left) == (2, 0), "each prompt's images once for its samples, and none are kept"
        return sorted([(*one[:4], 0) for one in outcome(found)])

    plain = sorted([(*one[:4], 0) for one in expected])
    assert run_world(2, rank)[0] == plain


def test_stages_of_a_model_of_images_are_refused_by_name(run_world: RunWorld) -> None:
    model = make("llava")

    def rank(rank: int) -> object:
        with pytest.raises(ValueError, match="a llava model of images and text is not cut into stages: pp must be 1"):
            Engine(model, EngineConfig(pp=2, **COMMON))
        return None

    assert run_world(2, rank) == [None, None]
