"""Small files that are there whole or as they were before, also after a crash, and that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from ....weight_sync.disk.atomic_folder import flush


def replace_file(path: Path, text: str) -> None:
    """Give the file this text; after this it survives a crash. Raises OSError; then the old one stands."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(path)
    flush(path.parent)


def remove_file(path: Path) -> None:
    """Have it gone, also after a crash. Raises OSError."""
    path.unlink(missing_ok=True)
    flush(path.parent)
