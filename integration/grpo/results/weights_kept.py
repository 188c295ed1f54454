"""The files of a run that say with what its samples can be proven: `engine.json`, and the index of digests.

`engine.json` has the settings and the guarantee of the engines, and the folder that the model came from. The index
(`integration/replay/digest_index.py`) names the weights of the first version, of every checkpoint and of the saved
models by their digests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...failures import files_of
from ...replay.digest_index import FILE, IndexedWeights, add_to_index, read_index

if TYPE_CHECKING:
    from ....rollout.config import EngineConfig
    from ....rollout.receipt import Guarantee

logger = logging.getLogger(__name__)

RUN_ENGINE = "engine.json"
FORMAT = 1


class WeightsKept:
    """Writer of these files. One rank has it. Its methods raise FileFailed; an index that holds something else, which
    another program may have written, is named in the log, and the run goes on without it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Name the folder of a run, and the dtype of its model."""
        self._folder, self._dtype = folder, dtype
        self._digest: str | None = None  # of the present weights
        self._versions: list[str] = []  # that they have had

    def write_engine(self, config: EngineConfig, guarantee: Guarantee, model: Path) -> None:
        """Write what the run's engines are. model: the folder that the first weights came from."""
        values = {"format": FORMAT, "model": str(model.resolve()), "engine": asdict(config), "guarantee": guarantee}
        path = self._folder / RUN_ENGINE
        with files_of(path):
            path.write_text(json.dumps(values, indent=1, default=dict) + "\n", encoding="utf-8")

    def follow(self, version: str, digest: str | None) -> None:
        """Note the version that the weights have since a commit. Weights that a step has left as they were have several
        versions: all of them are in the index, whichever of them is saved."""
        if digest is None or digest != self._digest:
            self._digest, self._versions = digest, []
        self._versions.append(version)
        if digest is not None and len(self._versions) > 1:
            with files_of(self._folder / FILE, "read"), self._without(version):
                held = {entry.folder: entry.digest for entry in read_index(self._folder)}  # the last one counts
                self._write([name for name, its in held.items() if its == digest], [version], digest)

    def add(self, path: Path, version: str, digest: str | None) -> None:
        """Note that a folder holds the weights of a version. digest: None where none was computed."""
        if digest is not None:
            inside = path.is_relative_to(self._folder)
            name = path.relative_to(self._folder).as_posix() if inside else str(path.resolve())
            same = self._versions if digest == self._digest else []
            self._write([name], [*dict.fromkeys((*same, version))], digest)

    def _write(self, names: Sequence[str], versions: Sequence[str], digest: str) -> None:
        entries = [IndexedWeights(name, digest, self._dtype, version) for name in names for version in versions]
        with files_of(self._folder / FILE), self._without(versions[-1]):
            add_to_index(self._folder, entries)

    @contextmanager
    def _without(self, version: str) -> Iterator[None]:
        """Go on where the index that the block is about is none."""
        try:
            yield
        except ValueError as error:
            logger.warning("%s: `lockstep replay` may find no weights of version %s by their receipts", error, version)


def read_run_engine(folder: Path) -> Mapping[str, Any]:
    """Read `engine.json` of a run. Raises ValueError naming it."""
    path = folder / RUN_ENGINE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, not {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not say what the run's engines are: {error}") from error
    return values
