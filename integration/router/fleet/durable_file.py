"""Small files, readable only by their owner, that have the new or the old content, never a part, also after a crash."""

from __future__ import annotations

import os
from pathlib import Path

from ....weight_sync.disk.atomic_folder import flush


def replace_file(path: Path, text: str) -> None:
    """Replace the file's text, and sync it to the disk. Raises OSError; then the old text is kept, and no part of the
    new one."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    flush(path.parent)


def remove_file(path: Path) -> None:
    """Remove the file, and sync its folder to the disk. Raises OSError."""
    path.unlink(missing_ok=True)
    flush(path.parent)
