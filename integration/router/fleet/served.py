"""The weights that a fleet last served, in memory and on disk: a restarted router compares returning workers with them.

The file has one version, one digest, and the processes that served these weights. It is as long as the list of workers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .durable_file import replace_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """The names of a worker's weights."""

    version: str
    digest: str | None = None  # SHA-256 of all tensors; None: not known

    def are_other(self, than: Weights) -> bool:
        """Return whether they are certainly other weights: another version, or two known digests that differ."""
        return self.version != than.version or (None not in (self.digest, than.digest) and self.digest != than.digest)

    def __str__(self) -> str:
        return repr(self.version) if self.digest is None else f"{self.version!r} (digest {self.digest[:12]})"


@dataclass(frozen=True)
class Served:
    """The weights that a fleet serves, or served last, and the processes that did."""

    weights: Weights | None = None  # None: none yet
    processes: Mapping[str, float | str] = field(default_factory=dict)  # start of each process, by its worker's URL


class ServedFile:
    """The file of the weights that a fleet last served, beside the update journal, whose lock also protects it."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, or keep nothing if path is None. Raises ValueError for an invalid file."""
        self._path = path
        self.first = Served() if path is None else _read(path)  # as the router before left it
        self._kept = self._wanted = self.first
        self._writing: asyncio.Task[None] | None = None
        self._failure = ""  # as logged last

    def keep(self, served: Served) -> None:
        """Write what the fleet serves, in a thread. Does nothing where the file has it already. Called on the event
        loop; a write that fails is logged, and tried again by the next call."""
        self._wanted = served
        if self._path is None or served == self._kept or (self._writing is not None and not self._writing.done()):
            return
        self._writing = asyncio.get_running_loop().create_task(self._write(self._path))

    async def written(self) -> None:
        """Wait until the last `keep` has been written, or has failed."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self, path: Path) -> None:
        while (wanted := self._wanted) != self._kept:
            try:
                await asyncio.to_thread(replace_file, path, json.dumps(asdict(wanted)))
            except OSError as error:
                if str(error) != self._failure:
                    logger.error("%s cannot be written, so a restarted router would not know which weights the fleet "
                                 "served: %s", path, error)  # fmt: skip
                self._failure = str(error)
                return
            self._kept, self._failure = wanted, ""


def _read(path: Path) -> Served:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        weights, processes = values["weights"], values["processes"]
        read = None if weights is None else Weights(weights["version"], weights["digest"])
        if read is not None and not (isinstance(read.version, str) and isinstance(read.digest, str | None)):
            raise TypeError("the version or the digest is no text")
        if not isinstance(processes, dict) or not all(isinstance(at, float | int | str) for at in processes.values()):
            raise TypeError("the processes are no table of their starts")
    except FileNotFoundError:
        return Served()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        remedy = "delete it to accept the weights that the workers have"
        raise ValueError(f"the weights last served in {path} cannot be understood ({error!r}): {remedy}") from None
    return Served(read, processes)
