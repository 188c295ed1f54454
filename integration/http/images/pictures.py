"""Pictures as requests have them, base64 in a text, and their pixels, within limits of bytes and of pixels."""

from __future__ import annotations

import binascii
import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..edge.config import HttpConfig
from ..edge.errors import BadField

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others of Pillow's have decoders that few clients need
_ELSEWHERE = ("http:", "https:", "file:", "ftp:")
# Of a JPEG: a few dozen bytes of a scan cost a walk over all pixels, and of metadata a copy of those before.
_MOST_PARTS = ((b"\xff\xda", 100, "scans"), (b"\xff\xe1", 1000, "segments of metadata"))
_HEAD_CHARS = 200  # of a URL, within which its data begin
# What Pillow's decoders raise for bytes that are no image of theirs; warnings where the process makes errors of them.
_DAMAGED = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error,
    RuntimeError, Warning,
)  # fmt: skip


@dataclass(frozen=True)
class SentPicture:
    """A picture as it came."""

    field: str  # its place in the request
    text: str  # as the request has it, of which this is no copy
    start: int  # of its base64, which is not checked yet

    @property
    def num_bytes(self) -> int:
        """The number of bytes that it takes until its request is answered."""
        return len(self.text)

    @property
    def data(self) -> str:
        """Its base64, without blanks."""
        return "".join(self.text[self.start :].split())


def sent_picture(given: object, field: str, config: HttpConfig, *, is_bare: bool = False) -> SentPicture:
    """Return a picture that came as a data URL. is_bare: or as base64 alone. Raises BadField for anything else: the
    server fetches no address and opens no file for a client."""
    if not isinstance(given, str):
        raise BadField(field, f"must be a text, not {type(given).__name__}")
    head = given[:_HEAD_CHARS].lower()
    if head.startswith("data:"):
        kind, comma, _ = given[:_HEAD_CHARS].partition(",")
        if not comma or not kind.lower().startswith("data:image/") or not kind.lower().endswith(";base64"):
            raise BadField(field, "must be data:image/...;base64,...")
        start = len(kind) + 1
    elif head.startswith(_ELSEWHERE) or "://" in head:
        scheme = head.partition(":")[0]
        raise BadField(field, f"{scheme}: addresses are not fetched: send the image as data:image/...;base64,...")
    elif is_bare:
        start = 0
    else:
        raise BadField(field, "must be data:image/...;base64,...")
    return sent_bytes(given, field, config, start)


def sent_bytes(given: str, field: str, config: HttpConfig, start: int = 0) -> SentPicture:
    """Return what came as base64 from a character on. Raises BadField for nothing, and for too much."""
    if start == len(given):
        raise BadField(field, "has no data")
    if (len(given) - start) // 4 * 3 - given[-2:].count("=") > (limit := config.max_image_bytes):
        raise BadField(field, f"has more than {limit} bytes (max_image_bytes)")
    return SentPicture(field, given, start)


def pixels_of(
    pictures: Sequence[SentPicture],
    config: HttpConfig,
    check_sizes: Callable[[list[tuple[int, int]]], None] = lambda sizes: None,
) -> list[Image]:
    """Decode pictures to RGB, upright as their cameras held them. Slow.

    check_sizes: gets the height and width of each before any is decoded. Raises its errors, and BadField that names the
    picture: for bytes that are no whole image, for animations, and for more pixels than `max_image_pixels` in all of
    them, also before any is decoded.
    """
    opened = _all_opened(pictures, config)
    check_sizes([(image.height, image.width) for image in opened])
    return [_decoded(image, picture.field) for image, picture in zip(opened, pictures, strict=True)]


def check_pixels(pictures: Sequence[SentPicture], config: HttpConfig) -> None:
    """Read the heads of all pictures of a request. Raises BadField as `pixels_of` of them together."""
    _all_opened(pictures, config)


def _all_opened(pictures: Sequence[SentPicture], config: HttpConfig) -> list[Image]:
    opened, num_pixels = [], 0
    for picture in pictures:
        image = _opened(picture, config)
        num_pixels += image.width * image.height
        if num_pixels > (limit := config.max_image_pixels):
            raise BadField(
                picture.field, f"{image.width} x {image.height} pixels: the images of a request may have {limit} "
                "together (max_image_pixels)"
            )  # fmt: skip
        opened.append(image)
    return opened


def _opened(picture: SentPicture, config: HttpConfig) -> Image:
    """Read the head of an image, which tells its size."""
    from PIL import Image

    try:
        data = binascii.a2b_base64(picture.data, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise BadField(picture.field, f"is not base64: {error}") from None
    for marker, most, what in _MOST_PARTS if data.startswith(b"\xff\xd8") else ():
        if (num := data.count(marker)) > most:
            raise BadField(picture.field, f"is a JPEG of {num} {what}, more than {most}")
    try:
        image: Any = Image.open(io.BytesIO(data), formats=_FORMATS)
        # Without a walk over all frames. A camera's photo may have a small copy behind it (MPO), which is not shown.
        is_animated = getattr(image, "is_animated", False) and image.format != "MPO"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadField(picture.field, f"{error} (max_image_pixels is {config.max_image_pixels})") from None
    except _DAMAGED as error:
        raise BadField(picture.field, _said(f"is no image of a known format ({', '.join(_FORMATS)})", error)) from None
    if is_animated:
        raise BadField(picture.field, "is an animation: send one image")
    found: Image.Image = image
    return found


def _decoded(image: Image, field: str) -> Image:
    from PIL import Image, ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, *_DAMAGED) as error:
        raise BadField(field, _said("cannot be decoded", error)) from None


def _said(what: str, error: Exception) -> str:
    """Return what an error says of an image, without the object that it names."""
    said = str(error).partition(" <_io")[0].strip()
    return f"{what}: {said[:200]}" if said and "cannot identify" not in said else what
