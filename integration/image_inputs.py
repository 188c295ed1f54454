"""A trainer's forward over packed sequences with images: the tensors of the images, and the rotary positions of rows.

Letters: B sequences, T tokens with padding, N tokens without, S parts of the rotary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ..rollout.media.encoder import as_taken
from ..rollout.media.reader import image_token, why_no_images

TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are of images
_GRID = "image_grid_thw"


def banned_tokens(module: PreTrainedModel) -> dict[int, float]:
    """Return the `logit_bias` of a model's samples: minus infinity for the token that stands for images.

    An engine goes on with the embedding of such a token, where a trainer's forward wants an image for it. {} for a
    model that is not hosted with images.
    """
    token = image_token(module)
    return {} if token is None or why_no_images(module) is not None else {token: float("-inf")}


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor of images one after another. Where they have several sizes the smaller ones are padded with
    zeros behind, as processors pad the images of a batch. Raises ValueError for different numbers of dimensions."""
    if len({part.dim() for part in parts}) > 1:
        raise ValueError(f"tensors of images differ in their dimensions: {[list(part.shape) for part in parts]}")
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_padded(part, largest) for part in parts])


def _padded(part: Tensor, sizes: Sequence[int]) -> Tensor:
    more = [large - own for large, own in zip(sizes, part.shape[1:], strict=True)]
    return functional.pad(part, [one for size in reversed(more) for one in (0, size)]) if any(more) else part


def image_keywords(
    module: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the keywords with which a forward over the packed tokens [1, N] of a batch takes images, but for the
    positions.

    input_ids, attention_mask: [B, T], padded on any side. tensors: of all images, in the order of their tokens, by the
    names of the encoder's parameters. Raises ValueError for tensors that the encoder does not take.
    """
    model: Any = module.base_model
    if reason := why_no_images(module):
        raise ValueError(f"a batch has images: {reason}")
    if unknown := sorted(tensors.keys() - inspect.signature(model.get_image_features).parameters.keys()):
        raise ValueError(f"{type(model).__name__}.get_image_features takes no {', '.join(unknown)}: images alone are")
    mask = attention_mask.bool()
    is_image = torch.eq(input_ids, image_token(module) or 0)
    taken = inspect.signature(type(module).forward).parameters
    return {
        **as_taken(tensors, module),
        **{name: is_image.int()[mask][None] for name in TYPES if name in taken},
    }


def rotary_keywords(
    module: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, is_drawn: Tensor, grid: Tensor | None
) -> dict[str, Tensor]:
    """Return the positions int64 [S, 1, N] of the packed tokens of a batch, as the module makes them; {}: they are
    those of the tokens.

    input_ids, attention_mask, is_drawn: [B, T]; is_drawn: whether the model drew a token, which then opens no image or
    video, whatever it is; the first token of each sequence was not drawn. grid: patches of all images [n, 3].
    """
    rope_index: Callable[..., Any] | None = getattr(module.base_model, "get_rope_index", None)
    if rope_index is None:
        return {}
    mask = attention_mask.bool()
    is_given = mask & ~is_drawn
    last = is_given.long().cumsum(1).argmax(1, keepdim=True)  # of the prompt: a token of text
    plain = torch.where(is_drawn, input_ids.gather(1, last), input_ids)
    known = {
        "mm_token_type_ids": (torch.eq(plain, image_token(module) or 0) & mask).int(),
        "attention_mask": mask.long(),
        _GRID: grid,
    }
    names = inspect.signature(rope_index).parameters
    positions, _ = rope_index(plain, **{name: value for name, value in known.items() if name in names})
    return {"position_ids": positions[:, mask][:, None]}
