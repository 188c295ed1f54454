"""The reading of prompts with images, as processors of transformers give them: token ids and the images' tensors."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .images import Images

IDS = "input_ids"
_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are of images
_OF_TEXT = {IDS, "attention_mask", *_TYPES}  # what a processor gives of the text
_GRID = "image_grid_thw"  # patches of each image [n, 3]: frames, rows, columns
_OUTPUTS = "mm_encoder_outputs"  # the parameter of transformers' modules that takes features of images


TypesAndBlocks = tuple[dict[str, Tensor], list[tuple[int, int]]]


class ImageReader:
    """The reader of prompts with images of one model."""

    def __init__(
        self,
        module: PreTrainedModel,
        count: Callable[[Mapping[str, Tensor]], int],
        types: Callable[[Tensor, Mapping[str, Tensor]], TypesAndBlocks] | None,
        check: Callable[[Sequence[int], Images], None],
        most_rows: int,
    ) -> None:
        """Read for a module that is hosted with images (`why_no_images`).

        count: returns the number of features of one image. types: returns the types of a prompt's tokens [1, P] and the
        blocks of those that see each other both ways, which one chunk of at most `most_rows` rows has to hold; None:
        none do. check: raises ValueError for a prompt with which the engine computes otherwise than the module; called
        until one prompt has passed.
        """
        self._count, self._types, self._check, self._is_checked = count, types, check, False
        self._most_rows = most_rows
        self._counts: dict[str, int] = {}  # by `sizes_digest` of an image's tensors
        self._model = module.base_model
        self._encode: Callable[..., Any] = self._model.get_image_features  # type: ignore[assignment]
        self._token = image_token(module) or 0
        self._names = encoder_names(module)
        vision = getattr(module.config, "vision_config", None)
        self._merge = getattr(vision, "spatial_merge_size", 1)  # patches of a feature, along rows and along columns

    def read(
        self, prompt: Mapping[str, object], computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> tuple[list[int], Images | None]:
        """Return the token ids and the images of a prompt.

        prompt: the output of a processor for one text: input_ids [P] or [1, P], pixel_values, and what else the
        model's encoder takes. computing: makes the context in which the model runs, where it has to. Raises ValueError
        that names what does not fit, and the errors of the context.
        """
        ids = ids_of(prompt)
        if unknown := sorted(_of_images(prompt).keys() - self._names):
            raise ValueError(
                f"a prompt with images has {IDS} and what {type(self._model).__name__}.get_image_features takes, not "
                f"{', '.join(unknown)}: videos and audio are not supported"
            )
        tensors = image_tensors(prompt)
        tokens = [index for index, id in enumerate(ids) if id == self._token]
        if not tensors:
            if tokens:
                raise ValueError(f"the prompt has {len(tokens)} tokens of images, but no pixel_values")
            return ids, None
        if "pixel_values" not in tensors:
            raise ValueError(f"the prompt has {', '.join(sorted(tensors))}, but no pixel_values")
        inputs = _of_each_image(tensors, self._merge)
        counts = [self._count_of(one, computing) for one in inputs]
        if sum(counts) != len(tokens):
            raise ValueError(
                f"the prompt has {len(tokens)} tokens of images (id {self._token}) for {len(inputs)} images, which "
                f"have {counts} features: give the {IDS} as the processor has expanded them"
            )
        positions, offset = self._positions(ids, tensors)
        beside = {name: _as_tensor(name, prompt[name]).view(1, -1) for name in _TYPES if prompt.get(name) is not None}
        types, blocks = self._types_of(ids, beside, computing)
        if (most := max((end - begin for begin, end in blocks), default=0)) > self._most_rows:
            raise ValueError(
                f"{most} tokens of images see each other both ways and are prefilled in one step, which has at most "
                f"{self._most_rows} rows of a prompt: raise chunked_prefill_size and max_num_batched_tokens"
            )
        ends, digest = np.cumsum(counts).tolist(), images_digest(tensors)
        block_tokens = [hashlib.sha256(f"{ids[begin:end]}".encode()).hexdigest() for begin, end in blocks]
        images = Images(
            inputs, tokens, ends, digest, [images_digest(one) for one in inputs], positions, offset, beside | types,
            blocks, block_tokens,
        )  # fmt: skip
        if not self._is_checked:
            with computing():
                self._check(ids, images)
            self._is_checked = True
        return ids, images

    def _types_of(
        self, ids: Sequence[int], beside: Mapping[str, Tensor], computing: Callable[[], AbstractContextManager[object]]
    ) -> TypesAndBlocks:
        """Return the types of a prompt's tokens and its blocks; none where the module's tokens see no later ones."""
        if self._types is None:
            return {}, []
        with computing():
            return self._types(torch.tensor([ids]), beside)

    def _count_of(self, inputs: Mapping[str, Tensor], computing: Callable[[], AbstractContextManager[object]]) -> int:
        """Return the number of features of one image, which follows from the shapes of its tensors and its sizes."""
        key = sizes_digest(inputs)
        if key not in self._counts:
            with computing():
                self._counts[key] = self._count(inputs)
        return self._counts[key]

    def _positions(self, ids: Sequence[int], tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, int]:
        """Return the rotary positions int64 [S, P] of a prompt's tokens, and the offset of those behind it."""
        rope_index = getattr(self._model, "get_rope_index", None)
        if rope_index is None:
            return None, 0
        twice = torch.tensor([ids, ids])  # in a trainer's batch a prompt must have the positions that it has alone
        grid = tensors.get(_GRID)
        known = {
            "mm_token_type_ids": torch.eq(twice, self._token).int(),
            "attention_mask": torch.ones_like(twice),
            _GRID: None if grid is None else torch.cat([grid, grid]),
        }
        taken, name = inspect.signature(rope_index).parameters, f"{type(self._model).__name__}.get_rope_index"
        try:
            positions, offsets = rope_index(twice, **{key: value for key, value in known.items() if key in taken})
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{name} gives no positions for this prompt: {type(error).__name__}: {error}") from error
        first, second = positions.unbind(1)
        if not torch.equal(first, second):
            raise ValueError(f"{name} gives a prompt other positions where it is the second of a batch: not supported")
        return first.contiguous(), int(offsets.flatten()[0])


