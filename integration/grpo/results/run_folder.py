"""The folder of a run: its one owner, its beginning, and the leftovers of a run that was killed.

The owner is rank 0 of one job. It holds a lock (flock) on the file `.NAME.lock` beside the folder `NAME`, which has its
process, host and start. The kernel drops the lock with the process, so that a dead owner blocks no other job.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....weight_sync.disk.claims import close_locked, open_locked, remove_leftovers
from ....weight_sync.same_host.segment import remove_stale_segments
from ...failures import files_of

_SEGMENTS = Path("/dev/shm")
REMOVED = ".removed"  # end of the hidden name of a folder whose successor gets its name
SOCKETS = "lockstep-job-"  # begin of the names of folders for sockets, in the folder for temporary files


@contextmanager
def owned_folder(folder: Path, *, resume: bool) -> Iterator[None]:
    """Own the folder of a run for the block, and prepare it. Raises ValueError, naming the owner, if it has one."""
    path = folder.with_name(f".{folder.name}.lock")
    with files_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_locked(path)
        if lock is None:
            raise ValueError(f"{folder} is used by {_read_owner(path)}")
    try:
        with files_of(path):
            _write_owner(lock)
        prepare_folder(folder, resume=resume)
        yield
    finally:
        close_locked(lock)


def _write_owner(lock: int) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(owner).encode(), 0)


def _read_owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on host {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not written its name yet"


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Make the run's folder, and remove the leftovers of killed runs. A model that a killed run was about to replace
    gets its name back.

    An existing folder is used with `resume` and renamed without; it is never overwritten.
    """
    with files_of(folder):
        if folder.exists() and not resume:
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            shutil.move(folder, aside)
            say(f"an earlier run of this name was moved to {aside}")
        for old in folder.glob(f".*{REMOVED}"):  # before its successor had the name: the run still has this one
            if not (named := folder / old.name[1 : -len(REMOVED)]).exists():
                old.rename(named)
        # Its owner alone writes there: a checkpoint or model without its name belongs to a process that has ended.
        hidden = [found for name in ("checkpoints", "gap") for found in (folder / name).glob(".*")]
        for unfinished in (*hidden, *folder.glob(f".*{REMOVED}")):
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink()
        remove_leftovers(folder)
        if _SEGMENTS.is_dir():
            remove_stale_segments(_SEGMENTS)
        remove_leftovers(Path(tempfile.gettempdir()), f"{SOCKETS}*")
        folder.mkdir(parents=True, exist_ok=True)


def say(text: str) -> None:
    """Print a line. A log that cannot be written does not end a run."""
    with suppress(OSError):
        print(text, flush=True)
