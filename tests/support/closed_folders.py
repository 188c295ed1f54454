"""Folders that this process may not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Forbid the folder to this process in the block, also to root, which then is nobody. Import all modules before."""
    is_root = os.geteuid() == 0
    folder.chmod(0)
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
