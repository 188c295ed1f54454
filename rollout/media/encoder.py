"""The features of images that a step's rows take, from the model's own encoder, each image alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .images import ImagePart, ImageRows
from .reader import image_token

NO_FEATURES: Mapping[str, object] = MappingProxyType({})  # of a step without images


class NoFeatures(ValueError):
    """An encoder whose features have another form than the engine can give to a forward."""


class Blocks(Protocol):
    """The blocks of tokens in a module's masks (`model/encoders/both_ways.py`)."""

    name: str

    @property
    def inside(self) -> int | None: ...
    def blocks(self, types: Tensor) -> list[tuple[int, int]]: ...
    def types(self, rows: list[int], num_rows: int) -> Tensor: ...


def have_blocks(features: Mapping[str, object]) -> bool:
    """Return whether keywords of a step are of one whose rows see others behind them."""
    return "attention_mask" in features


class ImageEncoder:
    """The encoder of one hosted model. It keeps nothing: features follow from the weights of their step."""

    def __init__(
        self, module: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]], both_ways: Blocks | None
    ) -> None:
        """Encode for a module of images and text. around: puts the numerics around a function; both_ways: None for a
        module whose tokens of images see no later ones."""
        self._model, self._token, self._both_ways = module.base_model, image_token(module) or 0, both_ways
        self._encode = around(self._model.get_image_features)

    @property
    def may_have_blocks(self) -> bool:
        """Whether tokens of prompts may see each other both ways."""
        return self._both_ways is not None

    def types(self, ids: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the types of a prompt's tokens [1, P] by the name that the masks have for them, as given or as the
        processor makes them; none where no token sees later ones."""
        both_ways = self._both_ways
        if both_ways is None or both_ways.inside is None:
            return {}
        of_images = torch.eq(ids, self._token).long() if both_ways.inside else torch.zeros_like(ids)
        return {both_ways.name: given.get(both_ways.name, of_images)}

    def blocks(self, types: Mapping[str, Tensor]) -> list[tuple[int, int]]:
        """Return the tokens [begin, end) of a prompt that see each other both ways. types: see above."""
        return [block for one in types.values() if self._both_ways for block in self._both_ways.blocks(one)]

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
        keywords: dict[str, object] = {"mm_encoder_outputs": {"image": _Output(output, outputs[0])}}
        if images.in_blocks and self._both_ways is not None:  # the module makes its masks
            types = self._both_ways.types(images.in_blocks, len(token_ids))
            keywords |= {self._both_ways.name: types, "attention_mask": None}
        return keywords

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the number of features of one image."""
        with torch.inference_mode():
            return len(_pooled(self._run(inputs)))

    def _run(self, inputs: Mapping[str, Tensor]) -> Any:
        return self._encode(**as_taken(inputs, self._model), return_dict=True)


def as_taken(inputs: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return tensors of images on a model's device, pixels in its dtype."""
    given = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    return {name: t.to(model.dtype) if "pixel" in name and t.is_floating_point() else t for name, t in given.items()}


class _Output:
    """An encoder's output as the module's forward reads it: with these features, and what else the encoder gave with an
    image, which is the same for all."""

    def __init__(self, features: Mapping[str, Any], other: object) -> None:
        self._features, self._other = features, other

    def __getattr__(self, name: str) -> Any:
        return self._features[name] if name in self._features else getattr(self._other, name)


def _features(part: ImagePart, out: Any) -> tuple[Tensor, list[Tensor] | None]:
    """Return the features [T, D] of a part of an image, and those of further layers if it has any."""
    pooled = _pooled(out)
    assert len(pooled) == part.images.num_tokens_of(part.index), "as counted when the prompt was read"
    deeper, taken = getattr(out, "deepstack_features", None), slice(part.first, part.end)
    return pooled[taken], None if deeper is None else [_joined(one)[taken] for one in deeper]


def _pooled(out: Any) -> Tensor:
    """Return the features [T, D] of one image in an encoder's output. Raises NoFeatures where they are elsewhere."""
    if getattr(out, "pooler_output", None) is None:
        raise NoFeatures(f"{type(out).__name__} has no pooler_output: the features that a forward takes are not known")
    return _joined(out.pooler_output)


def _joined(features: Any) -> Tensor:
    """Return features of one image as one tensor [T, D]."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features), dim=0)
    return joined.flatten(0, -2)


def _scattered(features: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Return rows that have these features [T, D] in some places, and zeros elsewhere."""
    out = features.new_zeros(num_rows, features.shape[1])
    out[places] = features
    return out
