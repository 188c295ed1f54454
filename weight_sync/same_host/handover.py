"""The common parts of the hand-overs on one host: a bucket's description as plain JSON values, and its checks.

A description names the tensors of its bucket; the first one of an update also holds the whole manifest, so that the
receiver can check every name, shape and dtype before the first byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from ..layout.json_values import is_count
from ..manifest import MAX_DIMENSIONS, Manifest, NamedTensors, TensorSpec, dtype_name, specs_from_lists

MAX_OFFENDERS = 20  # in one message; a hostile description must not make it endless


def in_manifest_order(tensors: NamedTensors, manifest: Manifest) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield the tensors with their specs, drawn one at a time.

    Raises ValueError at the first tensor that is not the manifest's next one, and for missing or surplus tensors.
    """
    drawn = iter(tensors)
    for index, spec in enumerate(manifest.tensors):
        named = next(drawn, None)
        if named is None:
            missing = ", ".join(left.name for left in manifest.tensors[index:])
            raise ValueError(f"tensors in the manifest that were not given: {missing}")
        if TensorSpec.of(*named) != spec:
            theirs = TensorSpec.of(*named).describe()
            raise ValueError(f"tensor {index}: the manifest has {spec.describe()}, given was {theirs}")
        yield spec, named[1]
    if surplus := [name for name, _ in drawn]:
        raise ValueError(f"tensors that are not in the manifest: {', '.join(surplus)}")


def described(kind: str, index: int, specs: Sequence[TensorSpec], manifest: Manifest) -> dict[str, object]:
    """Build the fields that every description has. index: of the bucket in its update."""
    return {
        "kind": kind,
        "index": index,
        "version": manifest.version,
        "names": [spec.name for spec in specs],
        "dtypes": [dtype_name(spec.dtype) for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "manifest": json.loads(manifest.to_json()) if index == 0 else None,
    }


def read_described(
    description: Mapping[str, object], kind: str, own_keys: set[str], problems: list[str]
) -> tuple[tuple[TensorSpec, ...], Manifest | None]:
    """Read the specs and the manifest of a description; errors in them, or in its keys, are added to `problems`."""
    wanted = {"kind", "index", "version", "names", "dtypes", "shapes", "manifest"} | own_keys
    if wrong := sorted(map(str, wanted ^ set(description))):
        problems.append(f"keys that are missing or unknown: {listed(wrong)}")
    if description.get("kind") != kind:
        problems.append(f"kind {shown(description.get('kind'))} is not {kind!r}")
    if not is_count(description.get("index")):
        problems.append(f"index {shown(description.get('index'))} is not a count")
    if not isinstance(description.get("version"), str | None):
        problems.append(f"version {shown(description.get('version'))} is not a string")
    names, dtypes, shapes = (description.get(key) for key in ("names", "dtypes", "shapes"))
    specs: tuple[TensorSpec, ...] = ()
    if isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list):
        try:
            specs = specs_from_lists(names, dtypes, shapes)
        except ValueError as error:
            problems.append(str(error))
    else:
        problems.append("names, dtypes and shapes must be lists")
    return specs, _read_manifest(description.get("manifest"), specs, problems)


def _read_manifest(values: object, specs: Sequence[TensorSpec], problems: list[str]) -> Manifest | None:
    if values is None:
        return None
    lists_of = {"names": list, "dtypes": list, "shapes": list, "digests": dict}
    kinds = {**lists_of, "version": str | None, "model_digest": str | None}
    if not isinstance(values, dict):
        problems.append("the manifest is not an object")
        return None
    if wrong := [key for key, kind in kinds.items() if not isinstance(values.get(key), kind)]:
        problems.append(f"manifest fields of the wrong type: {', '.join(wrong)}")
        return None
    try:
        manifest = Manifest.from_values(values)
    except ValueError as error:
        problems.append(f"manifest: {error}")
        return None
    known = set(manifest.tensors)
    if strangers := [spec.describe() for spec in specs if spec not in known]:
        problems.append(f"tensors that differ from the manifest: {listed(strangers)}")
    return manifest


def raise_if_any(problems: Sequence[str], what: str) -> None:
    """Raise ValueError listing the problems, if there are any."""
    if problems:
        raise ValueError(f"{what}: {listed(problems, '; ')}")


def listed(offenders: Sequence[str], separator: str = ", ") -> str:
    """Join the errors of a message: all of them, up to MAX_OFFENDERS."""
    more = len(offenders) - MAX_OFFENDERS
    return separator.join(offenders[:MAX_OFFENDERS]) + (f"{separator}and {more} more" if more > 0 else "")


def shown(value: object) -> str:
    """Return a short form of an unchecked value; never its repr if that could be endless."""
    if isinstance(value, bool | None):
        return str(value)
    if isinstance(value, int) and value.bit_length() <= 64:
        return str(value)
    if isinstance(value, str | bytes):
        return repr(value[:80]) + ("..." if len(value) > 80 else "")
    return f"a value of type {type(value).__name__}"


def strided_problem(
    shape: Sequence[int], stride: Sequence[int], offset: int, item_bytes: int, storage_bytes: int
) -> str | None:
    """Return the reason why a strided tensor does not fit in its storage, or None. Stride and offset are in
    elements."""
    if len(shape) != len(stride):
        return f"shape of {len(shape)} dimensions with {len(stride)} strides"
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)} dimensions"
    if wrong := [shown(value) for value in (*shape, *stride, offset) if not is_count(value)]:
        return f"shape, stride and offset must be counts, not {listed(wrong)}"
    if math.prod(max(size, 1) for size in shape) >= 1 << 62:
        return f"{len(shape)} dimensions of more elements than there are addresses"
    if 0 in shape:
        return (
            f"starts {offset} elements into a storage of {storage_bytes} bytes"
            if (offset * item_bytes > storage_bytes)
            else None
        )
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    end = (last + 1) * item_bytes
    if end > storage_bytes:
        return f"reaches byte {end} of a storage of {storage_bytes} bytes"
    num_bytes = math.prod(shape) * item_bytes
    if num_bytes > storage_bytes:
        return f"has {num_bytes} bytes in a storage of {storage_bytes}, so that its elements overlap: send a copy of it"
    return None


def copy_bytes(destination: Tensor, source: Tensor) -> None:
    """Copy uint8 [n]; complete when this returns, unless both are on GPUs.

    Between CPU tensors a single thread copies: the two ends copy at the same time already, and torch's threads, which
    spin while they wait, slow each other down (to 0.2 to 0.8 of the rate, on two cores).
    """
    if destination.is_cpu and source.is_cpu:
        if destination.shape != source.shape:  # numpy would broadcast one byte
            raise ValueError(f"{source.numel()} bytes for {destination.numel()}")
        np.copyto(destination.numpy(), source.numpy())
    else:
        destination.copy_(source)
