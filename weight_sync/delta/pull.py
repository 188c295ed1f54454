"""Versioned weight folders on a shared disk, assembled into one full checkpoint on the local disk.

    source_dir/weight_v000004/   a full checkpoint, or
    source_dir/weight_v000005/   a delta against an earlier version: 4 -> 5 -> 7 is a chain

The checkpoint is assembled in a folder beside the local one (`.<name>.pull`) and takes its place by two renames, so
that a reader sees the old checkpoint, for a moment none, then the new one, and never a part of either. A pull that was
killed is continued where it stopped: at the first file not copied, the first delta chunk not applied, or the second
rename.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..deadline import Deadline
from ..digests.model_digest import model_root, tensor_leaves, tensor_root
from ..disk.atomic_folder import flush, flush_folder
from ..disk.folder import INDEX_FILE, MANIFEST_FILE, DiskPlan, FileState, read_folder
from ..errors import DigestMismatch, TransferFailed
from ..layout.json_values import parse_object
from ..manifest import Manifest
from .apply import Check, apply_delta
from .folder_sink import FolderSink
from .stream import DATA_FILE, DELTA_MANIFEST_FILE, StoredDelta, load_delta

PULL_FILE = "lockstep_pull.json"  # marks a folder that a pull made and the next pull may replace
COPY_BYTES = 64 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullRecord:
    """Record of one pull."""

    folder: Path  # the full checkpoint
    version: int
    base_version: int | None  # the version that was copied; None where nothing had to be done
    is_local_base: bool  # whether the base was the local folder itself
    deltas: tuple[int, ...]  # versions of the deltas that were applied to it
    verified: bool  # whether every tensor was compared with a digest
    bytes_read: int  # of checkpoint and deltas, an earlier pull's share included


@dataclass(frozen=True)
class _Route:
    """One way to the target version: a folder to copy and deltas to apply to it, in order."""

    base: Path
    base_version: int
    is_local: bool
    deltas: tuple[StoredDelta, ...]

    @property
    def key(self) -> str:
        """The identity of the route, by which a staging folder is recognized as begun on it."""
        return json.dumps([_fingerprint(folder) for folder in (self.base, *(delta.folder for delta in self.deltas))])


def version_folder(source_dir: str | Path, version: int) -> Path:
    """Return the folder of a version."""
    return Path(source_dir) / f"weight_v{version:06d}"


def pull_weights(
    local_checkpoint_dir: str | Path, source_dir: str | Path, target_version: int, *, timeout_s: float | None = None
) -> PullRecord:
    """Make `local_checkpoint_dir` the full checkpoint of `target_version`. Does nothing where it is that already.

    Starts from the local folder where the chain passes through its version, and from the newest full checkpoint of the
    chain where that fails. Every tensor is compared with the digests that came with it.

    Raises ValueError, having changed nothing, for versions that are missing from the chain, folders that cannot be
    read, files or links that lead out of `source_dir`, and a local folder that no pull has made (it must not be
    replaced); DigestMismatch where the assembled tensors are not as expected; TransferFailed past the deadline, for
    files that change meanwhile, and where another pull into the same folder is running. After any of these the local
    folder is unchanged.
    """
    local, source = Path(local_checkpoint_dir).absolute(), Path(source_dir)
    _check_arguments(local, source, target_version)
    deadline = Deadline.within(timeout_s)
    local.parent.mkdir(parents=True, exist_ok=True)
    staging = local.parent / f".{local.name}.pull"
    with _only_one(local.parent / f".{local.name}.lock"):
        _finish_swap(local, staging)
        present = _read_marker(local)
        target = version_folder(source, target_version)
        if present is not None and present["version"] == target_version:
            if not target.is_dir() or _fingerprint(target) == present["source"]:
                return PullRecord(local, target_version, None, True, (), present["verified"] is True, 0)
            present = None  # the same version was written again with other files
        routes = _routes(local, source, target_version, present["version"] if present else None)
        for index, route in enumerate(routes):
            try:
                record = _assemble(staging, route, target, target_version, deadline)
                break
            except (DigestMismatch, ValueError) as error:
                if isinstance(error, ValueError) and not route.is_local:
                    raise  # of the source; a local base may be that of another run, with other dtypes or shapes
                shutil.rmtree(staging, ignore_errors=isinstance(error, ValueError))
                if index == len(routes) - 1:
                    raise
                logger.warning("pull of version %d from %s: %s; trying another base", target_version, route.base, error)
        _finish_swap(local, staging, replace_local=True)
    return replace(record, folder=local)


def _check_arguments(local: Path, source: Path, target_version: int) -> None:
    if type(target_version) is not int or target_version < 0:
        raise ValueError(f"target_version must be a non-negative integer, not {target_version!r}")
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder")
    inner, outer = local.resolve(), source.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise ValueError(f"{local} and {source} must not lie in each other")
    if local.is_symlink() or (local.exists() and not local.is_dir()):
        raise ValueError(f"{local} is not a folder")
    if local.is_dir() and any(local.iterdir()) and not (local / PULL_FILE).is_file():
        raise ValueError(f"{local} was not made by a pull, so it is not replaced; remove it or name another folder")


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TransferFailed(f"pull: another pull holds {lock}") from error
        yield


def _fingerprint(folder: Path) -> list[list[object]]:
    """Return names, sizes and times of a folder's files, which change whenever it is written again."""
    states = ((path.name, FileState.of(path)) for path in sorted(folder.iterdir()))
    return [[name, state.num_bytes, state.mtime_ns] for name, state in states]


