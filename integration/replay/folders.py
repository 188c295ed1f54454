"""Weights in folders, found by their digests: a model folder, the folder of a run, or a folder of checkpoints."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...rollout.engine import Engine
from ...weight_sync.errors import WeightSyncError
from .digest_index import FILE, IndexedWeights, add_to_index, read_index
from .present import PresentWeights

logger = logging.getLogger(__name__)

_STATE = "state.json"  # of a checkpoint of the job, whose optimizer lies beside its model
_MODEL = "model.safetensors"
_STEP = re.compile(r"step-0*(\d+)")
_PLACES = (".", "model", "best", "checkpoints/*", "*")  # of weights under a folder


@dataclass(frozen=True)
class WeightFolder:
    """One folder of weights."""

    path: Path
    index: Path  # the folder whose index has its digest

    @property
    def name(self) -> str:
        """Its name in the index: relative, or, of weights behind a link out of that folder, absolute."""
        if self.path == self.index:
            return "."
        is_inside = self.path.is_relative_to(self.index)
        return (self.path.relative_to(self.index) if is_inside else self.path).as_posix()

    @property
    def is_checkpoint(self) -> bool:
        """Whether the job has written it, beside the state of its optimizer."""
        return (self.path / _STATE).is_file()

    @property
    def version(self) -> str | None:
        """The version that its weights had in their run; None: not known."""
        match = _STEP.fullmatch(self.path.name)
        return match[1] if match and self.is_checkpoint else None

    @property
    def is_newer_than_index(self) -> bool:
        """Whether weights came here after the index was written, by the time of change, which no copy keeps."""
        paths = [*self.path.glob("*.safetensors"), *([self.path] if self.path != self.index else [])]
        written = (self.index / FILE).stat().st_ctime_ns
        return any(path.stat().st_ctime_ns >= written for path in paths)


def weight_folders(path: str | Path) -> list[WeightFolder]:
    """Find the folders of weights at or under a path. Raises ValueError where there are none."""
    if not Path(path).is_dir():
        raise ValueError(f"{path} is no folder of weights")
    root = Path(path).resolve()
    found: dict[Path, WeightFolder] = {}
    for place in _PLACES:
        for folder in sorted(root.glob(place)) if place != "." else [root]:
            is_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
            is_checkpoint = (folder / _STATE).is_file() and (folder / _MODEL).is_file()
            if folder.is_dir() and not folder.name.startswith(".") and (is_model or is_checkpoint):
                found.setdefault(folder.resolve(), WeightFolder(folder.resolve(), root))
    if not found and not (root / FILE).is_file():
        raise ValueError(f"{path} holds no weights: no config.json with safetensors, and no checkpoint of the job")
    return list(found.values())


def model_folder(paths: Iterable[str | Path]) -> Path | None:
    """Return the first folder at or under these paths that a model can be loaded from, or that a run was begun from."""
    for path in paths:
        for folder in weight_folders(path):
            if (folder.path / "config.json").is_file():
                return folder.path
        for entry in read_index(Path(path).resolve()):
            if (Path(path, entry.folder) / "config.json").is_file():
                return Path(path, entry.folder).resolve()
    return None


class LoadsWeights(Protocol):
    """A service, as far as a replay loads weights with it."""

    engine: Engine

    def present_digest(self) -> str:
        """Compute the digest of the weights as they are now, and set it where they had none."""
        ...

    def update_weights_from_disk(self, model_path: str | Path, *, weight_version: str | None = None) -> object:
        """Read a folder of safetensors."""
        ...

    def update_weights_from_named_tensors(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, weight_version: str | None = None
    ) -> object:
        """Copy tensors of this process."""
        ...

    def commit_implicit_update(self) -> None:
        """Commit what was read."""
        ...


class FolderWeights:
    """The weights of some folders for an engine that owns its model, each loaded when its digest is asked for."""

    def __init__(
        self,
        service: LoadsWeights,
        paths: Sequence[str | Path],
        wanted: Collection[str],
        on_folder: Callable[[Path], object] = lambda path: None,
    ) -> None:
        """Find the folders of the wanted digests: by the indexes first, and where these know too little, by loading the
        folders that no index names, then those that are newer than their index. on_folder: called before a folder is
        loaded to compute its digest."""
        self._service = service
        self._dtype = str(service.engine.model.dtype).removeprefix("torch.")
        self._by_digest: dict[str, Path] = {}
        self._versions: dict[str, set[str]] = {}
        self._gone: dict[str, str] = {}  # why no folder has weights of this digest any more
        present = PresentWeights(service)
        self._present = present.digest
        roots = [Path(os.path.realpath(path)) for path in paths]  # resolve raises on links that lead in a circle
        unknown: list[WeightFolder] = []
        newer: list[WeightFolder] = []
        for root in roots:
            entries = [entry for entry in read_index(root) if entry.dtype == self._dtype]
            newest = {
                entry.folder: entry.digest for entry in entries
            }  # a folder whose weights were replaced has several
            for entry in entries:
                self._know(entry, (root / entry.folder).resolve(), newest[entry.folder])
            for folder in weight_folders(root):
                if folder.name not in newest:
                    unknown.append(folder)
                elif folder.is_newer_than_index:
                    newer.append(folder)
        missing = set(wanted) - {self._present} - set(self._by_digest)
        for folder in unknown:
            if not missing:
                break
            self._read(folder, on_folder)
            missing.discard(self._present)
        if missing:
            for folder in newer:  # all of them: none is newer than the index that each of them changes
                self._read(folder, on_folder)

    def _read(self, folder: WeightFolder, on_folder: Callable[[Path], object]) -> None:
        """Load a folder, and note the digest of its weights, in the index too."""
        on_folder(folder.path)
        try:
            self._load(folder.path, None)
        except (ValueError, WeightSyncError, OSError) as error:
            logger.warning("%s is passed over: %s", folder.path, error)
            return
        for digest in [digest for digest, path in self._by_digest.items() if path == folder.path]:
            del self._by_digest[digest]
            self._gone[digest] = f"{folder.path} had them, and holds others now"
        entry = IndexedWeights(folder.name, self._present, self._dtype, folder.version)
        self._know(entry, folder.path, entry.digest)
        try:
            add_to_index(folder.index, [entry])
        except OSError as error:
            logger.info("%s keeps no index of digests: %s", folder.index, error)

    def _know(self, entry: IndexedWeights, path: Path, newest: str) -> None:
        """Note an entry of the index. newest: the digest of the weights that its folder was given last."""
        if entry.version is not None:
            self._versions.setdefault(entry.digest, set()).add(entry.version)
        if not path.is_dir():
            self._gone[entry.digest] = f"{path} had them, and is there no more"
        elif entry.digest == newest:
            self._by_digest.setdefault(entry.digest, path)
        else:
            self._gone.setdefault(entry.digest, f"{path} had them, and holds others now")

    def has(self, digest: str) -> bool:
        """See `WeightSource.has`."""
        return digest == self._present or digest in self._by_digest

    def versions(self, digest: str) -> Collection[str]:
        """See `WeightSource.versions`."""
        return self._versions.get(digest, ())

    def hint(self, digest: str) -> str:
        """See `WeightSource.hint`."""
        if digest in self._gone:
            return f": {self._gone[digest]}"
        versions = sorted(
            {version for known in self._by_digest for version in self._versions.get(known, ())}, key=_order
        )
        return f"; those of versions {', '.join(versions)} are" if versions else ""

    def switch(self, digest: str) -> None:
        """See `WeightSource.switch`."""
        if digest != self._present:
            path = self._by_digest[digest]
            self._load(path, next(iter(self._versions.get(digest, ())), None))
            if self._present != digest:
                raise ValueError(f"{path} holds weights of digest {self._present} now, and not {digest}: remove {FILE}")

    def _load(self, path: Path, version: str | None) -> None:
        """Load a folder's weights, commit them, and note their digest."""
        service, engine = self._service, self._service.engine
        label = version or path.name
        if (path / _STATE).is_file():
            dtypes = {name: tensor.dtype for name, tensor in engine.weights.resident_tensors()}
            service.update_weights_from_named_tensors(_stored(path / _MODEL, dtypes), weight_version=label)
        else:
            service.update_weights_from_disk(path, weight_version=label)
        service.commit_implicit_update()
        digest = engine.weight_digest
        assert digest is not None, "an update has a digest"
        self._present = digest


def _order(version: str) -> tuple[int, str]:
    """Return the key by which versions are listed: numbers by their value."""
    return (int(version) if version.isdecimal() else -1, version)


def _stored(path: Path, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file one by one, in the engine's dtypes. Raises ValueError naming a file that is damaged,
    or of adapters."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if others := sorted(set(names) - dtypes.keys()):
                raise ValueError(
                    f"{path} holds tensors that the model has not ({others[0]}, ...): a checkpoint of adapters is "
                    "proven with them merged into their base, in one folder"
                )
            for name in names:
                yield name, file.get_tensor(name).to(dtypes[name])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
