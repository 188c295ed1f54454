"""The journal of the update in progress, on disk, so that a router knows after a kill that an update was not finished.

The file exists from before the first worker is held until all workers have the update. An entry that is found at the
start, or kept after a failure, is unresolved: it is not known whether all workers have the same weights.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..fleet.durable_file import remove_file, replace_file

logger = logging.getLogger(__name__)

_LATEST = 1 << 40  # seconds since the epoch


class JournalUnwritable(OSError):
    """The journal cannot be written, so no update may begin."""


@dataclass(frozen=True)
class TargetRecord:
    """The state of a worker before the update."""

    url: str
    disabled: bool  # by an operator
    weight_version: str | None
    process: float | int | str | None = None  # the start of its process; None: it was not known


@dataclass(frozen=True)
class JournalEntry:
    """One update in the journal."""

    verb: str
    started_at: float  # seconds since the epoch
    targets: tuple[TargetRecord, ...]  # empty: the file could not be read, and the update may concern all workers
    session: bool = False  # a weight-update session is open at the workers
    failure: str | None = None  # reason for which it is unresolved; None: in progress

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.time() - self.started_at)

    def concerns(self, url: str) -> bool:
        """Return whether the update may have changed the worker at this URL."""
        return not self.targets or any(target.url == url for target in self.targets)

    def and_of(self, others: Sequence[TargetRecord]) -> JournalEntry:
        """Return the entry of an update that concerns these workers too."""
        return replace(self, targets=self.targets and (*self.targets, *(o for o in others if not self.concerns(o.url))))


class UpdateJournal:
    """A journal of at most one entry, in a file that only its owner can read. Its methods block on the disk: call them
    in a thread.

    Raises ValueError where all users can write in the folder, or another router uses the file; OSError, with its path,
    for a file that cannot be read or locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing = threading.Lock()  # one thread at a time has the file
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & stat.S_IWOTH:
            raise ValueError(f"the journal must not be in {folder}: everybody can write there. Choose another folder")
        self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"another router uses the journal {path}: give each one its own") from None
        except OSError as error:
            os.close(self._lock)
            raise OSError(
                error.errno,
                f"the journal {path} cannot be locked ({error.strerror}): choose a folder whose file system has locks",
            ) from error
        try:
            self.entry = self._read()
        except OSError:
            os.close(self._lock)
            raise
        if self.entry is not None:
            logger.error("journal %s: %s", path, self.entry.failure)

    @property
    def is_unresolved(self) -> bool:
        """Whether there is an entry of an update that failed or was cut off."""
        return self.entry is not None and self.entry.failure is not None

    @property
    def is_open(self) -> bool:
        """Whether there is an entry of an update in progress."""
        return self.entry is not None and self.entry.failure is None

    def write(self, entry: JournalEntry) -> None:
        """Replace the entry, and sync it to the disk. Raises JournalUnwritable; then the old entry is kept."""
        with self._writing:
            try:
                replace_file(self.path, json.dumps(asdict(entry)))
            except OSError as error:
                raise JournalUnwritable(f"the journal {self.path} cannot be written: {error}") from error
            self.entry = entry

    def fail(self, failure: str) -> None:
        """Mark the entry as unresolved, in memory only. Does not block."""
        assert self.entry is not None
        self.entry = replace(self.entry, failure=failure)

    def save(self) -> None:
        """Sync the present entry to the disk. Logs an error of the disk: the older entry there means the same."""
        with self._writing:
            if self.entry is None:  # an operator was faster
                return
            try:
                replace_file(self.path, json.dumps(asdict(self.entry)))
            except OSError as error:
                logger.error(
                    "the journal %s cannot be written: %s. What stands there is as good: an entry that is found at the "
                    "start is unresolved", self.path, error,
                )  # fmt: skip

    def clear(self) -> None:
        """Remove the entry, because all workers have the same weights. Raises JournalUnwritable; then the entry is
        kept."""
        with self._writing:
            try:
                remove_file(self.path)
            except OSError as error:
                raise JournalUnwritable(f"the journal {self.path} cannot be cleared: {error}") from error
            self.entry = None

    def close(self) -> None:
        """Release the lock of the file."""
        os.close(self._lock)

    def report(self) -> dict[str, object]:
        """Return the answer of /weight_update_journal. Changes nothing."""
        return {"unresolved": self.is_unresolved, "entry": None if self.entry is None else asdict(self.entry)}

    def _read(self) -> JournalEntry | None:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            return JournalEntry("?", time.time(), (), failure=f"the journal could not be read: {error}")
        try:
            targets = tuple(TargetRecord(**target) for target in values.pop("targets"))
            entry = JournalEntry(targets=targets, **values)
            _check(entry)
        except (TypeError, KeyError, AttributeError) as error:
            return JournalEntry("?", time.time(), (), failure=f"the journal could not be understood: {error}")
        why = entry.failure or "the router ended in the middle of it"
        return replace(entry, failure=why)


def _check(entry: JournalEntry) -> None:
    """Raise TypeError naming every field of an entry, or of its targets, that has a value of another kind."""
    is_time = isinstance(entry.started_at, int | float) and not isinstance(entry.started_at, bool)
    right = {
        "verb": isinstance(entry.verb, str),
        "started_at": is_time and 0 <= entry.started_at < _LATEST,
        "session": isinstance(entry.session, bool),
        "failure": isinstance(entry.failure, str | None),
        "url": all(isinstance(target.url, str) for target in entry.targets),
        "disabled": all(isinstance(target.disabled, bool) for target in entry.targets),
        "weight_version": all(isinstance(target.weight_version, str | None) for target in entry.targets),
        "process": all(isinstance(target.process, float | int | str | None) for target in entry.targets),
    }
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise TypeError(f"{', '.join(wrong)} cannot be what it has there")
