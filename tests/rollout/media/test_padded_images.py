"""Images that are padded inside a batch: they have the bits that they have alone, however much pads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import random_model
from lockstep.tests.families.images import _with_small_images

ENGINE = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=13)


def idefics2(generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an image of 4 x 3 patches alone, and padded by a column of patches beside another one of 4 x 4."""
    pixels, other = torch.randn(1, 1, 3, 32, 24, generator=generator), torch.randn(1, 1, 3, 32, 32, generator=generator)
    mask = torch.ones(1, 1, 32, 24, dtype=torch.int64)
    padded = {"pixel_values": torch.zeros(1, 1, 3, 32, 32), "pixel_attention_mask": torch.zeros(1, 1, 32, 32).long()}
    padded["pixel_values"][..., :24], padded["pixel_attention_mask"][..., :24] = pixels, mask
    beside = {"pixel_values": other, "pixel_attention_mask": torch.ones(1, 1, 32, 32, dtype=torch.int64)}
    batch = {name: torch.cat([padded[name], beside[name]]) for name in padded}
    return {"pixel_values": pixels, "pixel_attention_mask": mask}, batch


def lfm2_vl(generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an image of 4 x 8 patches alone, and padded to 64 patches beside another one of 8 x 8."""
    pixels, shapes = torch.randn(2, 64, 192, generator=generator), torch.tensor([[4, 8], [8, 8]])
    mask = torch.arange(64)[None] < shapes.prod(-1, keepdim=True)
    pixels = pixels * mask[..., None]
    batch = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}
    cut = {"pixel_values": pixels[:1, :32], "pixel_attention_mask": mask[:1, :32].long()}
    return {**cut, "spatial_shapes": shapes[:1]}, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("images", [idefics2, lfm2_vl], ids=lambda make: make.__name__)
def test_an_image_has_the_same_bits_alone_and_padded_in_a_trainers_batch(images, dtype):
    model = random_model("vision", images.__name__, dtype, _with_small_images)
    engine = Engine(model, ENGINE)
    alone, batch = images(torch.Generator().manual_seed(1))
    encoder, token = engine.model.images, model.config.image_token_id
    assert encoder is not None
    with engine.model.rollout_phase():
        num = encoder.count(alone)
        num_other = encoder.count({name: tensor[1:] for name, tensor in batch.items()})
    ids = torch.tensor([[11, 12, *[token] * num, 13, 14, 15]])
    draws = SamplingParams(max_new_tokens=6, temperature=0.7, sampling_seed=3, logit_bias={token: -100.0})
    [completion] = engine.generate([{"input_ids": ids, **alone}], draws)
    mine = [*completion.prompt_ids, *completion.token_ids]
    other = [*[token] * num_other, 16, 17]
    length = max(len(mine), len(other))
    rows = torch.tensor([row + [0] * (length - len(row)) for row in (mine, other)])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in (mine, other)])
    given = {**batch, "pixel_values": batch["pixel_values"].to(dtype)}
    with engine.model.training_numerics(), torch.no_grad():
        logits = model(input_ids=rows, attention_mask=mask, use_cache=False, **given).logits[0]
    own = logits[completion.num_prompt_tokens - 1 : len(mine) - 1].float()
    found = selected_logprobs(own, torch.tensor(completion.token_ids), 0.7)
    assert found.tolist() == list(completion.logprobs)
    engine.close()
