"""The index of digests beside checkpoints: `digests.json`, which says what weights each folder holds.

A run of the job writes it; for other folders a replay computes the digests once and writes it, where it may. A digest
belongs to a dtype, since the bytes of weights that were rounded are others. An entry outlives its folder, so that one
can say that weights were there.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "digests.json"
FORMAT = 1


@dataclass(frozen=True)
class IndexedWeights:
    """One entry of the index."""

    folder: str  # relative to the index, "." for its own folder; absolute for weights elsewhere
    digest: str
    dtype: str  # of the engine whose weights had the digest
    version: str | None = None  # that they had there


def read_index(folder: Path) -> list[IndexedWeights]:
    """Read the index of a folder; empty where there is none. Raises ValueError naming a file that holds something
    else."""
    path = folder / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, not {FORMAT}")
        return [IndexedWeights(**entry) for entry in values["weights"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of digests: {error}") from error


def add_to_index(folder: Path, entries: Iterable[IndexedWeights]) -> None:
    """Add entries at the end of the index of a folder, and remove those of the same folder, dtype and version: so the
    last one of a folder says what it holds. Several programs may add to one index. Raises OSError where it cannot be
    written, and ValueError as `read_index`."""
    added = {(entry.folder, entry.dtype, entry.version): entry for entry in entries}
    path, partial = folder / FILE, folder / f".{FILE}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    with _locked(folder):
        kept = [one for one in read_index(folder) if (one.folder, one.dtype, one.version) not in added]
        values: Mapping[str, Any] = {"format": FORMAT, "weights": [asdict(entry) for entry in (*kept, *added.values())]}
        try:
            partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other programs from writing the index of a folder, where its file system can lock one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
