"""The folder of compiled kernels and of kept checks: `$LOCKSTEP_CACHE_DIR`, or `$XDG_CACHE_HOME/lockstep`, or
`~/.cache/lockstep`. A folder or file that another user owns or can write to is refused."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_ABANDONED_S = 3600  # no compilation takes as long


class UnsafeCache(ValueError):
    """A cache whose files another user could have put there; the message names it and the remedy."""


class NoHome(OSError):
    """This user has no home, and no other folder is set; the message names the remedy."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder's path; it may not exist. Raises NoHome where the user has none."""
    if environ.get("LOCKSTEP_CACHE_DIR"):
        return Path(environ["LOCKSTEP_CACHE_DIR"])
    home = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "lockstep"
    except RuntimeError as error:  # a user id without an entry and without $HOME, as in containers
        raise NoHome("there is no home for compiled kernels: set LOCKSTEP_CACHE_DIR to a folder") from error


def make_folder(folder: Path) -> None:
    """Make the folder, for this user alone, unless it exists. Raises OSError, and UnsafeCache."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_owner(folder)


def check_owner(path: Path) -> None:
    """Raise UnsafeCache for a folder or a file that another user owns or can write to."""
    found = path.stat()
    owner, mode = found.st_uid, stat.S_IMODE(found.st_mode)
    # Root may have filled a cache for all users of an image.
    if owner in (os.geteuid(), 0) and not mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    why = f"belongs to the user {owner}" if owner not in (os.geteuid(), 0) else f"has mode {mode:04o}"
    raise UnsafeCache(
        f"the kernel cache {path} {why}, so that another user could have put code there: "
        f"make it yours (chmod go-w, chown) or set LOCKSTEP_CACHE_DIR to a folder of your own"
    )


def remove_abandoned(path: Path) -> None:
    """Remove what processes that were killed have left beside `path` as they wrote it, in folders of its stem's name.
    Raises OSError."""
    for left in path.parent.glob(f"{path.stem}-*"):
        with suppress(FileNotFoundError):  # another process has removed it
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left)
