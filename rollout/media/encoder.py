"""The features of images that a step's rows take, from the model's own encoder, each image alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .images import ImagePart, ImageRows
from .reader import image_token, why_no_images

NO_FEATURES: Mapping[str, object] = MappingProxyType({})  # of a step without images


class ImageEncoder:
    """The encoder of one hosted model. It keeps nothing: features follow from the weights of their step."""

    def __init__(self, module: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Encode for a module of images and text. around: puts the numerics around a function."""
        self._model, self._token = module.base_model, image_token(module) or 0
        self._encode = around(self._model.get_image_features)

    @classmethod
    def of(cls, module: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> ImageEncoder | None:
        """Return the encoder of a module; None for one that is not hosted with images."""
        return cls(module, around) if why_no_images(module) is None else None

    def keywords(self, images: ImageRows, token_ids: Tensor) -> dict[str, object]:
        """Return the keywords of the module's forward for a step with these rows; none for one without images.

        token_ids: int64 [N] of all rows. A row that has the token of images without being of one, as a model may draw
        it, keeps its embedding.
        """
        if not images.parts:
            return {}
        outputs = [self._run(part.images.inputs[part.index]) for part in images.parts]
        found = [_features(part, out) for part, out in zip(images.parts, outputs, strict=True)]
        rows = torch.eq(token_ids, self._token).nonzero()[:, 0]
        taken = torch.searchsorted(rows, torch.tensor(images.rows, device=rows.device))
        table: nn.Module = self._model.get_input_embeddings()
        levels = found[0][1]
        embedded = table(token_ids[rows])
        embedded[taken] = torch.cat([features for features, _ in found]).to(embedded.dtype)
        is_joined = isinstance(outputs[0].pooler_output, Tensor)  # and no list of each image's
        output: dict[str, Any] = {"pooler_output": embedded if is_joined else [embedded]}
        if levels is not None:
            output["deepstack_features"] = [
                [_scattered(torch.cat([own[level] for _, own in found]), taken, len(rows))]  # type: ignore[index]
                for level in range(len(levels))
            ]
        return {"mm_encoder_outputs": {"image": _Output(output, outputs[0])}}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the number of features of one image."""
        with torch.inference_mode():
            return len(_joined(self._run(inputs).pooler_output))

    def _run(self, inputs: Mapping[str, Tensor]) -> Any:
        given = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
        if given["pixel_values"].is_floating_point():
            given["pixel_values"] = given["pixel_values"].to(self._model.dtype)
        return self._encode(**given, return_dict=True)


class _Output:
    """An encoder's output as the module's forward reads it: with these features, and what else the encoder gave with an
    image, which is the same for all."""

    def __init__(self, features: Mapping[str, Any], other: object) -> None:
        self._features, self._other = features, other

    def __getattr__(self, name: str) -> Any:
        return self._features[name] if name in self._features else getattr(self._other, name)


def _features(part: ImagePart, out: Any) -> tuple[Tensor, list[Tensor] | None]:
    """Return the features [T, D] of a part of an image, and those of further layers if it has any."""
    pooled = _joined(out.pooler_output)
    assert len(pooled) == part.images.num_tokens_of(part.index), "as counted when the prompt was read"
    deeper, taken = getattr(out, "deepstack_features", None), slice(part.first, part.end)
    return pooled[taken], None if deeper is None else [_joined(one)[taken] for one in deeper]


def _joined(features: Any) -> Tensor:
    """Return features of one image as one tensor [T, D]."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features), dim=0)
    return joined.flatten(0, -2)


def _scattered(features: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Return rows that have these features [T, D] in some places, and zeros elsewhere."""
    out = features.new_zeros(num_rows, features.shape[1])
    out[places] = features
    return out