def image_token(module: PreTrainedModel) -> int | None:
    """Return the id of the token that stands for a feature of an image; None: the module has none."""
    found = (getattr(module.config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((id for id in found if isinstance(id, int)), None)


def why_no_images(module: PreTrainedModel) -> str | None:
    """Return the reason for which a module is not hosted with images; None: it is."""
    name, model = type(module).__name__, module.base_model
    if image_token(module) is None or not hasattr(model, "get_image_features"):
        return f"{name} takes no images"
    if _OUTPUTS not in inspect.signature(type(model).forward).parameters:
        return f"{name} takes no {_OUTPUTS}: images need transformers 5.23 or newer"
    return None


def encoder_names(module: PreTrainedModel) -> frozenset[str]:
    """Return the names of the tensors that the encoder of a module with images takes."""
    taken = inspect.signature(module.base_model.get_image_features).parameters  # type: ignore[arg-type]
    return frozenset(name for name, one in taken.items() if one.kind is not one.VAR_KEYWORD)


def _of_images(prompt: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in prompt.items() if name not in _OF_TEXT and value is not None}


def ids_of(prompt: Mapping[str, object]) -> list[int]:
    """Return the token ids of one text. Raises ValueError for several, and for padding."""
    ids = _as_tensor(IDS, prompt[IDS])
    mask = prompt.get("attention_mask")
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise ValueError(f"{IDS} of a prompt with images must be [P] or [1, P], not {list(ids.shape)}: one prompt each")
    if mask is not None and not _as_tensor("attention_mask", mask).all():
        raise ValueError(f"{IDS} of a prompt with images has padding: leave it out")
    return ids.tolist()


def _as_tensor(name: str, value: object) -> Tensor:
    try:
        # PyTorch would read the arrays of a list number by number.
        return torch.as_tensor(value if isinstance(value, Tensor) else np.asarray(value)).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a tensor, or numbers that make one: {error}") from error


def _num_patches(grid: Tensor, pixels: Tensor, merge: int) -> list[int]:
    """Return the number of patches of each image. Raises ValueError for a grid [n, 3] that is not of whole numbers from
    1, of which `merge` divides rows and columns, or that has other patches than the pixels. The numbers are a
    request's: their products may be larger than an int64."""
    what, most = f"{_GRID} {grid.tolist()!s:.200}", len(pixels)
    if grid.is_floating_point() or grid.is_complex() or grid.dtype == torch.bool:
        raise ValueError(f"{what} has to be of whole numbers, not {grid.dtype}")
    sizes = grid.tolist() if grid.dim() == 2 and grid.shape[1] == 3 else []
    if any(not 1 <= one <= most for size in sizes for one in size) or sum(map(math.prod, sizes)) != most or not sizes:
        raise ValueError(f"{what} does not fit pixel_values {list(pixels.shape)}")
    if any(rows % merge or columns % merge for _, rows, columns in sizes):
        raise ValueError(f"{what}: rows and columns of an image have to be multiples of {merge}")
    return [math.prod(size) for size in sizes]


def _of_each_image(tensors: Mapping[str, Tensor], merge: int) -> list[dict[str, Tensor]]:
    """Cut tensors of several images into those of each. Raises ValueError where their numbers differ."""
    grid, pixels = tensors.get(_GRID), tensors["pixel_values"]
    if not pixels.dim():
        raise ValueError("pixel_values has no image")
    if grid is not None:
        cut = {"pixel_values": pixels.split(_num_patches(grid, pixels, merge))}
    else:
        cut = {"pixel_values": pixels.split(1)}
    num = len(cut["pixel_values"])
    for name, tensor in tensors.items():
        if name not in cut:
            if not tensor.dim() or len(tensor) != num:
                raise ValueError(f"{name} {list(tensor.shape)} is not of {num} images")
            cut[name] = tensor.split(1)
    if not num:
        raise ValueError("pixel_values has no image")
    return [{name: parts[index] for name, parts in cut.items()} for index in range(num)]


def image_tensors(prompt: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors of a prompt's images, by the names of the encoder's parameters. Raises ValueError for what is
    none."""
    return {name: _as_tensor(name, value) for name, value in _of_images(prompt).items()}


def images_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the tensors of a prompt's images with their names, dtypes and shapes."""
    return _digest(tensors, lambda tensor: True)


def sizes_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes and shapes of an image's tensors, and of the numbers of those that tell
    of its size: grids, masks of what pads it (a million numbers), places of its patches."""
    return _digest(tensors, lambda tensor: not tensor.is_floating_point())


def _digest(tensors: Mapping[str, Tensor], is_read: Callable[[Tensor], bool]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if is_read(tensor):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
