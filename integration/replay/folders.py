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
from ...rollout.proving.prover import NoWeights
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
        """A version that its weights had in their run, as its name says; None: it says none. Weights that a step left
        as they were had further ones."""
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

    def commit_implicit_update(self, *, or_roll_back: bool = False) -> None:
        """Commit what was read. or_roll_back: roll it back where it cannot be committed."""
        ...


class FolderWeights:
    """The weights of some folders for an engine that owns its model, each loaded when its digest is asked for."""

    def __init__(
        self,
        service: LoadsWeights,
        paths: Sequence[str | Path],
        wanted: Collection[str],
        on_folder: Callable[[Path], object] = lambda path: None,
        *,
        origin: Path | None = None,
    ) -> None:
        """Find the folders of the wanted digests: by the indexes first, and where these know too little, by loading the
        folders that no index names, then those that are newer than their index. on_folder: called before a folder is
        loaded to compute its digest. origin: the folder that the present weights came from."""
        self._service, self._on_folder = service, on_folder
        self._dtype = str(service.engine.model.dtype).removeprefix("torch.")
        self._by_digest: dict[str, list[Path]] = {}  # the first ones are tried first
        self._failed: dict[str, str] = {}  # why none of these folders gave the weights
        self._versions: dict[str, set[str]] = {}  # as the indexes say
        self._labels: dict[str, set[str]] = {}  # as names of folders say: maybe not all
        self._gone: dict[str, str] = {}  # why no folder has weights of this digest any more
        present = PresentWeights(service)
        self._present = present.digest
        if origin is not None:
            self._by_digest[self._present] = [Path(os.path.realpath(origin))]
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
        self._unread = [*reversed(newer), *reversed(unknown)]  # the last one is the next
        missing = set(wanted) - {self._present} - set(self._by_digest)
        while missing and len(self._unread) > len(newer):
            self._read(self._unread.pop())
            missing.discard(self._present)
        while missing and self._unread:  # all of them: none is newer than the index that each of them changes
            self._read(self._unread.pop())

    def _read(self, folder: WeightFolder) -> None:
        """Load a folder, and note the digest of its weights, in the index too."""
        self._on_folder(folder.path)
        try:
            self._load(folder.path, None)
        except (ValueError, WeightSyncError, OSError) as error:
            logger.warning("%s is passed over: %s", folder.path, error)
            return
        for digest in [digest for digest, paths in self._by_digest.items() if folder.path in paths]:
            self._by_digest[digest].remove(folder.path)
            if not self._by_digest[digest]:
                del self._by_digest[digest]
                self._gone[digest] = f"{folder.path} had them, and holds others now"
        entry = IndexedWeights(folder.name, self._present, self._dtype)
        self._know(entry, folder.path, entry.digest)
        try:
            add_to_index(folder.index, [entry])
        except OSError as error:
            logger.info("%s keeps no index of digests: %s", folder.index, error)

    def _know(self, entry: IndexedWeights, path: Path, newest: str) -> None:
        """Note an entry of the index. newest: the digest of the weights that its folder was given last."""
        if entry.version is not None:
            self._versions.setdefault(entry.digest, set()).add(entry.version)
        elif (label := WeightFolder(path, path).version) is not None:
            self._labels.setdefault(entry.digest, set()).add(label)
        if not path.is_dir():
            self._gone[entry.digest] = f"{path} had them, and is there no more"
        elif entry.digest == newest:
            paths = self._by_digest.setdefault(entry.digest, [])
            if path not in paths:
                paths.append(path)
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
        versions = sorted({version for known in self._by_digest for version in self._named(known)}, key=_order)
        return f"; those of versions {', '.join(versions)} are" if versions else ""

    def switch(self, digest: str) -> None:
        """See `WeightSource.switch`. Other folders of the digest are tried where one cannot be loaded, or has come to
        hold others, then those that were not read so far."""
        if digest == self._present:
            return
        if digest not in self._failed:
            reasons = [self._try(path, digest) for path in self._by_digest.get(digest, ()) if self._present != digest]
            while self._present != digest and self._unread:
                self._read(self._unread.pop())
            if self._present == digest:
                return
            self._failed[digest] = "; ".join(reasons) or "they were the engine's own, and no folder has them"
        raise NoWeights(f"its weights, of digest {digest}, cannot be loaded: {self._failed[digest]}")

    def _try(self, path: Path, digest: str) -> str:
        """Load a folder that had weights of a digest; returns why it did not give them, or ""."""
        try:
            self._load(path, min(self._named(digest), key=_order, default=None))
        except (ValueError, WeightSyncError, OSError) as error:
            return str(error)
        if self._present == digest:
            return ""
        return f"{path} holds weights of digest {self._present} now: remove {FILE}"

    def _named(self, digest: str) -> set[str]:
        """Return the versions that weights of a digest have had, as far as an index or a name says."""
        return self._versions.get(digest, set()) | self._labels.get(digest, set())

    def _load(self, path: Path, version: str | None) -> None:
        """Load a folder's weights, commit them, and note their digest."""
        service, engine = self._service, self._service.engine
        label = version or path.name
        if (path / _STATE).is_file():
            dtypes = {name: tensor.dtype for name, tensor in engine.weights.resident_tensors()}
            service.update_weights_from_named_tensors(_stored(path / _MODEL, dtypes), weight_version=label)
        else:
            service.update_weights_from_disk(path, weight_version=label)
        service.commit_implicit_update(or_roll_back=True)
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
