"""Answers to prompts with images are renewed under other weights, run ahead, and are proven by their receipts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from lockstep.integration.service import RolloutService
from lockstep.rollout.ahead.rollouts import RolloutsAhead
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import sealed
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.rollout.media.image_prompts import IMAGE, ImagePrompts
from lockstep.tests.rollout.model.test_vision_language import ENGINE, make

SAMPLED = SamplingParams(n=2, max_new_tokens=8, sampling_seed=5)
GIVEN = RequestOptions(return_receipt=True)


@pytest.fixture(autouse=True)
def _modules_that_take_features_of_images() -> None:
    needs_transformers(5, 23)


def make_service(name: str = "qwen3_vl") -> RolloutService:
    service = RolloutService(Engine(make(name), ENGINE))
    service.name_weights()
    return service


def prompts_of(service: RolloutService) -> list[Any]:
    make_one = ImagePrompts(service.engine.model.module)
    return [make_one.prompt((4, 6), (8, 4)), [1, 2, 3, 4], make_one.prompt((4, 4))]


def other_weights(service: RolloutService) -> None:
    """Commit weights of which the encoder of images is another one."""
    module = service.engine.model.module
    with service.optimizer_step(), torch.no_grad():
        for path, parameter in module.named_parameters():
            if "vis" in path:
                parameter.mul_(1.5)
    service.commit_in_place("2", source=module.named_parameters(), in_flight="verify")


def drawn(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.logprobs) for c in completions]


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_an_answer_is_renewed_with_the_images_of_its_prompt(name):
    service = make_service(name)
    prompts = prompts_of(service)
    before = service.engine.generate(prompts, SAMPLED)
    assert drawn(service.engine.renew(before)) == drawn(before)
    other_weights(service)
    expected = service.engine.generate(prompts, SAMPLED)
    assert drawn(service.engine.renew(before)) == drawn(expected) != drawn(before)


def test_batches_that_run_ahead_are_those_of_the_weights_of_their_turn():
    service = make_service()
    prompts = prompts_of(service)
    ahead = RolloutsAhead(service.engine)
    params = [replace(SAMPLED, sampling_seed=seed) for seed in range(3)]
    with service.rollout():
        ahead.begin(0, prompts, params)
        ahead.begin(1, prompts, params[::-1])
        first = ahead.finish(0)
    assert ahead._batches[1][0].begun_in is not None
    other_weights(service)
    with service.rollout():
        second = ahead.finish(1)
        assert drawn(second) == drawn(service.engine.generate(prompts, params[::-1])) != drawn(first)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_samples_are_proven_with_the_images_of_their_prompts(name):
    service = make_service(name)
    prompts = prompts_of(service)
    params = replace(SAMPLED, logit_bias={IMAGE: float("-inf")})
    receipts = [one.receipt for one in service.engine.generate(prompts, params, options=GIVEN)]
    assert [("images" in receipt) for receipt in receipts] == [True, True, False, False, True, True]
    with_images = [prompt for prompt in prompts if isinstance(prompt, dict)]
    report = service.replay(receipts, prompts=with_images)
    assert [verdict.status for verdict in report.verdicts] == ["equal"] * 6, report.lines()
    report = service.replay(receipts, prompts=with_images[:1])
    assert [verdict.status for verdict in report.verdicts] == ["equal"] * 4 + ["unproven"] * 2
    assert f"images of SHA-256 {receipts[-1]['images']}, which are not at hand" in report.verdicts[-1].what


def test_other_images_are_found_although_the_hash_was_made_anew():
    service = make_service()
    make_one = ImagePrompts(service.engine.model.module)
    prompts = [make_one.prompt((4, 6)), make_one.prompt((4, 6))]
    one, other = service.engine.generate(prompts, replace(SAMPLED, n=1), options=GIVEN)
    assert one.receipt["prompt"] == other.receipt["prompt"] and one.receipt["images"] != other.receipt["images"]
    values = {name: value for name, value in one.receipt.items() if name not in ("format", "sha256")}
    changed = sealed({**values, "images": other.receipt["images"]})
    stripped = sealed({name: value for name, value in values.items() if name != "images"})
    edited = {**one.receipt, "images": other.receipt["images"]}
    verdicts = service.replay([one.receipt, changed, edited, stripped], prompts=prompts).verdicts
    assert [verdict.status for verdict in verdicts] == ["equal", "differs", "differs", "unproven"]
    assert "its hash is not that of its content" in verdicts[2].what
    assert "images" in verdicts[3].what


def test_images_that_do_not_fit_the_prompt_of_a_receipt_are_named():
    service = make_service()
    [prompt, *_] = prompts_of(service)
    [answer] = service.engine.generate([prompt], replace(SAMPLED, n=1), options=GIVEN)
    values = {name: value for name, value in answer.receipt.items() if name not in ("format", "sha256")}
    short = sealed({**values, "prompt": values["prompt"][4:]})
    [verdict] = service.replay([short], prompts=[prompt]).verdicts
    assert verdict.status == "unproven" and "its prompt cannot be read with its images" in verdict.what


def test_a_receipt_with_images_is_not_proven_by_a_model_that_takes_none():
    service = make_service()
    [prompt, *_] = prompts_of(service)
    [answer] = service.engine.generate([prompt], replace(SAMPLED, n=1), options=GIVEN)
    assert answer.drawn_with.images.digest == answer.receipt["images"]
    values = {name: value for name, value in answer.receipt.items() if name not in ("format", "sha256")}
    with pytest.raises(ValueError, match="on text"):
        text_engine().renew(answer)
    other = RolloutService(text_engine())
    other.name_weights()
    span = {**values["spans"][0], "digest": other.engine.weight_digest, "version": other.engine.weight_version}
    [verdict] = other.replay([sealed({**values, "spans": [span]})], prompts=[prompt], anyway=True).verdicts
    assert verdict.status == "unproven" and "its prompt cannot be read with its images" in verdict.what


def text_engine() -> Engine:
    torch.manual_seed(0)
    config = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    }  # fmt: skip
    return Engine(transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**config)), ENGINE)
