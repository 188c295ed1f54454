"""Claims on folders that must not outlive their process: locks by which a later process finds the leftovers of a dead
one, and never the folder of a living one, whatever its pid, namespace or host.

A claim is an empty file `NAME.lockstep-claim` beside the folder `NAME`, locked (flock) for as long as its process has
the folder. The kernel drops the lock with the process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..locked_files import close_held, hold

logger = logging.getLogger(__name__)

SUFFIX = ".lockstep-claim"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}  # of a file system


def open_locked(path: Path, flags: int = 0, *, waits: bool = False) -> int | None:
    """Open or create a file and lock it. Returns its descriptor for `close_locked`, or None where another process has
    the lock; with `waits`, waits for it. Raises OSError.

    On a file system without locks the file is opened without one, and a warning is logged.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(file)
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(file)
            raise
        logger.warning("the file system of %s has no locks (%s): other processes do not see its use", path, error)
    hold(file)
    return file


def close_locked(file: int) -> None:
    """Close a file of `open_locked`, and so release its lock. Does nothing in a forked child."""
    close_held(file)


@contextmanager
def claimed_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """Make the folder `path` for the block. At the end it is removed, unless it has got another name. The leftovers of
    dead processes in `path.parent` are removed before, so that they leave their room to it."""
    remove_leftovers(path.parent)
    claim, owner = path.with_name(path.name + SUFFIX), os.getpid()
    file = _new_claim(claim)
    try:
        path.mkdir(mode=mode)
        yield path
    finally:
        if os.getpid() == owner:  # a forked child may leave the block too
            shutil.rmtree(path, ignore_errors=True)
            claim.unlink(missing_ok=True)
            close_locked(file)


def _new_claim(path: Path) -> int:
    while True:
        file = open_locked(path, os.O_EXCL, waits=True)
        assert file is not None
        if os.fstat(file).st_nlink:
            return file
        close_locked(file)  # another process took it for a leftover before it was locked


def remove_leftovers(folder: Path, pattern: str = "*") -> list[Path]:
    """Remove the claimed folders of processes of this user that have ended; returns their paths.

    pattern: of the folders' names. Folders in use stay, and those on file systems without locks.
    """
    removed = []
    for claim in folder.glob(pattern + SUFFIX):
        path = claim.with_name(claim.name.removesuffix(SUFFIX))
        try:
            file = os.open(claim, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # another user's file, a link, or just removed: not ours to remove
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file)
            # One name: a link that another user made to a file of ours is no claim.
            if found.st_uid == os.getuid() and found.st_nlink == 1 and stat.S_ISREG(found.st_mode):
                shutil.rmtree(path, ignore_errors=True)  # refuses a link
                if not os.path.lexists(path):
                    claim.unlink(missing_ok=True)
                    removed.append(path)
        except OSError:  # its process is running, or there are no locks
            pass
        finally:
            os.close(file)
    return removed
