"""Checkpoints of training runs in a folder: adapters in PEFT's layout, and what training goes on with beside them.

    FOLDER / RUN / run.json
    FOLDER / RUN / weights / NAME / checkpoint.json, adapter_config.json, adapter_model.safetensors,
                                    training.safetensors
    FOLDER / RUN / sampler_weights / NAME / checkpoint.json, adapter_config.json, adapter_model.safetensors

A checkpoint appears whole or not at all. Its path for clients is tinker://RUN/weights/NAME or .../sampler_weights/NAME.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....rollout.model.adapters.folder import CONFIG_FILE, WEIGHTS_FILE
from ....rollout.model.adapters.layers import PEFT_PREFIX
from ....weight_sync.disk.atomic_folder import complete_folder, flush, partial_folder
from ....weight_sync.disk.claims import remove_leftovers
from ...failures import files_of
from .data import BadInput
from .targets import AdapterSpec

logger = logging.getLogger(__name__)

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # types of checkpoints, by the middle of their paths
TTL_S = (3600, 10 * 366 * 86400)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_RUN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9:_-]{0,199}")
_FORMER = ".former"  # end of the name of a checkpoint while another takes its place
_REMOVED = ".removed"  # end of the name of a checkpoint that is being removed
_META, _RUN_META, _TRAINING = "checkpoint.json", "run.json", "training.safetensors"


@dataclass(frozen=True)
class RunInfo:
    """The description of a training run."""

    run_id: str
    base_model: str
    spec: AdapterSpec
    created: float  # seconds since 1970
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    """The description of a checkpoint."""

    path: str  # with tinker://
    base_model: str
    base_digest: str  # of the base weights
    digest: str  # of the adapter's tensors
    spec: AdapterSpec
    created: float  # seconds since 1970
    num_bytes: int = 0
    expires_at: float | None = None
    user_metadata: Mapping[str, str] | None = None
    num_steps: int = 0

    @property
    def run_id(self) -> str:
        return parts_of(self.path)[0]

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()

    @property
    def kind(self) -> str:
        """The type of checkpoint: training or sampler."""
        return KINDS[parts_of(self.path)[1]]

    def as_json(self) -> dict[str, object]:
        """Return the checkpoint as the API describes it."""
        _, middle, name = parts_of(self.path)
        return {
            "checkpoint_id": f"{middle}/{name}", "checkpoint_type": self.kind, "time": moment(self.created),
            "tinker_path": self.path, "size_bytes": self.num_bytes, "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires_at is None else moment(self.expires_at),
        }  # fmt: skip


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint."""

    weights: Mapping[str, Tensor]  # in the model's dtype, by PEFT's names
    config: Mapping[str, object]  # of the adapter, in PEFT's layout
    masters: Mapping[str, Tensor] | None = None  # float32; None: only sampling goes on from it
    moments: Mapping[str, Tensor] | None = None  # of the optimizer


Info = TypeVar("Info", RunInfo, CheckpointInfo)
T = TypeVar("T")


