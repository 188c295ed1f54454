"""The processor of a model's folder, which reads prompts with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin

from ...folder_processor import load_processor
from .pictures import Picture, opened


class PictureReader:
    """The processor of a model's folder. It is loaded when the first prompt with pictures is read."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, text: str, pictures: Sequence[Picture], *, is_whole: bool = True) -> dict[str, Any]:
        """Return what the engine takes: input_ids [1, P] and the tensors of the pictures, whose places the text has.

        is_whole: a prompt as it is, before which a tokenizer may write special tokens; else what a chat template has
        written. Raises ValueError for a picture that cannot be read, and for what the processor refuses.
        """
        processor, images = self._processor, [opened(picture) for picture in pictures]
        try:
            return dict(processor(text=[text], images=images, return_tensors="pt", add_special_tokens=is_whole))
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise ValueError(f"the processor of {self._folder} refuses {len(images)} pictures: {error}") from error

    @cached_property
    def _processor(self) -> ProcessorMixin:
        if not self._folder:
            raise ValueError("prompts with pictures need model.path: the built model runs on text")
        try:
            folder = Path(self._folder)
            found = (
                load_processor(folder)
                if folder.is_dir()
                else AutoProcessor.from_pretrained(self._folder, trust_remote_code=False)
            )
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{self._folder} has no processor for prompts with pictures: {error}") from error
        if not isinstance(found, ProcessorMixin):
            raise ValueError(f"{self._folder} has no processor for prompts with pictures, only {type(found).__name__}")
        return found
