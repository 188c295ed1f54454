"""The weights that a fleet last served, in memory and on disk: a restarted router compares returning workers with them.

The file has one version, one digest, and the processes that served these weights, by their workers' URLs. It is as long
as the list of workers. It is about the fleet of these URLs: a router that has none of them forgets it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .durable_file import remove_file, replace_file

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
    # Start of each process, by its worker's URL; None: it reports none.
    processes: Mapping[str, float | str | None] = field(default_factory=dict)
    digest_is_due: bool = False  # an update brought them to these processes, which have not reported their digest yet

    def is_by(self, url: str, process: float | str | None) -> bool:
        """Return whether this process serves them, or served them."""
        return url in self.processes and self.processes[url] == process


class ServedFile:
    """The file of the weights that a fleet last served, beside the update journal, whose lock also protects it."""

    def __init__(self, path: Path | None, forget: bool = False) -> None:
        """Read the file, or remove it to `forget` what it has; keep nothing if path is None. Raises ValueError for an
        invalid file, OSError for one that cannot be read or removed."""
        self.path = path
        self.first = Served()  # as the router before left it
        if path is not None and forget:
            remove_file(path)
        elif path is not None:
            self.first = _read(path)
        self._kept = self._wanted = self.first
        self._writing: asyncio.Task[None] | None = None
        self._failure = ""  # as logged last

    def check(self, workers: Collection[str]) -> None:
        """Forget what the file has, where it is about none of these workers' URLs: they are another fleet. Otherwise
        log which weights it demands of them. Call it before `keep`. Raises OSError where the file cannot be removed."""
        weights, urls = self.first.weights, self.first.processes
        if self.path is None or weights is None:
            return
        if urls.keys() & set(workers):
            logger.info("the fleet last served weight version %s, says %s: a worker gets requests if it has them, or "
                        "its process served them. --forget-served accepts any", weights, self.path)  # fmt: skip
            return
        logger.warning("%s is forgotten: weight version %s was served by %s, none of which is a worker of this router",
                       self.path, weights, ", ".join(urls) or "no worker")  # fmt: skip
        remove_file(self.path)
        self.first = self._kept = self._wanted = Served()

    def keep(self, served: Served) -> None:
        """Write what the fleet serves, in a thread. Does nothing where the file has it already. Called on the event
        loop; a write that fails is logged, and tried again by the next call."""
        self._wanted = served
        if self.path is None or served == self._kept or (self._writing is not None and not self._writing.done()):
            return
        self._writing = asyncio.get_running_loop().create_task(self._write(self.path))

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
        weights, processes, is_due = values["weights"], values["processes"], values.get("digest_is_due", False)
        read = None if weights is None else Weights(weights["version"], weights["digest"])
        if read is not None and not (isinstance(read.version, str) and isinstance(read.digest, str | None)):
            raise TypeError("the version or the digest is no text")
        if not isinstance(processes, dict):
            raise TypeError("the processes are no table")
        if not all(isinstance(start, float | int | str | None) for start in processes.values()):
            raise TypeError("a process' start is no number or text")
        if not isinstance(is_due, bool):
            raise TypeError("digest_is_due is no truth value")
    except FileNotFoundError:
        return Served()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        remedy = "delete it, or start with --forget-served, to accept the weights that the workers have"
        raise ValueError(f"the weights last served in {path} cannot be understood ({error!r}): {remedy}") from None
    return Served(read, processes, is_due)
