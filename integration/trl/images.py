"""The images of TRL's prompts, as the engine takes them, and of its batches, as they are found again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..image_inputs import TYPES

NO_IMAGES: Mapping[str, Tensor] = {}
ModelPrompt = list[int] | dict[str, Any]  # token ids; or what a processor makes of a prompt with images


def model_prompts(trainer: Any, prompts: Sequence[Any]) -> list[ModelPrompt]:
    """Return prompts as the engine takes them. TRL's own code, with its processor, makes them of each prompt with
    images alone; of equal ones in a row once."""
    if not trainer._is_vlm or isinstance(prompts[0], str):
        token_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError(
                "prompts have images, but processing_class is a tokenizer: pass the model's processor to GRPOTrainer"
            )
        return [list(ids) for ids in token_ids]
    made: list[ModelPrompt] = []
    for number, prompt in enumerate(prompts):
        if number and prompt == prompts[number - 1]:
            made.append(made[-1])
            continue
        [ids], images, fields = trainer._tokenize_prompts([prompt])
        if images is None:
            made.append(list(ids))
        else:
            tensors = {name: torch.as_tensor(np.asarray(value)) for name, value in fields.items()}
            made.append({"input_ids": list(ids), **tensors})
    return made


def refuse_uneven_images(trainer: Any, given: Sequence[ModelPrompt]) -> None:
    """Raise ValueError, in all processes, where some have images in this generation and others have none, and TRL would
    log them: its gathering of images, in the former alone, waits for the others for ever. All call it together."""
    accelerator = trainer.accelerator
    if not (trainer._is_vlm and trainer.log_multimodal and accelerator.num_processes > 1):
        return
    has_images = float(any(not isinstance(prompt, list) for prompt in given))
    num = int(accelerator.gather(torch.tensor([has_images], device=accelerator.device)).sum().item())
    if 0 < num < accelerator.num_processes:
        raise ValueError(
            f"{num} of {accelerator.num_processes} processes have images in this generation: TRL, which gathers them "
            "for its log, would wait for the others. Set log_multimodal=False"
        )


def images_of(prompt: ModelPrompt) -> Mapping[str, Tensor]:
    """Return the tensors of a prompt's images."""
    if isinstance(prompt, list):
        return NO_IMAGES
    return {name: value for name, value in prompt.items() if name != "input_ids" and name not in TYPES}


@dataclass
class ImagesInTurn:
    """The tensors of a batch's images, of which each sequence takes the next."""

    tensors: Mapping[str, Tensor]
    taken: dict[str, int] = field(default_factory=dict)  # entries of each tensor that sequences before have taken

    def take(self, known: Sequence[Mapping[str, Tensor]]) -> int | None:
        """Return the number of the known images that the next sequence has, and take them; None: it has others."""
        for number, images in enumerate(known):
            if len(known) == 1 or self._is_next(images):
                for name, tensor in images.items():
                    self.taken[name] = self.taken.get(name, 0) + len(tensor)
                return number
        return None

    def _is_next(self, images: Mapping[str, Tensor]) -> bool:
        return all(_is_equal(given, own) for given, own in self._next(images))

    def _next(self, images: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for name, own in images.items():
            if name not in self.tensors:  # which TRL does not pass on
                continue
            first = self.taken.get(name, 0)
            yield self.tensors[name][first : first + len(own)], own


def _is_equal(given: Tensor, own: Tensor) -> bool:
    """Return whether images of a batch, which may be padded to the largest of it, are these."""
    if given.dim() != own.dim() or any(big < small for big, small in zip(given.shape, own.shape, strict=True)):
        return False
    return torch.equal(given[tuple(slice(size) for size in own.shape)].cpu(), own)
