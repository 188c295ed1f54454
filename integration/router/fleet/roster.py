"""What was changed about a router's workers at run time, on disk: so that it is so again after a crash.

The file holds the difference to the command line: who was added, removed, and disabled. A URL that is new on the
command line is a worker whatever the file says, and one that is gone from it is none. To forget every change, delete
the file.
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
    """The change could not be written, and was not made."""


@dataclass(frozen=True)
class Changes:
    """URLs, each list without repetition."""

    configured: tuple[str, ...] = ()  # the command line that the rest refers to
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # of the configured ones
    disabled: tuple[str, ...] = ()

    def under(self, configured: Sequence[str]) -> Changes:
        """The same with another command line: what is new on it was not removed."""
        added = tuple(url for url in self.added if url not in configured)
        removed = tuple(url for url in self.removed if url in self.configured and url in configured)
        known = {*configured, *added} - {*removed}
        return Changes(tuple(configured), added, removed, tuple(url for url in self.disabled if url in known))

    @property
    def workers(self) -> tuple[str, ...]:
        return (*(url for url in self.configured if url not in self.removed), *self.added)


class Roster:
    """The changes, in a file beside the update journal, whose lock keeps it to one router."""

    def __init__(self, path: Path | None, configured: Sequence[str]) -> None:
        """path None: nothing outlives the router. Raises ValueError for a file that cannot be understood."""
        self._path = path
        self.changes = _read(path).under(configured) if path is not None else Changes(tuple(configured))
        for what in ("added", "removed", "disabled"):
            if urls := getattr(self.changes, what):
                logger.warning("%s at run time, says %s: %s", what, path, ", ".join(urls))

    def add(self, url: str, disabled: bool) -> None:
        """Methods write and sync before they return; call them in a thread. All raise RosterUnwritable."""
        now = self.changes
        added = now.added if url in now.configured else _with(now.added, url)
        now = replace(now, added=added, removed=_without(now.removed, url))
        self._write(replace(now, disabled=(_with if disabled else _without)(now.disabled, url)))

    def remove(self, url: str) -> None:
        now = self.changes
        removed = _with(now.removed, url) if url in now.configured else now.removed
        added, disabled = _without(now.added, url), _without(now.disabled, url)
        self._write(replace(now, added=added, removed=removed, disabled=disabled))

    def set_disabled(self, urls: Iterable[str], disabled: bool) -> None:
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
    except (ValueError, TypeError, AttributeError) as error:
        remedy = "delete it to begin with the workers of the command line"
        raise ValueError(f"the changes to the workers in {path} cannot be understood ({error}): {remedy}") from None