class Checkpoints:
    """The checkpoints in one folder. Methods may be called from any thread. Changes wait for each other."""

    def __init__(self, folder: Path) -> None:
        """Make the folder. Put back what a process that was killed was about to replace, and remove what it had not
        written, or not removed, to the end."""
        self.folder = folder
        self._lock = threading.RLock()  # of all that writes and removes: whole checkpoints, and descriptions
        self._names = threading.Lock()  # of lookups, and of a name that goes from one checkpoint to another
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (path for middle in KINDS for path in folder.glob(f"*/{middle}")):
            remove_leftovers(parent)
        for removed in folder.glob(f"*/*/.*{_REMOVED}"):
            shutil.rmtree(removed, ignore_errors=True)
        for former in folder.glob(f"*/*/.*{_FORMER}"):
            target = former.with_name(former.name.removeprefix(".").removesuffix(_FORMER))
            if target.exists():
                shutil.rmtree(former)
            else:
                former.rename(target)

    def note_run(self, run: RunInfo) -> None:
        """Note a training run. The same one may be noted again."""
        folder = self.folder / run.run_id
        with self._lock:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / _RUN_META, asdict(run))

    def runs(self) -> list[RunInfo]:
        """Return all training runs that have a folder, the newest first. Those that cannot be read are passed over."""
        found = [run for path in self.folder.glob(f"*/{_RUN_META}") if (run := _readable(self.run, path.parent.name))]
        return sorted(found, key=lambda run: -run.created)

    def run(self, run_id: str) -> RunInfo:
        """Return a training run. Raises BadInput for one that is not known."""
        file = self.folder / _checked(_RUN, run_id, "training run") / _RUN_META
        return _read(RunInfo, file, f"training run {run_id!r}")

    def of_run(self, run_id: str) -> list[CheckpointInfo]:
        """Return the checkpoints of a run, the newest first. Those that cannot be read are passed over."""
        found = self._infos(self.folder / _checked(_RUN, run_id, "training run"))
        return sorted(found, key=lambda one: -one.created)

    def _infos(self, folder: Path) -> Iterator[CheckpointInfo]:
        for middle in KINDS:
            for file in (folder / middle).glob(f"*/{_META}"):
                path = f"{SCHEME}{folder.name}/{middle}/{file.parent.name}"
                if _NAME.fullmatch(file.parent.name) and (info := _readable(self._info, path)) is not None:
                    yield info

    def _info(self, path: str) -> CheckpointInfo | None:
        """Return a checkpoint; None: it has expired, and is removed."""
        if not (info := self._stored(path)).has_expired:
            return info
        with self._lock:
            if not (info := self._stored(path)).has_expired:  # another one has taken its place
                return info
            self._remove(path)
        return None

    def _stored(self, path: str) -> CheckpointInfo:
        with self._names:
            return _read(CheckpointInfo, self._at(path) / _META, f"checkpoint {path}")

    def info(self, path: str) -> CheckpointInfo:
        """Return a checkpoint by its path. Raises BadInput for one that is not there, or has expired."""
        if (info := self._info(path)) is None:
            raise BadInput(f"checkpoint {path} has expired")
        return info

    def write(self, info: CheckpointInfo, content: Content, *, overwrite: bool = False) -> CheckpointInfo:
        """Write a checkpoint; returns its description, with its size. Raises BadInput where the name is taken by one
        that has not expired."""
        with self._lock:
            if self._at(info.path).exists() and not overwrite:
                former = _readable(self._stored, info.path)
                if former is None or not former.has_expired:
                    raise BadInput(f"checkpoint {info.path} exists already")
            return self._written(info, content)

    def _written(self, info: CheckpointInfo, content: Content) -> CheckpointInfo:
        """Write a checkpoint beside the former one, which it replaces only when it is whole. Raises FileFailed."""
        target = self._at(info.path)
        with files_of(target, advice="make room there, or mend that, and save again"), partial_folder(target) as folder:
            (folder / CONFIG_FILE).write_text(json.dumps(content.config, indent=2), encoding="utf-8")
            save_file(_plain({PEFT_PREFIX + name: own for name, own in content.weights.items()}), folder / WEIGHTS_FILE)
            if content.masters is not None:
                kept = {f"master/{name}": own for name, own in content.masters.items()} | dict(content.moments or {})
                save_file(_plain(kept), folder / _TRAINING)
            info = replace(info, num_bytes=sum(file.stat().st_size for file in folder.iterdir()))
            (folder / _META).write_text(json.dumps(asdict(info)), encoding="utf-8")
            complete_folder(folder)
            former = self._put(folder, target)
        flush(target.parent)
        shutil.rmtree(former, ignore_errors=True)
        return info

    def _put(self, folder: Path, target: Path) -> Path:
        """Give a whole checkpoint its name; returns where the former one is then. Lookups find one or the other."""
        former = target.with_name(f".{target.name}{_FORMER}")
        shutil.rmtree(former, ignore_errors=True)
        with self._names:
            if target.exists():
                target.rename(former)
            try:
                folder.rename(target)
            except OSError:
                if former.exists():
                    former.rename(target)
                raise
        return former

    def read(self, info: CheckpointInfo, device: torch.device, *, training: bool) -> Content:
        """Read a checkpoint's tensors. training: with what training goes on with. Raises BadInput for a checkpoint that
        has none, and for tensors that are not those that were written."""
        folder = self._at(info.path)
        if training and info.kind != "training":
            raise BadInput(f"{info.path} is for sampling only: load a checkpoint of {SCHEME}RUN/weights/NAME")
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            weights = {
                name.removeprefix(PEFT_PREFIX): own
                for name, own in load_file(folder / WEIGHTS_FILE, str(device)).items()
            }
            kept = load_file(folder / _TRAINING) if training else {}
        except (OSError, ValueError, SafetensorError) as error:
            raise BadInput(f"checkpoint {info.path} cannot be read: {error}") from error
        if adapter_digest(weights) != info.digest:
            raise BadInput(f"checkpoint {info.path} has other tensors than were written to it")
        masters = {name.removeprefix("master/"): own for name, own in kept.items() if name.startswith("master/")}
        moments = {name: own for name, own in kept.items() if not name.startswith("master/")}
        return Content(weights, config, masters if training else None, moments if training else None)

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises BadInput for one that is not there."""
        with self._lock:
            self.info(path)
            self._remove(path)

    def remove_expired(self) -> None:
        """Remove all checkpoints that have expired. One that cannot be removed is named in the log."""
        for middle in KINDS:
            for file in self.folder.glob(f"*/{middle}/*/{_META}"):
                path = f"{SCHEME}{file.parents[2].name}/{middle}/{file.parent.name}"
                try:
                    self._info(path)
                except BadInput:  # none of ours, or just removed; lists name those that cannot be read
                    continue
                except OSError as error:
                    logger.warning("checkpoint %s has expired, and cannot be removed: %s", path, error)

    def _remove(self, path: str) -> None:
        """Remove a checkpoint. Its name is free first: what is left after an interruption has another one."""
        target = self._at(path)
        removed = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_REMOVED}")
        with self._names:
            target.rename(removed)
        shutil.rmtree(removed)

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """Set when a checkpoint expires; None: never."""
        with self._lock:
            _write(self._at(path) / _META, asdict(replace(self.info(path), expires_at=expires_at)))

    def _at(self, path: str) -> Path:
        run_id, middle, name = parts_of(path)
        return self.folder / run_id / middle / name


def path_of(run_id: str, middle: str, name: str) -> str:
    """Return the path of a checkpoint for clients. Raises BadInput for a name that no file may have."""
    return f"{SCHEME}{run_id}/{middle}/{_checked(_NAME, name, 'name of a checkpoint')}"


def parts_of(path: str) -> tuple[str, str, str]:
    """Return run, kind and name of a checkpoint's path. Raises BadInput for another text."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
        raise BadInput(f"{path[:200]!r} is no path of a checkpoint: {SCHEME}RUN/weights/NAME, or sampler_weights")
    _checked(_RUN, parts[0], "training run")
    _checked(_NAME, parts[2], "name of a checkpoint")
    return parts[0], parts[1], parts[2]


