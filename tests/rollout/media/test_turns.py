"""Turns of a conversation with images: a next turn takes the KV of the turns before it, and only of equal images."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.integration.kv_events.subscriber import CacheMirror
from lockstep.integration.kv_events.wire import decode_batch, encode_batch
from lockstep.integration.service import RolloutService
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.kv.events import BlockStored, EventBatch
from lockstep.rollout.media.reader import image_tensors, image_token
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import random_model
from lockstep.tests.families.images import _with_small_images
from lockstep.tests.rollout.media.image_prompts import ImagePrompts, trained_logprobs
from lockstep.tests.rollout.model.test_vision_language import make as make_causal

BLOCK = 16
ENGINE = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=13)
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "llava", "gemma3", "qwen3_5"]
Prompt = dict[str, Tensor]


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_causal(name, dtype) if name != "qwen3_5" else random_model("vision", name, dtype, _with_small_images)


class Talk:
    """The prompts of a conversation, in which each message has images."""

    def __init__(self, engine: Engine, seed: int = 3) -> None:
        self.engine, self.images = engine, ImagePrompts(engine.model.module, seed)
        self.draws = SamplingParams(
            max_new_tokens=8, sampling_seed=5, logit_bias={image_token(engine.model.module): -float("inf")}
        )

    def message(self, *sizes: tuple[int, int], words: list[int]) -> Prompt:
        """Return a message of these words, with an image of each size before them."""
        made = self.images.prompt(*sizes, words=[*[[] for _ in sizes[1:]], words])
        return {"input_ids": made["input_ids"], **image_tensors(made)}

    def asked(self, prompt: Prompt, **options: Any) -> Completion:
        [answer] = self.engine.generate([prompt], replace(self.draws, **options))
        return answer


def joined(prompt: Prompt, answer: tuple[int, ...], message: Prompt) -> Prompt:
    """Return the prompt of the next turn: one more message behind an answer."""
    ids = torch.cat([prompt["input_ids"], torch.tensor([answer], dtype=torch.int64), message["input_ids"]], dim=1)
    return {"input_ids": ids} | {name: torch.cat([prompt[name], message[name]]) for name in image_tensors(prompt)}


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


def assert_trained(engine: Engine, prompt: Prompt, answer: Completion) -> None:
    assert list(answer.logprobs) == trained_logprobs(engine, [prompt], [answer])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_next_turn_with_one_more_image_takes_the_kv_of_the_turns_before(name, dtype):
    engine = Engine(make(name, dtype), ENGINE)
    talk = Talk(engine)
    encoded = watch_encoder(engine)
    prompt = talk.message((4, 6), words=list(range(20, 60)))
    answer = talk.asked(prompt)
    for number, words in enumerate(([3, 4, 5], list(range(60, 90)), [9])):
        known = answer.num_prompt_tokens + len(answer.token_ids)
        prompt = joined(prompt, answer.token_ids, talk.message((4, 4), words=words))
        encoded.clear()
        answer = talk.asked(prompt)
        assert answer.num_cached_tokens == full_blocks(known - 1) > 0, "the turns before, but for what fills no block"
        assert set(encoded) == {number + 1}, "the KV covers the images before"
        assert_trained(engine, prompt, answer)
    alone = Engine(make(name, dtype), replace(ENGINE, prefix_cache=False))
    [expected] = alone.generate([prompt], talk.draws)
    assert (expected.token_ids, expected.logprobs) == (answer.token_ids, answer.logprobs)
    engine.parts.ledger.check()


def watch_encoder(engine: Engine) -> list[int]:
    """Return a list that gets the number of each image that the encoder runs for a step."""
    found: list[int] = []
    encoder = engine.model.images
    assert encoder is not None
    own = encoder.keywords

    def watched(images: Any, token_ids: Tensor) -> dict[str, object]:
        found.extend(part.index for part in images.parts)
        return own(images, token_ids)

    encoder.keywords = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_tokens_with_another_image_share_the_kv_before_it_and_none_behind(name):
    engine = Engine(make(name), replace(ENGINE, state_snapshots=16 if name == "qwen3_5" else None))
    talk = Talk(engine)
    sizes, words = ((4, 8), (4, 4), (8, 4)), (list(range(20, 50)), list(range(50, 73)), [3, 4, 5])
    messages = [talk.message(size, words=said) for size, said in zip(sizes, words, strict=True)]
    others = [talk.message(size, words=said) for size, said in zip(sizes, words, strict=True)]
    whole = functools.reduce(then, messages)
    first = talk.asked(whole)
    for differing in (2, 1, 0):
        prompt = functools.reduce(then, [*messages[:differing], others[differing], *messages[differing + 1 :]])
        assert torch.equal(prompt["input_ids"], whole["input_ids"])
        answer = talk.asked(prompt)
        shared = full_blocks(sum(message["input_ids"].shape[1] for message in messages[:differing]))
        assert answer.num_cached_tokens == (0 if name == "qwen3_5" else shared), "no snapshot stands where they part"
        assert answer.logprobs != first.logprobs or name == "gemma3", "whose window has passed the first images"
        assert_trained(engine, prompt, answer)
        unknown = talk.message(sizes[differing], words=words[differing])
        tree = engine.cache_tree(prompt=functools.reduce(then, [*messages[:differing], unknown]))
        assert tree.divergence is not None
        assert tree.divergence.num_matched == shared // BLOCK and tree.divergence.differs_in_images
        assert "but for its images" in tree.text()
    again = talk.asked(whole)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    assert again.num_cached_tokens == full_blocks(first.num_prompt_tokens - 1)
    engine.parts.ledger.check()


def then(prompt: Prompt, message: Prompt) -> Prompt:
    return joined(prompt, (), message)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_a_prompt_of_text_shares_the_kv_of_the_text_before_an_image(name):
    engine = Engine(make(name), ENGINE)
    talk = Talk(engine)
    text = {"input_ids": torch.tensor([list(range(20, 60))])}
    message = talk.message((4, 4), words=[3, 4])
    talk.asked(message)  # the check of the first images installs hooks of transformers in LLaVA, which drops cached KV
    prompt = {**message, "input_ids": torch.cat([text["input_ids"], message["input_ids"]], dim=1)}
    plain = talk.asked(text["input_ids"][0].tolist())
    seen = talk.asked(prompt)
    assert seen.num_cached_tokens == 32
    assert_trained(engine, prompt, seen)
    again = talk.asked([*range(20, 60), *plain.token_ids, 7])
    assert again.num_cached_tokens == 32
    alone = Engine(make(name), replace(ENGINE, prefix_cache=False))
    [expected] = alone.generate([[*range(20, 60), *plain.token_ids, 7]], talk.draws)
    assert (again.token_ids, again.logprobs) == (expected.token_ids, expected.logprobs)


def test_an_image_beside_the_last_one_changes_what_its_tokens_see_and_shares_nothing():
    """In Gemma 3 tokens of images side by side see each other, so the first one's KV depends on the second."""
    engine = Engine(make("gemma3"), replace(ENGINE, chunked_prefill_size=64))
    talk = Talk(engine)
    first = talk.message((4, 4), words=[])
    prompt = {**first, "input_ids": torch.cat([torch.tensor([list(range(20, 50))]), first["input_ids"]], dim=1)}
    talk.asked(prompt)
    both = then(prompt, talk.message((4, 4), words=[5, 6, 7]))
    answer = talk.asked(both)
    assert answer.num_cached_tokens == 16, "the block that the first image begins in is another"
    assert_trained(engine, both, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_a_next_turn_fork_from_the_turns_before_also_where_they_are_retracted(name):
    model = make(name)
    engine = Engine(model, replace(ENGINE, kv_cache="24 blocks", max_num_seqs=8))
    talk = Talk(engine)
    prompt = talk.message((4, 6), words=list(range(20, 60)))
    answer = talk.asked(prompt)
    prompt = joined(prompt, answer.token_ids, talk.message((4, 4), words=[5, 6, 7]))
    draws = replace(talk.draws, n=6, max_new_tokens=24)
    group = engine.generate([prompt], draws)
    assert all(one.num_cached_tokens >= 48 for one in group)
    assert [list(one.logprobs) for one in group] == [trained_logprobs(engine, [prompt], [one])[0] for one in group]
    expected = sorted((one.index, one.token_ids, one.logprobs) for one in group)
    engine.add(prompt, draws)
    found, num_steps = [], 0
    while engine.has_work:
        found += engine.step()
        num_steps += 1
        if num_steps % 5 == 0:
            engine.pause_generation("retract")
            engine.continue_generation()
    assert sorted((one.index, one.token_ids, one.logprobs) for one in found) == expected
    assert any(one.num_retractions for one in found)
    engine.parts.ledger.check()


def test_a_pinned_turn_outlasts_a_flood_and_its_next_turn_runs_no_earlier_image():
    engine = Engine(make("qwen2_5_vl"), replace(ENGINE, kv_cache="16 blocks"))
    talk = Talk(engine)
    prompt = talk.message((4, 6), words=list(range(20, 60)))
    answer = talk.asked(prompt)
    known = joined(prompt, answer.token_ids, {**prompt, "input_ids": torch.zeros(1, 0, dtype=torch.int64)})
    known = {name: tensor[: len(prompt[name])] for name, tensor in known.items()}
    report = engine.pin_prefix(known, "me")
    assert (report.num_pinned, report.num_unknown) == (3, 0)
    assert engine.pin_prefix(known["input_ids"][0].tolist(), "me").num_pinned == 0, "without its images none is its"
    for number in range(4):
        engine.generate([[number + 1] * 150], {"max_new_tokens": 1})
    encoded = watch_encoder(engine)
    later = joined(prompt, answer.token_ids, talk.message((4, 4), words=[5, 6]))
    second = talk.asked(later)
    assert second.num_cached_tokens == 48 and set(encoded) == {1}
    assert_trained(engine, later, second)


def test_events_name_the_images_of_blocks_and_a_mirror_follows_them():
    engine = Engine(make("qwen3_vl"), ENGINE)
    batches: list[EventBatch] = []
    engine.kv_events.attach(batches.append)
    mirror = CacheMirror(seq=engine.kv_events.last_seq("kv"))
    talk = Talk(engine)
    prompt = talk.message((4, 8), words=list(range(20, 50)))
    answer = talk.asked(prompt)
    talk.asked(joined(prompt, answer.token_ids, talk.message((8, 8), words=[5, 6])))
    stored = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    keys = [bool(key) for event in stored for key in event.image_keys or ("",) * len(event.block_hashes)]
    assert keys == [True, False, False, True], "of a block with an image, two of text, and one with the next image"
    for batch in batches:
        mirror.apply(decode_batch("kv", batch.seq, encode_batch(batch)))
    assert mirror.blocks == CacheMirror.from_snapshot(engine.cache_tree().as_dict()).blocks


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5"])
def test_answers_of_next_turns_are_renewed_and_proven_with_their_images(name):
    service = RolloutService(Engine(make(name), replace(ENGINE, receipts="tokens")))
    engine = service.engine
    service.commit_in_place("1", source=engine.model.module.named_parameters())
    talk = Talk(engine)
    prompt = talk.message((4, 6), words=list(range(20, 60)))
    first = talk.asked(prompt)
    later = joined(prompt, first.token_ids, talk.message((4, 4), words=[5, 6]))
    second = talk.asked(later)
    assert second.num_cached_tokens and second.receipt is not None
    [again] = engine.renew([second])
    assert (again.token_ids, again.logprobs) == (second.token_ids, second.logprobs)
    verdicts = service.replay([first.receipt, second.receipt], prompts=[prompt, later]).verdicts
    assert [one.status for one in verdicts] == ["equal", "equal"]
    service.close()
