"""Folders that appear whole or not at all, even if the process that writes them is killed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .claims import claimed_folder


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a new folder to be filled. It gets the name `path` when the block ends and is removed when the block
    raises.

    Its files are on the disk before it has that name. Raises ValueError where `path` exists already. The parts of
    processes that were killed are removed first.
    """
    target = Path(path)
    if target.exists():
        raise ValueError(f"{target} exists already")
    with partial_folder(target) as partial:
        yield partial
        complete_folder(partial)
        partial.rename(target)
    flush(target.parent)


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside `target`, to be filled and renamed to it; otherwise it is removed at the end.

    An OSError that names no file gets the name of the target.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with claimed_folder(target.with_name(f".{target.name}.partial-{secrets.token_hex(8)}")) as partial:
            yield partial
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(target)
        raise


def num_bytes_beside(target: Path) -> int:
    """Return how many bytes the parts of `target` have that are being filled."""
    found = 0
    with suppress(OSError):  # of a part that has just got another name
        for file in target.parent.glob(f".{target.name}.partial-*/*"):
            found += file.stat().st_size
    return found


def complete_folder(folder: Path, on_file: Callable[[], object] = lambda: None) -> None:
    """Let those read the tensors of a new folder who may read the folder, and flush it. on_file: as in `flush_folder`.

    The library of safetensors writes files that their owner alone may read, whatever the umask.
    """
    allowed = folder.stat().st_mode & 0o666  # mkdir has followed the umask
    for file in folder.glob("*.safetensors"):
        if file.stat().st_mode & 0o777 != allowed:  # some file systems have no permissions to change
            file.chmod(allowed)
    flush_folder(folder, on_file)


def flush_folder(folder: Path, on_file: Callable[[], object] = lambda: None) -> None:
    """Flush the files of a folder, and then their names, to the disk. on_file: is called after each of them."""
    for file in sorted(folder.iterdir()):
        flush(file)
        on_file()
    flush(folder)


def flush(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
