"""The loading of a model folder's processor for texts and images, without its part for videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.processing_utils import ProcessorMixin

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")  # that name the class


def load_processor(folder: Path) -> ProcessorMixin:
    """Load a folder's processor, whose part for videos would need torchvision. Slow.

    Raises ValueError for a folder without one, and what transformers raises for its files.
    """
    loaded: ProcessorMixin = without_videos(_class_of(folder)).from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return loaded


def _class_of(folder: Path) -> type[ProcessorMixin]:
    """Return the class of a folder's processor. Raises ValueError for a folder without one."""
    for name in _FILES:
        if (path := folder / name).is_file():
            named = json.loads(path.read_text(encoding="utf-8")).get("processor_class")
            found: type[ProcessorMixin] | None = processor_class_from_name(named) if named else None
            if found is not None:
                return found
    config = type(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    if config not in PROCESSOR_MAPPING:
        raise ValueError("no file names the class of a processor")
    known: Any = PROCESSOR_MAPPING[config]  # typed as the pairs of classes that other mappings have
    return known


def without_videos(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return a class of processors that has no part for videos, which would need torchvision."""

    class WithoutVideos(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if "video" not in name]

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos
