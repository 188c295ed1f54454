"""A trainer's forward over packed sequences with images: the tensors of the images, and the rotary positions of rows.

Letters: B sequences, T tokens with padding, N tokens without, S parts of the rotary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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


def image_parameters(module: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained parameters of a module beside its decoder of text, of which a forward may use none."""
    if image_token(module) is None or why_no_images(module) is not None:
        return []
    others = (module.get_decoder(), module.get_output_embeddings())
    used = {parameter for part in others if part is not None for parameter in part.parameters()}
    return [one for one in module.parameters() if one.requires_grad and one not in used]


def image_keywords(
    module: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the keywords with which a forward over the packed tokens [1, N] of a batch takes images.

    input_ids, attention_mask: [B, T], padded on any side. tensors: of all images, in the order of their tokens, by the
    names of the encoder's parameters. The positions are the module's own. Raises ValueError for tensors that the
    encoder does not take, and where the tokens of images are not the images'.
    """
    model: Any = module.base_model
    if reason := why_no_images(module):
        raise ValueError(f"a batch has images: {reason}")
    if unknown := sorted(tensors.keys() - inspect.signature(model.get_image_features).parameters.keys()):
        raise ValueError(f"{type(model).__name__}.get_image_features takes no {', '.join(unknown)}: images alone are")
    mask = attention_mask.bool()
    is_image = torch.eq(input_ids, image_token(module) or 0) & mask
    keywords: dict[str, Any] = {name: tensor.to(input_ids.device) for name, tensor in tensors.items()}
    if keywords["pixel_values"].is_floating_point():
        keywords["pixel_values"] = keywords["pixel_values"].to(module.dtype)
    taken = inspect.signature(type(module).forward).parameters
    keywords |= {name: is_image.int()[mask][None] for name in TYPES if name in taken}
    rope_index: Callable[..., Any] | None = getattr(model, "get_rope_index", None)
    if rope_index is not None:
        known = {"mm_token_type_ids": is_image.int(), _GRID: keywords.get(_GRID), "attention_mask": mask.long()}
        names = inspect.signature(rope_index).parameters
        positions, _ = rope_index(input_ids, **{name: value for name, value in known.items() if name in names})
        keywords["position_ids"] = positions[:, mask][:, None]
    return keywords
