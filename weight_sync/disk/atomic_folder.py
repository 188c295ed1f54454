"""Folders that appear whole or not at all, even if the process that writes them is killed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new folder to be filled. It gets the name `path` when the block ends and is removed when the block
    raises.

    Its files are on the disk before it has that name. Raises ValueError where `path` exists already; with `replace` the
    old folder is removed at the end instead, right before the new one gets its name.
    """
    target = Path(path)
    if target.exists() and not replace:
        raise ValueError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        yield partial
        flush_folder(partial)
        if replace and target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(target.parent)


def flush_folder(folder: Path) -> None:
    """Flush the files of a folder, and then their names, to the disk."""
    for file in sorted(folder.iterdir()):
        flush(file)
    flush(folder)


def flush(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
