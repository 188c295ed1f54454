"""Images on vLLM's token-in, token-out wire: as tensors that the client's processor has made (`features`), or as they
are (`content_parts`).

Each entry of `features.kwargs_data.image` is base64 of msgpack: {name: {"data": value, "field": [kind, settings]}}, as
vLLM's encode_mm_kwargs_item writes it (vllm/entrypoints/scale_out/token_in_token_out/mm_serde.py, 0.33). A value is a
tensor [dtype, shape, bytes as extension type 3], a number, or a list of values. `field` says how the entries of several
images are joined: "batched" ones are stacked, "flat" ones are put one after another.
"""

from __future__ import annotations

import binascii
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...image_inputs import joined
from ..edge.bodies import Body
from ..edge.errors import BadField
from ..images.intake import ImageIntake
from ..images.pictures import SentPicture

_FIELD, _DATA, _PARTS = "features", "features.kwargs_data.image", "content_parts"
_TENSOR_CODE = 3  # vLLM's extension type of a tensor's bytes; its 1 and 2 are pickles
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)
}  # fmt: skip
_OTHER_NAMES = {"pixel_position_ids": "image_position_ids"}  # vLLM's for a parameter of Gemma 4's encoder
_NESTING = 16  # lists in each other

Index = Annotated[int, Field(ge=0, le=2**31 - 1)]


class PlaceBody(Body):
    """The tokens of one item of `features`."""

    offset: Index
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]


class FeaturesBody(Body):
    """Fields of `features`: tensors of images by the client's processor, and their places in `token_ids`."""

    mm_hashes: dict[str, list[str]] = Field(description="read, and change nothing: no tensors are kept by hash")
    mm_placeholders: dict[str, list[PlaceBody]]
    kwargs_data: dict[str, list[str | None]] | None = None


@dataclass(frozen=True)
class SentImages:
    """The images of a request, not decoded yet."""

    pictures: Sequence[SentPicture]  # in the order of their tokens; of `features`: base64 of what is decoded here
    ranges: Sequence[tuple[int, int]] | None  # the first token of each and the one behind its last; None: pictures

    def prompt(self, ids: list[int], images: ImageIntake) -> list[int]:
        """Return the prompt of token ids with these images. Slow. Raises BadField."""
        if self.ranges is None:
            images.check_pixels(self.pictures)
            return images.of_ids(ids, self.pictures, _PARTS)

        def make() -> dict[str, Tensor]:
            return _joined([_decoded(picture) for picture in self.pictures], images.names)

        return images.of_tensors(ids, self.pictures, self.ranges, _FIELD, make)


def read_features(given: FeaturesBody, num_tokens: int, images: ImageIntake) -> SentImages | None:
    """Check the images that came as tensors, for a prompt of so many tokens; None: it has none. Raises BadField."""
    if images.no_images is not None:
        raise BadField(_FIELD, images.no_images)
    if importlib.util.find_spec("msgpack") is None:
        raise BadField(_FIELD, "the server has no msgpack (extra `images`: pip install -e '.[images]')")
    data = given.kwargs_data or {}
    for name, lists in (("mm_hashes", given.mm_hashes), ("mm_placeholders", given.mm_placeholders),
                        ("kwargs_data", data)):  # fmt: skip
        if others := sorted(kind for kind, items in lists.items() if kind != "image" and items):
            raise BadField(f"{_FIELD}.{name}.{others[0]}", "is not supported: images alone are")
    places, texts = given.mm_placeholders.get("image", []), data.get("image", [])
    num = len(given.mm_hashes.get("image", []))
    if given.kwargs_data is None:
        texts = [None] * num
    for name, items in (("mm_placeholders", places), ("kwargs_data", texts)):
        if len(items) != num:
            raise BadField(f"{_FIELD}.{name}.image", f"has {len(items)} entries for {num} hashes")
    images.count(num, _DATA)
    order = sorted(range(num), key=lambda index: places[index].offset)
    end, pictures, ranges = 0, [], []
    for index in order:
        place, text, field = places[index], texts[index], f"{_DATA}.{index}"
        if place.offset < end or place.offset + place.length > num_tokens:
            what = f"is not within {end} and the {num_tokens} tokens of the prompt, which others do not take"
            raise BadField(f"{_FIELD}.mm_placeholders.image.{index}", what)
        if text is None:
            raise BadField(field, "is null: the server keeps no images of other requests, so send their tensors")
        end = place.offset + place.length
        pictures.append(images.tensors(text, field))
        ranges.append((place.offset, end))
    return SentImages(pictures, ranges) if num else None