def _read_marker(local: Path) -> dict[str, Any] | None:
    """Read the pull's record in a folder that it made: version, verified and source; None where that is not valid."""
    if not (local / PULL_FILE).is_file():
        return None
    try:
        values = parse_object((local / PULL_FILE).read_bytes())
        has_manifest = read_folder(local).manifest is not None
    except ValueError as error:
        logger.warning("the local checkpoint cannot be used: %s", error)
        return None
    is_sound = has_manifest and set(values) == {"version", "verified", "source"} and type(values["version"]) is int
    return values if is_sound else None


# --- the routes to a version


def _routes(local: Path, source: Path, target: int, local_version: int | None) -> list[_Route]:
    """Return the routes to `target`, the shortest first. Raises ValueError where there is none."""
    deltas: list[StoredDelta] = []
    routes: list[_Route] = []
    version = target
    while True:
        if version == local_version and deltas:
            routes.append(_Route(local, version, True, tuple(reversed(deltas))))
        folder = version_folder(source, version)
        if not folder.is_dir():
            break
        _check_inside(folder, source)
        if not (folder / DELTA_MANIFEST_FILE).exists():
            read_folder(folder)
            routes.append(_Route(folder, version, False, tuple(reversed(deltas))))
            break
        deltas.append(load_delta(folder))
        base = deltas[-1].manifest.base_version
        if base is None or not re.fullmatch(r"\d{1,18}", base) or int(base) >= version:
            raise ValueError(f"{folder}: its base {base!r} is no version before {version}")
        version = int(base)
    if not routes:
        chain = " needs ".join(str(v) for v in (*map(_version_of, deltas), version))
        present = ", ".join(sorted(path.name for path in source.glob("weight_v*"))) or "nothing"
        at_hand = "" if local_version is None else f"; the local folder holds {local_version}"
        raise ValueError(f"version {version} is missing ({chain}): {source} holds {present}{at_hand}")
    return routes


def _version_of(delta: StoredDelta) -> int:
    return int(delta.folder.name.removeprefix("weight_v"))


def _check_inside(folder: Path, source: Path) -> None:
    root = source.resolve()
    outside = [str(path) for path in (folder, *sorted(folder.iterdir())) if not path.resolve().is_relative_to(root)]
    if outside:
        raise ValueError(f"these lead out of {source}: {', '.join(outside)}")


# --- assembly


def _assemble(staging: Path, route: _Route, target: Path, version: int, deadline: Deadline) -> PullRecord:
    """Make `staging/files` the checkpoint of `version`, continuing an earlier pull on the same route."""
    files, key = staging / "files", route.key
    state = _read_state(staging)
    if state.get("key") != key:
        shutil.rmtree(staging, ignore_errors=True)
        files.mkdir(parents=True)
        state = {"key": key, "num_applied": 0}
        _write_state(staging, state)
    else:
        try:
            return _go_on(staging, state, route, target, version, deadline)
        except (DigestMismatch, ValueError) as error:
            # The pull was killed within a chunk, or the machine lost bytes that were not flushed: start this route
            # again.
            logger.warning("an earlier unfinished pull of version %d cannot be completed: %s", version, error)
            shutil.rmtree(staging)
            return _assemble(staging, route, target, version, deadline)
    return _go_on(staging, state, route, target, version, deadline)