def adapter_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of an adapter's names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        own = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {own.dtype} {list(own.shape)}\n".encode())
        found.update(own.view(torch.uint8).numpy())
    return found.hexdigest()


def expiry(ttl_seconds: int | None) -> float | None:
    """Return when a checkpoint expires. Raises BadInput for a time that the API does not allow."""
    if ttl_seconds is None:
        return None
    if not TTL_S[0] <= ttl_seconds <= TTL_S[1]:
        raise BadInput(f"ttl_seconds must be from {TTL_S[0]} to {TTL_S[1]}, not {ttl_seconds}")
    return time.time() + ttl_seconds


def moment(seconds: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checked(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise BadInput(f"{text[:200]!r} is no {what}: letters, digits, dots, dashes and underscores")
    return text


def _read(kind: type[Info], file: Path, what: str) -> Info:
    """Read a description. Raises BadInput for one that is not there, or is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return kind(**{**values, "spec": AdapterSpec(**values["spec"])})
    except FileNotFoundError:
        raise BadInput(f"there is no {what}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{what} cannot be read: {error!r:.200}") from error


def _write(file: Path, values: Mapping[str, object]) -> None:
    """Write a description, which is complete or as it was before."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(json.dumps(values), encoding="utf-8")
        flush(partial)
        os.replace(partial, file)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _readable(read: Callable[[str], T], name: str) -> T | None:
    """Return what is read of that name; None, in the log, for what cannot be read."""
    try:
        return read(name)
    except BadInput as error:
        logger.warning("passed over: %s", error)
        return None


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: own.detach().cpu().contiguous() for name, own in tensors.items()}
