"""Checkpoint folders in Hugging Face layout, both ends: shards written and read tensor by tensor.

Beside the shards is `lockstep_manifest.json` (a `Manifest`), which a reader can use to verify the loaded tensors;
folders of other writers have none.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..deadline import Deadline
from ..digests.model_digest import model_root, tensor_leaves, tensor_root
from ..errors import TransferFailed
from ..layout.json_values import is_digest, parse_object
from ..layout.sink import Sink
from ..manifest import Manifest, NamedTensors, TensorSpec
from .atomic_folder import atomic_folder
from .safetensors_file import ShardWriter, StoredTensor, read_header

MANIFEST_FILE = "lockstep_manifest.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
READ_BYTES = 16 << 20  # read at once, into one range of the sink
DEFAULT_SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class FileState:
    """The values that show whether a file has changed since it was read."""

    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | Path) -> FileState:
        """Read the state of an open descriptor or a path; raises OSError as stat does."""
        status = os.stat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class DiskPlan:
    """The content of a folder, from its headers alone."""

    folder: Path
    tensors: tuple[StoredTensor, ...]  # file by file, in the order of their bytes
    files: Mapping[str, FileState]
    manifest: Manifest | None  # None in a folder of another writer

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor.spec for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.spec.num_bytes for tensor in self.tensors)

    def check_unchanged(self) -> None:
        """Raise TransferFailed for a file that changed or vanished since the plan was made."""
        for file in self.files:
            _check_unchanged(self, file)


def read_folder(path: str | Path) -> DiskPlan:
    """Read and check every header of a checkpoint folder. Changes nothing, reads no tensor.

    The folder may be a sharded one with its index, one `model.safetensors`, or several `*.safetensors` without index.
    Raises ValueError listing every error: missing files, headers that do not describe their file to the byte
    (truncated, gaps, overlaps, unknown dtypes), duplicate tensors, contradictions with index or manifest.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    problems: list[str] = []
    weight_map = _read_index(folder, problems)
    tensors: list[StoredTensor] = []
    files: dict[str, FileState] = {}
    for name in _shard_names(folder, weight_map, problems):
        try:
            with open(regular_file(folder / name), "rb") as file:
                files[name] = FileState.of(file.fileno())
                found, wrong = read_header(file, name, files[name].num_bytes)
        except OSError as error:
            found, wrong = [], [f"{name}: {error.strerror}"]
        tensors += found
        problems += wrong
    places: dict[str, list[str]] = {}
    for tensor in tensors:
        places.setdefault(tensor.spec.name, []).append(tensor.file)
    problems += [f"{name} is in {' and in '.join(in_)}" for name, in_ in places.items() if len(in_) > 1]
    if not problems and weight_map is not None:
        problems += [f"{n} is in {in_[0]}, not in the index" for n, in_ in places.items() if n not in weight_map]
        problems += [f"{n} is not in {f}, as the index says" for n, f in weight_map.items() if places.get(n) != [f]]
    manifest = _read_manifest(folder, problems)
    if not problems and manifest is not None:
        specs = {tensor.spec.name: tensor.spec for tensor in tensors}, {spec.name: spec for spec in manifest.tensors}
        for name in sorted({*specs[0], *specs[1]}):
            ours, theirs = (spec[name].describe() if name in spec else "nothing" for spec in specs)
            problems += [f"{name}: the files hold {ours}, {MANIFEST_FILE} {theirs}"] if ours != theirs else []
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(problems))
    return DiskPlan(folder, tuple(tensors), files, manifest)


def load_folder(source: str | Path | DiskPlan, sink: Sink, *, timeout_s: float | None = None) -> DiskPlan:
    """Read the tensors of a folder, or of its plan, into `sink`; returns the plan.

    The plan's manifest, if there is one, holds the digests to verify. Bytes are read straight into the resident tensors
    where the sink lends them and they are on the CPU, else through one buffer of READ_BYTES. Raises ValueError as
    `read_folder` and `sink.expect` do, before anything is written; TransferFailed for a file that changed or vanished
    since the plan was made, and after the deadline. The deadline is checked between two reads: it does not end a read
    that the file system never answers.
    """
    plan = source if isinstance(source, DiskPlan) else read_folder(source)
    deadline = Deadline.within(timeout_s)
    sink.expect(plan.specs)
    plan.check_unchanged()
    staging: list[Tensor] = []
    for file in plan.files:
        descriptor = open_unchanged(plan, file)
        try:
            for tensor in plan.tensors:
                if tensor.file == file:
                    _load_tensor(descriptor, tensor, sink, staging, deadline)
            _check_unchanged(plan, file, descriptor)
        finally:
            os.close(descriptor)
    plan.check_unchanged()  # a replaced file keeps its old content for open descriptors
    return plan


