"""Images whose tokens see each other both ways (Gemma 3): each is prefilled in one chunk, with the trainer's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.encoders.both_ways import BothWays
from lockstep.rollout.model.operations.carried import PACKING, carrying
from lockstep.rollout.model.operations.packed_rows import ends_of_blocks, hosted_mask
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import random_model
from lockstep.tests.families.images import _prompt, _with_small_images
from lockstep.tests.rollout.media.image_prompts import (
    IMAGE,
    ImagePrompts,
    as_trained,
    assert_pauses_change_nothing,
    trained_logprobs,
)
from lockstep.tests.rollout.model.test_vision_language import CLIP, CONFIGS, TEXT
from lockstep.tests.rollout.test_out_of_memory import ShortOfMemory, short

ENGINE = EngineConfig(kv_cache="32 blocks", max_num_seqs=4, chunked_prefill_size=80)
SAMPLED = SamplingParams(max_new_tokens=8, sampling_seed=5)
NUM = 36  # tokens of an image, more than the window of the local layers and than two blocks of KV
WINDOW = 12


def make(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(1)
    text = {**TEXT, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = transformers.Gemma3Config(
        text_config={**text, "sliding_window": WINDOW, "query_pre_attn_scalar": 32},
        vision_config={**CLIP, "image_size": 24},
        mm_tokens_per_image=NUM,
        image_token_index=IMAGE,
        boi_token_index=252,
        eoi_token_index=253,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in path else parameter.shape[-1] ** -0.5)
        model.model.language_model.norm.weight.fill_(-0.9)  # else one token has all of the probability
    return model


def prompts_of(model: PreTrainedModel) -> list[Any]:
    """Return prompts with images at the begin, behind text, side by side, and none."""
    make_one = ImagePrompts(model)
    side_by_side = make_one.prompt((4, 4), (4, 4), words=([], [7, 8, 9]))
    behind = make_one.prompt((4, 4), words=([5, 6],))
    before = torch.tensor([[11, 12, 13, 14, 15]])
    behind["input_ids"] = torch.cat([before, behind["input_ids"]], dim=1)
    behind["token_type_ids"] = (behind["input_ids"] == IMAGE).long()
    del behind["attention_mask"]
    return [make_one.prompt((4, 4), (4, 4)), behind, list(range(1, 30)), side_by_side]


def answers(engine: Engine, prompts: list[Any], params: Any = SAMPLED, **options: Any) -> list[tuple[Any, Any]]:
    return [(c.token_ids, c.logprobs) for c in engine.generate(prompts, params, **options)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_trainers_and_rows_of_an_image_see_its_end(dtype: torch.dtype) -> None:
    engine = Engine(make(dtype), ENGINE)
    prompts = prompts_of(engine.model.module)
    completions = engine.generate(prompts, SAMPLED)
    reported = [list(c.logprobs) for c in completions]
    assert reported == [trained_logprobs(engine, [p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert reported == trained_logprobs(engine, prompts, completions, grad=True)
    given, sequences = as_trained(engine.model.module, prompts, completions)
    own = engine.model.module(**given, use_cache=False).logits  # of transformers' attention, with its masks
    causal = engine.model.module(**{**given, "token_type_ids": None}, use_cache=False).logits
    tolerance = 2e-4 if dtype is torch.float32 else 0.2
    for row, (completion, sequence) in enumerate(zip(completions, sequences, strict=True)):
        rows = slice(completion.num_prompt_tokens - 1, len(sequence) - 1)
        ids, found = torch.tensor(completion.token_ids), torch.tensor(completion.logprobs)
        expected = selected_logprobs(own[row, rows], ids, 1.0)
        assert (expected - found).abs().max() < tolerance
        if row != 2 and dtype is torch.float32:
            assert (selected_logprobs(causal[row, rows], ids, 1.0) - found).abs().max() > 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 72, "max_num_batched_tokens": 73},
        {"chunked_prefill_size": 512},
        {"overlap": True},
        {"speculation": "off", "prefix_cache": False, "block_size": 48},
        {"kv_cache": "8 blocks"},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_they_are_computed(settings: dict[str, Any]) -> None:
    model = make()
    prompts = prompts_of(model)
    engine = Engine(model, ENGINE)
    expected = answers(engine, prompts)
    engine.close()
    other = Engine(model, replace(ENGINE, **settings))
    assert answers(other, prompts) == expected
    assert answers(other, prompts[::-1]) == expected[::-1]  # with what is cached
    other.close()


def test_no_chunk_ends_within_an_image_and_one_exceeds_a_step_that_decodes() -> None:
    model = make()
    prompts = prompts_of(model)
    expected = answers(Engine(model, ENGINE), prompts)
    engine = Engine(model, replace(ENGINE, chunked_prefill_size=72, max_num_batched_tokens=72))
    blocks: dict[str, tuple[tuple[int, int], ...]] = {}
    chunks: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
    scheduler = engine.parts.scheduler
    schedule = scheduler.schedule

    def watched() -> Any:
        output = schedule()
        for item in output.scheduled:
            request = engine.parts.sequences.request(item.id)
            if (images := request.images) is not None:
                blocks[request.base_id] = tuple(images.blocks)
                chunks.append((item.start, item.start + item.num_tokens, tuple(images.blocks)))
        return output

    scheduler.schedule = watched  # type: ignore[method-assign]
    assert answers(engine, prompts) == expected
    assert sorted(blocks.values()) == [((0, 36), (41, 77)), ((0, 72),), ((5, 41),)]
    assert all(not begin < end < last for _, end, its in chunks for begin, last in its)


def test_a_hit_may_end_within_an_image_and_equal_images_in_other_places_share_nothing() -> None:
    engine = Engine(make(), replace(ENGINE, kv_cache="64 blocks", max_num_seqs=8))
    make_one = ImagePrompts(engine.model.module)
    apart = make_one.prompt((4, 4), (4, 4), words=([], [7, 8, 9]))
    between = {**apart, "input_ids": torch.tensor([[*[IMAGE] * NUM, 3, *[IMAGE] * NUM, 7, 8, 9]])}
    between["token_type_ids"] = (between["input_ids"] == IMAGE).long()
    del between["attention_mask"]
    expected = [answers(Engine(make(), ENGINE), [p]) for p in (apart, between)]
    assert answers(engine, [apart]) == expected[0]
    [other] = engine.generate([between], SAMPLED)
    assert other.num_cached_tokens == 0 and [(other.token_ids, other.logprobs)] == expected[1]
    # Log-probabilities of the prompt from token 20 on need the rows from 19 on: the hit ends in the images, at 16.
    options = RequestOptions(logprob_start_len=20)
    [again] = engine.generate([apart], SAMPLED, options=options)
    assert again.num_cached_tokens == 16 and [(again.token_ids, again.logprobs)] == expected[0]
    fresh = Engine(make(), ENGINE).generate([apart], SAMPLED, options=options)[0]
    assert again.prompt_logprobs == fresh.prompt_logprobs
    group = engine.generate([apart], replace(SAMPLED, n=4))
    assert [list(c.logprobs) for c in group] == [trained_logprobs(engine, [apart], [c])[0] for c in group]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(mode: str) -> None:
    engine = Engine(make(), ENGINE)
    assert_pauses_change_nothing(engine, prompts_of(engine.model.module), SAMPLED, mode)


def test_packed_rows_have_the_logprobs_of_the_rollout() -> None:
    engine = Engine(make(), ENGINE)
    model = engine.model.module
    prompts = [prompt for prompt in prompts_of(model) if isinstance(prompt, dict)][::-1]
    completions = engine.generate(prompts, SAMPLED)
    sequences = [torch.tensor([*c.prompt_ids, *c.token_ids]) for c in completions]
    lengths = [len(sequence) for sequence in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.cat(sequences)[None]
    given = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    given |= {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.cat([prompt["pixel_values"] for prompt in prompts]),
    }
    with engine.model.training_numerics(), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **given).logits[0]
        for row, completion in zip(logits.split(lengths), completions, strict=True):
            own = row[completion.num_prompt_tokens - 1 : -1]
            assert selected_logprobs(own, torch.tensor(completion.token_ids), 1.0).tolist() == list(completion.logprobs)
        without = {name: value for name, value in given.items() if "_len" not in name}
        with pytest.raises(ValueError, match="pass cu_seq_lens_q to say where sequences begin"):
            model(input_ids=ids, use_cache=False, **without)


def test_gradients_are_those_of_transformers_own_operations() -> None:
    own, mine = make(), make()
    engine = Engine(mine, ENGINE)
    prompt = prompts_of(own)[0]
    losses = []
    for model in (own, mine):
        model.train()
        if model is own:
            loss = model(**prompt, use_cache=False, labels=prompt["input_ids"]).loss
        else:
            with engine.model.training_numerics():
                loss = model(**prompt, use_cache=False, labels=prompt["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (path, one), (_, other) in zip(own.named_parameters(), mine.named_parameters(), strict=True):
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5), path


def test_an_image_that_fills_no_chunk_is_refused_with_the_settings_to_raise() -> None:
    engine = Engine(make(), replace(ENGINE, chunked_prefill_size=71))
    *_, side_by_side = prompts_of(engine.model.module)
    with pytest.raises(
        ValueError, match=r"72 tokens of images see each other .* at most 71 rows.*chunked_prefill_size"
    ):
        engine.generate([side_by_side], {"max_new_tokens": 1})
    assert not engine.has_work


@pytest.mark.parametrize("most", [40, 30])
def test_an_image_that_finds_memory_with_fewer_rows_beside_it_runs_and_one_that_finds_none_ends(most: int) -> None:
    model = make()
    prompts = prompts_of(model)[:3]  # images of 36 tokens
    expected = answers(Engine(model, ENGINE), prompts)
    engine = Engine(model, replace(ENGINE, max_num_batched_tokens=128), make_runner=short(ShortOfMemory, most))
    engine.start()
    with engine.model.rollout_phase():
        done = engine.generate(prompts, SAMPLED)
    fits = [most >= NUM, most >= NUM, True]
    reasons = [c.finish_reason for c in done]
    assert [reason is not None and reason.type != "abort" for reason in reasons] == fits
    assert [(c.token_ids, c.logprobs) for c, one in zip(done, fits, strict=True) if one] == [
        answer for answer, one in zip(expected, fits, strict=True) if one
    ]
    messages = [reason.message for reason in reasons if reason is not None and reason.type == "abort"]
    assert all(message is not None and "alone found none" in message for message in messages)
    engine.check_integrity()
    engine.close()


def test_blocks_that_are_not_of_tokens_side_by_side_are_refused() -> None:
    ids = torch.tensor([[0, 0, -1, 0, 1, 1]])
    starts = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="tokens of several images attend to each other in both directions"):
        ends_of_blocks(ids[:, None, None], starts, None)
    apart = torch.tensor([0, 3, 6], dtype=torch.int32)  # of two sequences
    assert ends_of_blocks(ids[:, None, None].clone(), apart, None).tolist() == [2, 2, 3, 1, 3, 3]
    assert ends_of_blocks(ids[:, None, None].clone(), apart, torch.tensor([3, 9])).tolist() == [2, 2, 3, 7, 9, 9]


@pytest.mark.filterwarnings("error::FutureWarning")
def test_masks_are_asked_for_without_names_that_transformers_gives_up() -> None:
    model = make()
    engine, ways = Engine(model, ENGINE), BothWays.of(model)
    with engine.model.rollout_phase():
        assert ways is not None and ways.inside == 1
        assert ways.blocks(torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1]])) == [(1, 4), (6, 8)]


def test_a_block_longer_than_the_window_beside_it_is_refused() -> None:
    from transformers.masking_utils import blockwise_overlay, or_masks, sliding_window_causal_mask_function

    for length, fits in ((4, True), (5, False)):
        ids = torch.full((1, 9), -1)
        ids[0, 2 : 2 + length] = 0
        function = or_masks(sliding_window_causal_mask_function(4), blockwise_overlay(ids))
        given = {"mask_function": function, "local_size": 4, "allow_is_causal_skip": False}
        if fits:
            assert hosted_mask(**given).flatten().tolist() == ids[0].tolist()
        else:
            with pytest.raises(ValueError, match="images of more tokens than the window of 4"):
                hosted_mask(**given)


def test_images_of_two_sequences_side_by_side_are_not_taken_for_a_long_one() -> None:
    from transformers.masking_utils import blockwise_overlay, or_masks, sliding_window_causal_mask_function

    ids = torch.zeros(1, 6)
    function = or_masks(sliding_window_causal_mask_function(4), blockwise_overlay(ids))
    given = {"mask_function": function, "local_size": 4, "allow_is_causal_skip": False}
    with carrying({PACKING: torch.tensor([0, 3, 6])}):
        assert hosted_mask(**given).flatten().tolist() == [0] * 6
    with carrying({PACKING: torch.tensor([0, 1, 6])}), pytest.raises(ValueError, match="the window of 4"):
        hosted_mask(**given)

    model = random_model("vision", "gemma4_unified", torch.float32, _with_small_images)  # windows of 70 tokens
    chunks = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=64, max_num_batched_tokens=512)
    engine = Engine(model, chunks)
    prompts = [_prompt(engine, [(8, 8)]) for _ in range(2)]
    for words, prompt in zip(([3], [3, 4]), prompts, strict=True):  # in the second step each runs its image
        tokens = prompt["input_ids"][prompt["input_ids"] == model.config.image_token_id].tolist()
        assert len(tokens) == 64
        prompt["input_ids"] = torch.tensor([[*words, *tokens]])
    alone = [answers(engine, [prompt])[0] for prompt in prompts]
    engine.flush_cache()
    assert answers(engine, prompts) == alone


def test_a_prompt_may_be_one_image_alone() -> None:
    engine = Engine(make(), ENGINE)
    prompt = {
        "input_ids": torch.full((1, NUM), IMAGE),
        "pixel_values": prompts_of(engine.model.module)[1]["pixel_values"],
    }
    prompt["token_type_ids"] = torch.ones(1, NUM, dtype=torch.int64)
    [answer] = engine.generate([prompt], SAMPLED)
    assert [list(answer.logprobs)] == trained_logprobs(engine, [prompt], [answer])


def test_text_with_types_of_tokens_is_causal() -> None:
    engine = Engine(make(), ENGINE)
    ids = torch.tensor([[4, 5, 6, 7]])
    with engine.model.training_numerics(), torch.no_grad():
        plain, typed = (engine.model.module(ids, use_cache=False, token_type_ids=t).logits for t in (None, ids * 0))
    assert torch.equal(plain, typed)
    assert CONFIGS["gemma3"]().image_token_index == IMAGE
