"""The processor of a model's folder: it makes the tensors of images, and the tokens that stand for them in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...folder_processor import load_processor
from .kept import Made

if TYPE_CHECKING:
    from PIL.Image import Image

_OF_TEXT = ("attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")
# What transformers raises for a folder's files, and processors for images that they cannot take.
ERRORS = (OSError, ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError,
          StopIteration)  # fmt: skip


class WrongPlaces(ValueError):
    """Placeholders of a prompt that do not fit its images."""


class FolderProcessor:
    """A folder's processor, for texts and images alone. One thread at a time may use it, for its tokenizer cannot be
    used by two."""

    def __init__(self, folder: Path) -> None:
        """Load it. Slow. Raises ValueError that says what the folder lacks."""
        try:
            self._processor: Any = load_processor(folder)
        except ERRORS as error:
            said = str(error).replace(str(folder), folder.name).partition(". ")[0].partition("\n")[0][:300]
            raise ValueError(f"{folder.name} has no processor of images: {type(error).__name__}: {said}") from error
        token = getattr(self._processor, "image_token", None)
        if not isinstance(token, str) or not hasattr(self._processor, "image_processor"):
            raise ValueError(f"{type(self._processor).__name__} names no token of images: not supported")
        self.placeholder: str = token  # of one image in a text

    @property
    def chat_template(self) -> str | None:
        """The folder's chat template; None: its tokenizer has it."""
        found = self._processor.chat_template
        if isinstance(found, Mapping):
            found = found.get("default")
        return found

    def num_tokens(self, sizes: Sequence[tuple[int, int]]) -> int | None:
        """Return the number of tokens of images of these sizes, heights and widths in pixels; None: it does not tell.
        Raises ValueError."""
        tell = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if tell is None:
            return None
        try:
            return sum(tell(image_sizes=[list(size) for size in sizes])["num_image_tokens"])
        except ERRORS as error:
            raise self._refusal(error) from error

    def of_text(self, text: str, images: Sequence[Image], *, adds_special: bool) -> Made:
        """Return what the processor makes of a text with a placeholder for each image. Raises WrongPlaces where it has
        another number of them, and ValueError."""
        if (num := text.count(self.placeholder)) != len(images):
            raise WrongPlaces(f"{num} placeholders of images ({self.placeholder}) for {len(images)} images")
        found = self._call(text, images, adds_special=adds_special)
        found.pop("text_replacement_offsets", None)
        return Made(found)

    def of_ids(self, ids: list[int], images: Sequence[Image]) -> Made:
        """Return what the processor makes of images for token ids, in which each image is one placeholder, or what the
        processor makes of it. Raises WrongPlaces for anything else, and ValueError."""
        found = self._call(self.placeholder * len(images), images, adds_special=False)
        offsets = found.pop("text_replacement_offsets", None)
        if not offsets:
            raise ValueError(f"{type(self._processor).__name__} does not tell the tokens of each image: send a text")
        expanded = [self._tokens(one["replacement"]) for one in offsets[0]]
        placed = places(ids, expanded, self._placeholder_id)
        kept = {name: value for name, value in found.items() if name not in _OF_TEXT}
        ranges = _ranges(placed, expanded, self._placeholder_id)
        assert ranges is not None, "the tokens of each image were placed"
        return Made({**kept, "input_ids": placed, **self._types(placed, found)}, ranges)

    def _types(self, ids: list[int], found: Mapping[str, Any]) -> dict[str, Any]:
        names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in found]
        return {name: self._processor.create_mm_token_type_ids([ids]) for name in names}

    @cached_property
    def _placeholder_id(self) -> int:
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.placeholder))

    def _tokens(self, text: str) -> list[int]:
        return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _call(self, text: str, images: Sequence[Image], *, adds_special: bool) -> dict[str, Any]:
        try:
            return dict(
                self._processor(
                    text=[text], images=[list(images)], return_tensors="pt", add_special_tokens=adds_special,
                    return_text_replacement_offsets=True,
                )
            )  # fmt: skip
        except ERRORS as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> ValueError:
        name = type(self._processor).__name__
        return ValueError(f"{name} refuses the images: {type(error).__name__}: {str(error)[:300]}")


def places(ids: list[int], expanded: Sequence[list[int]], placeholder: int) -> list[int]:
    """Return token ids in which each image has its tokens. ids: with one placeholder for each image, or with all tokens
    of each already. Raises WrongPlaces.

    Example: `places([1, 9, 2], [[9, 9]], 9)` and `places([1, 9, 9, 2], [[9, 9]], 9)` are `[1, 9, 9, 2]`.
    """
    if _ranges(ids, expanded, placeholder) is not None:
        return ids
    num = ids.count(placeholder)
    if num != len(expanded):
        whole = sum(one.count(placeholder) for one in expanded)
        raise WrongPlaces(
            f"{num} tokens of images (id {placeholder}) for {len(expanded)} images: there must be one for each, or "
            f"{whole}, as the processor expands them"
        )
    found: list[int] = []
    images = iter(expanded)
    for id in ids:
        found += next(images) if id == placeholder else [id]
    return found


def _ranges(ids: list[int], expanded: Sequence[list[int]], placeholder: int) -> list[tuple[int, int]] | None:
    """Return the first token of each image and the one behind its last; None where token ids do not have all tokens of
    each image, in order, or have another placeholder."""
    at, found = 0, []
    for image in expanded:
        before = image.index(placeholder)  # tokens of it that may be a text's, too
        try:
            at = ids.index(placeholder, at) - before
        except ValueError:
            return None
        if at < 0 or ids[at : at + len(image)] != image:
            return None
        found.append((at, at + len(image)))
        at += len(image)
    return None if placeholder in ids[at:] else found