def open_unchanged(plan: DiskPlan, file: str) -> int:
    """Open a file of a plan and return its descriptor. Raises TransferFailed for one that changed or vanished since the
    plan was made."""
    try:
        descriptor = os.open(plan.folder / file, os.O_RDONLY)
    except OSError as error:
        raise TransferFailed(f"disk: {plan.folder / file}: {error.strerror}") from error
    try:
        _check_unchanged(plan, file, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_exactly(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset` of a file; returns the number of bytes read, fewer only at the file's end."""
    done = 0
    while done < len(view):
        num_read = os.preadv(descriptor, [view[done:]], offset + done)
        if num_read == 0:
            break
        done += num_read
    return done


def save_folder(
    path: str | Path,
    named_tensors: NamedTensors,
    version: str | None = None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    extra_files: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write tensors as a checkpoint folder that appears at `path` whole or not at all; returns its manifest.

    The manifest has the digest of each tensor and of the model. Tensors are taken one by one, from any device; written
    bytes are not read again. `extra_files` (such as config.json) are put beside them. Raises ValueError for a path that
    exists, no tensor at all, a duplicate name and a dtype that safetensors lacks.
    """
    specs: list[TensorSpec] = []
    roots: dict[str, bytes] = {}
    shards: list[list[str]] = []  # tensor names of each one
    with atomic_folder(path) as folder, ThreadPoolExecutor(1, "digest") as pool, ExitStack() as file:
        writer: ShardWriter | None = None
        for name, tensor in named_tensors:
            spec = TensorSpec.of(name, tensor)
            if name in roots:
                raise ValueError(f"{name} comes twice")
            leaves = pool.submit(tensor_leaves, tensor)  # hashed while it is written
            try:
                full = writer is not None and writer.num_bytes and writer.num_bytes + spec.num_bytes > max_shard_bytes
                if writer is None or full or not writer.has_room(spec):
                    if writer is not None:
                        writer.finish()
                        file.close()
                    writer = ShardWriter(file.enter_context(open(folder / _shard_name(len(shards), None), "xb")))
                    shards.append([])
                writer.add(name, tensor)
            finally:
                roots[name] = tensor_root(name, spec.dtype, spec.shape, leaves.result())
            specs.append(spec)
            shards[-1].append(name)
        if writer is None:
            raise ValueError(f"{path}: no tensors to save")
        writer.finish()
        file.close()
        _name_shards(folder, shards, sum(spec.num_bytes for spec in specs))
        digests = {name: root.hex() for name, root in roots.items()}
        manifest = Manifest(version, tuple(specs), digests, model_root(roots.items()))
        for name, content in {**(extra_files or {}), MANIFEST_FILE: manifest.to_json().encode()}.items():
            (folder / name).write_bytes(content)
    return manifest


def _load_tensor(descriptor: int, tensor: StoredTensor, sink: Sink, staging: list[Tensor], deadline: Deadline) -> None:
    spec = tensor.spec
    if spec.num_bytes == 0:
        sink.write(spec.name, 0, torch.empty(0, dtype=torch.uint8))
    for start in range(0, spec.num_bytes, READ_BYTES):
        if deadline.has_passed:
            raise TransferFailed(f"disk: the deadline passed while {tensor.file} was read, at {spec.describe()}")
        size = min(READ_BYTES, spec.num_bytes - start)
        lent = sink.destination(spec.name, start, size)
        if lent is not None and lent.device.type == "cpu":
            target = lent
        else:
            if not staging:
                staging.append(torch.empty(READ_BYTES, dtype=torch.uint8))
            target = staging[0][:size]
        if read_exactly(descriptor, memoryview(target.numpy()), tensor.offset + start) < size:
            raise TransferFailed(f"disk: {tensor.file} became shorter while {spec.describe()} was read")
        if lent is None:
            sink.write(spec.name, start, target)
        elif lent is not target:
            lent.copy_(target)


def _check_unchanged(plan: DiskPlan, file: str, descriptor: int | None = None) -> None:
    path = plan.folder / file
    try:
        state = FileState.of(path if descriptor is None else descriptor)
    except OSError as error:
        raise TransferFailed(f"disk: {path}: {error.strerror}") from error
    if state != plan.files[file]:
        raise TransferFailed(f"disk: {path} changed after its header was read")


def _read_index(folder: Path, problems: list[str]) -> dict[str, str] | None:
    """Return the file of each tensor name, or None if there is no index."""
    if not (folder / INDEX_FILE).exists():
        return None
    if (folder / SINGLE_FILE).exists():
        problems.append(f"both {SINGLE_FILE} and {INDEX_FILE} are there: which one counts is not clear")
    try:
        weight_map = parse_object(regular_file(folder / INDEX_FILE).read_bytes()).get("weight_map")
    except (OSError, ValueError) as error:
        problems.append(f"{INDEX_FILE} {error}")
        return {}
    if not isinstance(weight_map, dict):
        problems.append(f"{INDEX_FILE} has no weight_map")
        return {}
    bad = [str(file) for file in weight_map.values() if not _is_shard_name(file)]
    if bad:
        problems.append(f"{INDEX_FILE} names files that cannot be shards: {', '.join(dict.fromkeys(bad))}")
    return {name: file for name, file in weight_map.items() if _is_shard_name(file)}


def regular_file(path: Path) -> Path:
    """Return the path. Raises OSError for what is there and is no file: to open a pipe waits for its writer."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file")
    return path


def _is_shard_name(file: object) -> bool:
    # Only a file of this very folder: without separators no name can lead out of it.
    return isinstance(file, str) and file.endswith(".safetensors") and not {"/", "\0"} & set(file)


def _shard_names(folder: Path, weight_map: Mapping[str, str] | None, problems: list[str]) -> list[str]:
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        problems.append("no *.safetensors file")
    parts = [re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", name) for name in names]
    for prefix, total in dict.fromkeys((part[1], int(part[2])) for part in parts if part):
        wanted = {f"{prefix}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)}
        problems += [f"{name} is missing" for name in sorted(wanted - set(names))]
    return names


def _read_manifest(folder: Path, problems: list[str]) -> Manifest | None:
    if not (folder / MANIFEST_FILE).exists():
        return None
    try:
        return parse_manifest(regular_file(folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError) as error:
        problems.append(f"{MANIFEST_FILE} {error}")
        return None


def parse_manifest(text: bytes) -> Manifest:
    """Read a manifest from a file that any program may have written.

    Raises ValueError, also for values of wrong types at which `Manifest.from_json` would fail.
    """
    values = parse_object(text)
    wrong = [key for key in ("names", "dtypes", "shapes") if not isinstance(values.get(key), list)]
    digests = values.get("digests")
    if not isinstance(digests, dict) or not all(is_digest(value) for value in digests.values()):
        wrong.append("digests")
    wrong += [] if values.get("model_digest") is None or is_digest(values["model_digest"]) else ["model_digest"]
    wrong += [] if isinstance(values.get("version"), str | None) else ["version"]
    if wrong:
        raise ValueError(f"holds values that cannot be read: {', '.join(wrong)}")
    return Manifest.from_json(text)


def _shard_name(index: int, total: int | None) -> str:
    return SINGLE_FILE if total == 1 else f"model-{index + 1:05d}-of-{total or 0:05d}.safetensors"


def _name_shards(folder: Path, shards: Sequence[Sequence[str]], num_bytes: int) -> None:
    """Give the shards their final names, now that their number is known, and write the index."""
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = _shard_name(index, len(shards))
        (folder / _shard_name(index, None)).rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(shards) > 1:
        index_values = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index_values, indent=2))
