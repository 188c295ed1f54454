"""The files of a processor of images beside a model's weights and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

_NAMES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")


def copy_processor(source: Path, folder: Path) -> None:
    """Copy what the folder of a model has of a processor into that of the trained one, which lacks it."""
    for name in _NAMES:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
