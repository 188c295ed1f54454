"""Tiny random models of images and text, and prompts with images as their processors give them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.engine import Engine
from lockstep.rollout.media.reader import image_token
from lockstep.rollout.sampling_params import SamplingParams

IMAGE = 250  # the token of an image's feature in the models of test_vision_language
WORDS = ([3, 4, 5, 6, 7], [8, 9], list(range(20, 50)))


class ImagePrompts:
    """A maker of prompts with random images for one model."""

    def __init__(self, model: PreTrainedModel, seed: int = 3) -> None:
        self.config, self.token = model.config, image_token(model)
        self.generator = torch.Generator().manual_seed(seed)

    def prompt(self, *sizes: tuple[int, int], words: Any = WORDS) -> dict[str, torch.Tensor]:
        """Return a prompt of an image of each size, in patches, each before some words."""
        if not hasattr(self.config.vision_config, "spatial_merge_size"):
            return self._of_one_size(len(sizes), words)
        vision = self.config.vision_config
        merge, dim = vision.spatial_merge_size, 3 * vision.temporal_patch_size * vision.patch_size**2
        ids: list[int] = []
        for (height, width), said in zip(sizes, words, strict=False):
            ids += [252, *[self.token] * (height * width // merge**2), 253, *said]
        num_patches = sum(height * width for height, width in sizes)
        return self._with_types(
            ids,
            pixel_values=torch.randn(num_patches, dim, generator=self.generator, dtype=torch.float32),
            image_grid_thw=torch.tensor([(1, *size) for size in sizes]),
        )

    def _of_one_size(self, num: int, words: Any) -> dict[str, torch.Tensor]:
        vision = self.config.vision_config
        size, num_tokens = vision.image_size, (vision.image_size // vision.patch_size) ** 2
        num_tokens = getattr(self.config, "mm_tokens_per_image", num_tokens)
        ids = [id for _, said in zip(range(num), words, strict=False) for id in (*[self.token] * num_tokens, *said)]
        pixels = torch.randn(num, 3, size, size, generator=self.generator, dtype=torch.float32)
        token_ids = torch.tensor([ids])
        has_types = hasattr(self.config, "mm_tokens_per_image")
        types = {"token_type_ids": (token_ids == self.token).long()} if has_types else {}
        return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), "pixel_values": pixels, **types}

    def _with_types(self, ids: list[int], **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        token_ids = torch.tensor([ids])
        types = (token_ids == self.token).int()
        return {
            "input_ids": token_ids,
            "attention_mask": torch.ones_like(token_ids),
            "mm_token_type_ids": types,
            **tensors,
        }


def as_trained(
    model: PreTrainedModel, prompts: list[Any], completions: list[Completion]
) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Return the inputs of a trainer's forward over completions in one batch, padded on the right, and their ids."""
    sequences = [[*c.prompt_ids, *c.token_ids] for c in completions]
    longest = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
    with_images = [prompt for prompt in prompts if isinstance(prompt, dict)]
    given = {
        name: torch.cat([prompt[name] for prompt in with_images])
        for name in ("pixel_values", "image_grid_thw")
        if with_images and name in with_images[0]
    }
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = ((ids == image_token(model)) & mask.bool()).int()
    if hasattr(model.config, "mm_tokens_per_image"):
        given["token_type_ids"] = ((ids == image_token(model)) & mask.bool()).int()
    return {"input_ids": ids, "attention_mask": mask, **given}, sequences


def trained_logprobs(engine: Engine, prompts: list[Any], completions: list[Completion], **options: Any) -> list[Any]:
    """Return the log-probabilities of completions in a trainer's forward over all of them, as lists."""
    model = engine.model.trained_module
    given, sequences = as_trained(model, prompts, completions)
    with engine.model.training_numerics(), torch.set_grad_enabled(options.get("grad", False)):
        logits = engine.model.module(**given, use_cache=False).logits
    found = []
    for row, (completion, sequence) in enumerate(zip(completions, sequences, strict=True)):
        own = logits[row, completion.num_prompt_tokens - 1 : len(sequence) - 1].detach()
        found.append(selected_logprobs(own, torch.tensor(completion.token_ids), 1.0).tolist())
    return found


def assert_pauses_change_nothing(
    engine: Engine, prompts: list[dict[str, Any]], params: SamplingParams, mode: str
) -> None:
    """Compare answers to prompts with those of a run that is paused after every fourth step."""
    expected = {c.prompt_ids: (c.token_ids, c.logprobs) for c in engine.generate(prompts, params)}
    for prompt in prompts:
        engine.add(prompt, params)
    found, num_steps = [], 0
    while engine.has_work:
        found += engine.step()
        num_steps += 1
        if num_steps % 4 == 0:  # a retraction after every chunk would let no prompt end
            engine.pause_generation(mode)
            engine.continue_generation()
    assert {c.prompt_ids: (c.token_ids, c.logprobs) for c in found} == expected
