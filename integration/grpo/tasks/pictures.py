"""Pictures in prompts: those of rows and of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Picture = Any  # a path, or an image of Pillow
_KEYS = ("image", "path")  # of a part of a message that is a picture


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Picture | None]:
    """Return the pictures of messages in their order; None for a part that names none."""
    return [next((part[key] for key in _KEYS if key in part), None) for part in _parts(messages)]


def placed(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """Return messages with these pictures in their parts of the type "image"; where they have none, before the text of
    the first user's message. Raises ValueError where the numbers differ."""
    found = [dict(message) for message in messages]
    num = sum(1 for _ in _parts(messages))
    if not num and pictures:
        first = next((at for at, message in enumerate(found) if message["role"] == "user"), 0)
        content = found[first]["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        found[first]["content"] = [*({"type": "image"} for _ in pictures), *texts]
    elif num != len(pictures):
        raise ValueError(f"the messages have places for {num} pictures, and there are {len(pictures)}")
    rest = iter(pictures)
    for message in found:
        if isinstance(message["content"], list):
            message["content"] = [
                {**part, "image": next(rest)} if part.get("type") == "image" else part for part in message["content"]
            ]
    return found


def picture_size(picture: Picture) -> int:
    """Return the number of pixels of a picture. Reads no more of a file than its head."""
    if not isinstance(picture, str):
        return int(picture.width * picture.height)
    with _image_module().open(picture) as image:
        return int(image.width * image.height)


def opened(picture: Picture) -> Any:
    """Return a picture as Pillow's image, upright as its camera held it and in RGB, as the server decodes it. Raises
    ValueError for a file that is none."""
    try:
        if not isinstance(picture, str):
            return _upright(picture)
        with _image_module().open(picture) as image:
            return _upright(image)
    except OSError as error:
        raise ValueError(f"{picture} is no picture that can be read: {error}") from error


def _parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") == "image"
    ]


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


def _image_module() -> Any:
    try:
        from PIL import Image  # of Pillow, which text does not need
    except ModuleNotFoundError as error:
        raise ValueError("Pillow must be installed for prompts with pictures: pip install pillow") from error
    return Image
