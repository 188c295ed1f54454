"""Micro-batches with images: a packed row has the log-probabilities of the rollout, whatever the images' sizes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.grpo.training.step_batches import Turns
from lockstep.integration.image_inputs import banned_tokens, image_keywords, joined, rotary_keywords
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import random_model
from lockstep.tests.families.images import SIZES, _prompt, _with_small_images
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.images import models

ENGINE = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=13)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _modules_that_take_features_of_images() -> None:
    needs_transformers(5, 23)


def check(engine: Engine, prompts: list[Any], orders: Any) -> None:
    """Compare packed rows of the answers to prompts, in these orders, with what the engine has reported."""
    hosted = engine.model
    params = SamplingParams(max_new_tokens=6, sampling_seed=5, logit_bias=banned_tokens(hosted.module))
    done = engine.generate(prompts, params)
    for order in orders:
        chosen = [done[index] for index in order]
        samples = [Sample(c.prompt_ids, c.token_ids, c.logprobs, 1.0, images=c.drawn_with.images) for c in chosen]
        packed = pack(samples, CPU, hosted.module)
        with hosted.training_numerics(), torch.no_grad():
            logits = packed.kept(hosted.trained_module(**packed.model_inputs()).logits)
            assert torch.equal(selected_logprobs(logits, packed.targets, 1.0), packed.logprobs), order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["internvl", "qwen3_vl", "gemma3", "llava_next"])
def test_packed_rows_have_the_logprobs_of_the_rollout(kind, dtype):
    model = random_model("vision", kind, dtype, _with_small_images)
    engine = Engine(model, ENGINE)
    prompts = [*(_prompt(engine, sizes) for sizes in SIZES), [13, 17, 90, 28]]
    check(engine, prompts, [[0, 1, 2], [2, 1, 0], [2], [1, 1]])
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_of_several_sizes_are_in_one_micro_batch(dtype):
    model = random_model("vision", "mistral3", dtype, _with_small_images)
    engine = Engine(model, ENGINE)
    first, second = (_prompt(engine, sizes) for sizes in (((8, 8),), ((4, 8),)))
    rows, columns = second["image_sizes"][0].tolist()
    alone = {**second, "pixel_values": second["pixel_values"][..., :rows, :columns]}  # as of a batch of its own
    assert alone["pixel_values"].shape != first["pixel_values"].shape
    check(engine, [first, alone], [[0, 1], [1, 0], [1]])
    engine.close()


def test_positions_do_not_depend_on_which_tokens_were_drawn():
    model, _ = models.qwen2_5_vl()
    config = model.config
    image, video, start = config.image_token_id, config.video_token_id, config.vision_start_token_id
    prompt = [5, start, *[image] * 4, config.vision_end_token_id, 9]
    drawn = ([30, 31, 32], [start, video, image])
    rows = [torch.tensor([0, 0, *prompt, *drawn[0]]), torch.tensor([*prompt, *drawn[1], 0, 0])]
    ids, grid = torch.stack(rows), torch.tensor([[1, 4, 4], [1, 4, 4]])
    mask, is_drawn = torch.ones_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    mask[0, :2] = mask[1, -2:] = 0
    is_drawn[0, -3:] = is_drawn[1, len(prompt) : -2] = True
    found = rotary_keywords(model, ids, mask, is_drawn, grid)["position_ids"]
    first, second = found.split(len(prompt) + 3, dim=2)
    assert found.shape == (3, 1, 22) and torch.equal(first, second)
    assert first[:, 0, -4:].tolist() == [[5, 6, 7, 8]] * 3  # behind 5, the start, two rows and two columns, the end


def test_tensors_are_padded_behind():
    found = joined([torch.ones(1, 2, 3), torch.ones(2, 3, 1)])
    assert found.shape == (3, 3, 3) and found.sum() == 12 and found[0, 2:].sum() == found[1:, :, 1:].sum() == 0


def test_tensors_that_no_encoder_takes_are_named():
    model, _ = models.llava()
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="get_image_features takes no pixel_values_videos"):
        image_keywords(model, ids, torch.ones_like(ids), {"pixel_values_videos": torch.zeros(1)})


@pytest.mark.parametrize(("num_with", "is_refused"), [(0, False), (1, True), (2, False)])
def test_ranks_that_shard_an_encoder_run_it_together(num_with, is_refused):
    ranks = SimpleNamespace(num_ranks=2, total=lambda own: float(num_with))
    turns: Any = SimpleNamespace(_ranks=ranks, _takes_images=True)
    batch: Any = SimpleNamespace(packed=SimpleNamespace(of_images={"pixel_values": 1}))
    refused = pytest.raises(ValueError, match="1 of 2 ranks have images in this micro-batch")
    with refused if is_refused else nullcontext():
        Turns._refuse_other_kind(turns, batch)
