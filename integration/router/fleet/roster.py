"""The changes to a router's workers at run time, on disk, so that they hold again after a restart.

The file has the difference to the command line: workers that were added, removed and disabled. A URL that is new on the
command line is a worker, also if the file lists it as removed; a URL that is no longer on it is not a worker. To drop
all changes, delete the file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..config import worker_url
from .durable_file import replace_file

logger = logging.getLogger(__name__)


class RosterUnwritable(OSError):
    """The change could not be written, so it was not made."""


@dataclass(frozen=True)
class Changes:
    """The changes as lists of URLs without repetition."""

    configured: tuple[str, ...] = ()  # the command line to which the other lists refer
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # of the configured ones
    disabled: tuple[str, ...] = ()

    def under(self, configured: Sequence[str]) -> Changes:
        """Apply the changes to another command line. URLs that are new on it do not count as removed."""
        added = tuple(url for url in self.added if url not in configured)
        removed = tuple(url for url in self.removed if url in self.configured and url in configured)
        known = {*configured, *added} - {*removed}
        return Changes(tuple(configured), added, removed, tuple(url for url in self.disabled if url in known))

    @property
    def workers(self) -> tuple[str, ...]:
        """URLs of all workers: the configured ones that were not removed, then the added ones."""
        return (*(url for url in self.configured if url not in self.removed), *self.added)


class Roster:
    """The changes, in a file beside the update journal, whose lock also protects this file."""

    def __init__(self, path: Path | None, configured: Sequence[str]) -> None:
        """Read the file, or keep the changes in memory only if path is None. Raises ValueError for an invalid file."""
        self._path = path
        self.changes = _read(path).under(configured) if path is not None else Changes(tuple(configured))
        for what in ("added", "removed", "disabled"):
            if urls := getattr(self.changes, what):
                logger.warning("%s at run time, says %s: %s", what, path, ", ".join(urls))

    def add(self, url: str, disabled: bool) -> None:
        """Add a worker. This and the next methods block on the disk: call them in a thread. All raise
        RosterUnwritable."""
        now = self.changes
        added = now.added if url in now.configured else _with(now.added, url)
        now = replace(now, added=added, removed=_without(now.removed, url))
        self._write(replace(now, disabled=(_with if disabled else _without)(now.disabled, url)))

    def remove(self, url: str) -> None:
        """Remove a worker."""
        now = self.changes
        removed = _with(now.removed, url) if url in now.configured else now.removed
        added, disabled = _without(now.added, url), _without(now.disabled, url)
        self._write(replace(now, added=added, removed=removed, disabled=disabled))

    def set_disabled(self, urls: Iterable[str], disabled: bool) -> None:
        """Disable or enable workers."""
        now = self.changes.disabled
        for url in urls:
            now = (_with if disabled else _without)(now, url)
        self._write(replace(self.changes, disabled=now))

    def _write(self, changes: Changes) -> None:
        if self._path is not None and changes != self.changes:
            text = json.dumps(asdict(changes))
            try:
                replace_file(self._path, text)
            except OSError as error:
                raise RosterUnwritable(f"{self._path} cannot be written: {error}") from error
        self.changes = changes


def _with(urls: tuple[str, ...], url: str) -> tuple[str, ...]:
    return urls if url in urls else (*urls, url)


def _without(urls: tuple[str, ...], url: str) -> tuple[str, ...]:
    return tuple(one for one in urls if one != url)


def _read(path: Path) -> Changes:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Changes(**{name: tuple(map(worker_url, urls)) for name, urls in values.items()})
    except FileNotFoundError:
        return Changes()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        remedy = "delete it to begin with the workers of the command line"
        raise ValueError(f"the changes to the workers in {path} cannot be understood ({error}): {remedy}") from None