def _go_on(
    staging: Path, state: dict[str, Any], route: _Route, target: Path, version: int, deadline: Deadline
) -> PullRecord:
    files = staging / "files"
    base = read_folder(route.base)
    expected = dict(base.manifest.digests) if base.manifest is not None else {}
    for delta in route.deltas:
        changed = {spec.name for spec in delta.specs}
        expected = {name: digest for name, digest in expected.items() if name not in changed}
        expected |= delta.manifest.manifest.digests
    is_verified = {spec.name for spec in base.specs} <= set(expected)
    num_bytes = 0
    for path in sorted(route.base.iterdir()):
        if path.is_file() and path.name not in (PULL_FILE, MANIFEST_FILE):
            num_bytes += _copy(path, files / path.name, deadline)
    for index, delta in enumerate(route.deltas):
        num_bytes += delta.state.num_bytes
        if index >= state["num_applied"]:
            sink = FolderSink(read_folder(files))
            check: Check = "touched" if is_verified else "pre"
            apply_delta(delta.specs, delta.chunks(), sink, check=check, timeout_s=deadline.left_s)
            sink.flush()
            for path in sorted(delta.folder.iterdir()):
                if path.is_file() and not _is_of_weights(path.name):
                    (files / path.name).unlink(missing_ok=True)
                    _copy(path, files / path.name, deadline)
            state["num_applied"] = index + 1
            _write_state(staging, state)
    plan = read_folder(files)
    manifest = _digested(plan, version, deadline)
    differing = [name for name, digest in expected.items() if manifest.digests.get(name) != digest]
    if differing:
        raise DigestMismatch(differing, f"in what was assembled as version {version}")
    (files / MANIFEST_FILE).write_text(manifest.to_json())
    marker = {"version": version, "verified": is_verified, "source": _fingerprint(target)}
    (files / PULL_FILE).write_text(json.dumps(marker))
    flush_folder(files)
    _write_state(staging, state | {"is_ready": True})
    versions = tuple(map(_version_of, route.deltas))
    return PullRecord(files, version, route.base_version, route.is_local, versions, is_verified, num_bytes)


def _check(deadline: Deadline, phase: str) -> None:
    if deadline.has_passed:
        raise TransferFailed(f"pull: the deadline passed while {phase}")


def _is_of_weights(name: str) -> bool:
    return name in (DATA_FILE, DELTA_MANIFEST_FILE, INDEX_FILE) or name.endswith(".safetensors")


def _copy(path: Path, to: Path, deadline: Deadline) -> int:
    """Copy a file unless a whole copy is there, and return its size. The copy gets its name when it is complete."""
    state = FileState.of(path)
    if to.exists():
        return state.num_bytes
    part = to.with_name(to.name + ".part")
    with open(path, "rb") as source, open(part, "wb") as file:
        done = 0
        while num_sent := os.sendfile(file.fileno(), source.fileno(), done, COPY_BYTES):
            done += num_sent
            _check(deadline, f"{path} was copied")
        os.fsync(file.fileno())
        if done != state.num_bytes or FileState.of(path) != state:
            raise TransferFailed(f"pull: {path} changed while it was copied")
    part.rename(to)
    return state.num_bytes


def _digested(plan: DiskPlan, version: int, deadline: Deadline) -> Manifest:
    sink = FolderSink(plan)
    roots = {}
    for spec in plan.specs:
        _check(deadline, f"{spec.name} was verified")
        roots[spec.name] = tensor_root(spec.name, spec.dtype, spec.shape, tensor_leaves(sink.resident(spec.name)))
    digests = {name: root.hex() for name, root in roots.items()}
    return Manifest(str(version), plan.specs, digests, model_root(roots.items()))


def _finish_swap(local: Path, staging: Path, replace_local: bool = False) -> None:
    """Put a finished staging folder in the local one's place. Without `replace_local` only where a killed pull had
    already moved the old one away."""
    if not _read_state(staging).get("is_ready"):
        return
    if (staging / "files").exists():
        if local.exists():
            if not replace_local:
                return
            local.rename(staging / "old")
        (staging / "files").rename(local)
        flush(local.parent)
    shutil.rmtree(staging)


def _read_state(staging: Path) -> dict[str, Any]:
    try:
        return parse_object((staging / "state.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        logger.warning("%s/state.json %s", staging, error)
        return {}


def _write_state(staging: Path, state: dict[str, Any]) -> None:
    part = staging / "state.json.part"
    part.write_text(json.dumps(state))
    flush(part)
    part.rename(staging / "state.json")
