"""The plan of an update, as plain values for JSON: names, dtypes, shapes, bytes, digests."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]
MAX_DIMENSIONS = 64  # of a tensor; torch itself supports no more
MAX_ELEMENTS = 1 << 62
_MAX_WRONG = 20  # in one message

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as every wire has it: "bfloat16", "float8_e4m3fn", ..."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name, with or without "torch.". Raises ValueError quoting an unknown one."""
    dtype = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"unknown dtype {short(name)}")
    return dtype


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def describe(self) -> str:
        """Return the form for error messages: `name bfloat16[2, 3]`."""
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


def specs_of(named_tensors: NamedTensors) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors, in their order."""
    return tuple(TensorSpec.of(name, tensor) for name, tensor in named_tensors)


def specs_from_lists(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[TensorSpec, ...]:
    """Build specs from the three parallel lists that the frameworks send.

    Raises ValueError listing every bad dtype and shape, lists of different lengths, and duplicate names.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: they must be as many")
    wrong: list[str] = []
    specs: list[TensorSpec] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if len(wrong) >= _MAX_WRONG:
            wrong.append("the rest was not read")
            break
        if not isinstance(name, str):
            wrong.append(f"name {short(name)} is not a string")
            continue
        try:
            sizes = sizes_of(shape)
            specs.append(TensorSpec(name, parse_dtype(dtype), sizes))
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    twice = sorted(name for name, count in Counter(spec.name for spec in specs).items() if count > 1)
    wrong += [f"{name} is named more than once" for name in twice[:_MAX_WRONG]]
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(specs)


def sizes_of(shape: object) -> tuple[int, ...]:
    """Read a shape of plain values. Raises ValueError for any other value, and for sizes that no tensor can have."""
    if not isinstance(shape, list | tuple | torch.Size):
        raise ValueError(f"shape {short(shape)}")
    # Bounded before any of them are multiplied: the product of long numbers takes minutes.
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape of {len(shape)} dimensions")
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < MAX_ELEMENTS for n in shape):
        raise ValueError(f"shape [{', '.join(map(short, shape))}]")
    if math.prod(max(n, 1) for n in shape) >= MAX_ELEMENTS:
        raise ValueError(f"shape {list(shape)} of more elements than there are addresses")
    return tuple(shape)


def short(value: object) -> str:
    """Return a value of a message, unless it is long."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    if isinstance(value, list | tuple) and len(value) <= 4:
        return f"[{', '.join(map(short, value))}]"
    if isinstance(value, dict) and len(value) <= 4:
        return f"{{{', '.join(f'{short(key)}: {short(item)}' for key, item in value.items())}}}"
    return (
        f"{value!r:.100}" if isinstance(value, int | float | str | None) else f"a value of type {type(value).__name__}"
    )


@dataclass(frozen=True)
class Manifest:
    """The tensors of one update, in the order of their transfer."""

    version: str | None
    tensors: tuple[TensorSpec, ...]
    digests: Mapping[str, str] = field(default_factory=dict)  # hex tensor roots (model_digest.tensor_root) by name
    # the engine's digest after the update (model_digest.model_root), if the sender knows it
    model_digest: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def to_json(self) -> str:
        """Return one JSON object, for `from_json`."""
        return json.dumps(
            {
                "version": self.version,
                "names": [spec.name for spec in self.tensors],
                "dtypes": [dtype_name(spec.dtype) for spec in self.tensors],
                "shapes": [list(spec.shape) for spec in self.tensors],
                "digests": dict(self.digests),
                "model_digest": self.model_digest,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest from JSON. Raises ValueError naming every error."""
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: object) -> Manifest:
        """Read a manifest from the plain values of `to_json`. Raises ValueError naming every error."""
        if not isinstance(values, dict):
            raise ValueError(f"a manifest is a JSON object, not {type(values).__name__}")
        wanted = {"version", "names", "dtypes", "shapes", "digests", "model_digest"}
        if wrong := sorted(wanted ^ set(values)):
            raise ValueError(f"manifest keys that are missing or unknown: {', '.join(wrong)}")
        lists = {key: values[key] for key in ("names", "dtypes", "shapes")}
        if wrong := [f"{key} = {short(value)}" for key, value in lists.items() if not isinstance(value, list)]:
            raise ValueError(f"manifest fields of the wrong type: {'; '.join(wrong)}")
        return cls.checked(specs_from_lists(*lists.values()), values)

    @classmethod
    def checked(cls, tensors: tuple[TensorSpec, ...], values: Mapping[str, object]) -> Manifest:
        """Build a manifest from specs and the unchecked other fields: `version`, `digests`, `model_digest`.

        Raises ValueError naming the errors in these.
        """
        is_right = {
            "version": isinstance(values.get("version"), str | None),
            "model_digest": isinstance(values.get("model_digest"), str | None),
            "digests": _are_texts(values.get("digests")),
        }
        if wrong := [f"{key} = {short(values.get(key))}" for key, right in is_right.items() if not right]:
            raise ValueError(f"manifest fields of the wrong type: {'; '.join(wrong)}")
        digests = cast(dict[str, str], values["digests"])
        if unknown := sorted(set(digests) - {spec.name for spec in tensors}):
            raise ValueError(f"digests of tensors that are not in the manifest: {', '.join(unknown)}")
        version, model_digest = (cast(str | None, values.get(key)) for key in ("version", "model_digest"))
        return cls(version, tensors, digests, model_digest)


def _are_texts(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(text, str) for text in values.values())


def differences(
    ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec], our_name: str = "ours", their_name: str = "theirs"
) -> list[str]:
    """Describe the differences between two ordered plans, first difference first; empty when they are equal."""
    if tuple(ours) == tuple(theirs):
        return []  # the usual case, without formatting anything
    found = []
    for index in range(max(len(ours), len(theirs))):
        mine = ours[index].describe() if index < len(ours) else "nothing"
        other = theirs[index].describe() if index < len(theirs) else "nothing"
        if mine != other:
            found.append(f"tensor {index}: {our_name} {mine}, {their_name} {other}")
    return found