def read_parts(given: Sequence[object], images: ImageIntake) -> SentImages | None:
    """Check the images that came as they are; None: there are none. Raises BadField."""
    images.count(len(given), _PARTS)
    pictures = []
    for index, part in enumerate(given):
        field = f"{_PARTS}.{index}"
        if not isinstance(part, Mapping):
            raise BadField(field, f"must be an object, not {type(part).__name__}")
        if (kind := part.get("type")) != "image_url":
            raise BadField(f"{field}.type", f'must be "image_url", not {str(kind)[:100]!r}')
        pictures.append(images.one(part.get("url"), f"{field}.url"))
    return SentImages(pictures, None) if pictures else None


Parts = dict[str, tuple[str, Tensor]]  # tensors of one image, each with the kind of its field


def _decoded(picture: SentPicture) -> Parts:
    """Decode the tensors of one image. Raises BadField."""
    import msgpack  # few servers need it

    field = picture.field

    def bytes_of(code: int, data: bytes) -> bytes:
        if code != _TENSOR_CODE:
            raise BadField(field, f"has extension type {code}: tensors have {_TENSOR_CODE}, and pickles are not read")
        return data

    try:
        data = binascii.a2b_base64(picture.data, strict_mode=True)
        found = msgpack.unpackb(data, ext_hook=bytes_of, use_list=True)
    except (ValueError, RecursionError, OverflowError) as error:  # of base64, msgpack, and texts that are no UTF-8
        raise BadField(field, f"is not base64 of msgpack: {type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(found, dict) or not found:
        raise BadField(field, "must be a map of tensors")
    parts: Parts = {}
    for name, entry in found.items():
        match entry:
            case {"data": value, "field": [("batched" | "flat") as kind, dict() as settings]} if isinstance(name, str):
                at = f"{field}.{name[:100]}"
                if kind == "flat" and settings.get("dim", 0) != 0:
                    raise BadField(at, f"is joined along dimension {str(settings['dim'])[:20]}: only 0 is supported")
                if value is not None:
                    parts[name] = kind, _tensor(value, at)
            case _:
                raise BadField(
                    field, f"must have data, and a field of the kind batched or flat, for {str(name)[:100]!r}"
                )
    return parts


def _tensor(value: object, field: str, depth: int = 0) -> Tensor:
    """Return the tensor of a value. Raises BadField."""
    match value:
        case [str() as name, list() as shape, bytes() as data]:
            dtype = _DTYPES.get(name)
            if dtype is None:
                raise BadField(field, f"has the dtype {name[:50]!r}; known are {', '.join(sorted(_DTYPES))}")
            if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
                raise BadField(field, f"has the shape {str(shape)[:100]}")
            if math.prod(shape) * dtype.itemsize != len(data) or not data:
                raise BadField(field, f"has {len(data)} bytes for {name} {str(shape)[:100]}")
            return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        case bool() | int() | float():
            kind = torch.float32 if isinstance(value, float) else torch.int64
            if kind is torch.int64 and abs(value) >= 2**63:
                raise BadField(field, "has an integer of more than 64 bits")
            return torch.tensor(value, dtype=kind)
        case [_, *_] if depth < _NESTING:
            parts = [_tensor(one, field, depth + 1) for one in value]
            if len({(part.shape, part.dtype) for part in parts}) > 1:
                raise BadField(field, "is a list of tensors of several shapes or dtypes")
            return torch.stack(parts)
        case _:
            raise BadField(field, f"must be a tensor, a number or a list of them, not {type(value).__name__}")


def _joined(images: Sequence[Parts], known: frozenset[str]) -> dict[str, Tensor]:
    """Return the tensors of all images of a prompt, under the encoder's names for them. Raises ValueError."""
    found: dict[str, Tensor] = {}
    for name in images[0]:
        if any(image.keys() != images[0].keys() or image[name][0] != images[0][name][0] for image in images):
            raise ValueError(f"images have different tensors: {[sorted(image) for image in images[:5]]}")
        kind, tensors = images[0][name][0], [image[name][1] for image in images]
        if len({tensor.dtype for tensor in tensors}) > 1 or (kind == "flat" and not tensors[0].dim()):
            raise ValueError(f"{name} cannot be joined: its dtypes or dimensions differ between images")
        own = name if name in known else _OTHER_NAMES.get(name, name)
        found[own] = joined([tensor[None] for tensor in tensors] if kind == "batched" else tensors)
    return found
