"""The numbers of one run of a sequence: what every operation gave at every position, in the order of execution.

Letters: N rows (positions of the sequence), the other dimensions are the operation's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_VALUES = "values."  # begin of the names of tensors in a file
_POSITIONS = "positions."


class Operation(NamedTuple):
    """The place of an operation in the model."""

    layer: int | None  # None: before, behind or beside the layers
    name: str  # of the module inside its layer, or in the model: "self_attn.q_proj"; "" for the layer itself
    what: str = "result"  # "result", "input", "attention", or "query", "key" and "value" that the attention gets

    def describe(self) -> str:
        """Return the place for people. Example: "layer 2, self_attn.q_proj"."""
        what = "" if self.what == "result" else f", {self.what}"
        if self.layer is None:
            return f"{self.name}{what}"
        return f"layer {self.layer}, {self.name or 'the whole layer'}{what}"


@dataclass
class Rows:
    """The results of one operation."""

    positions: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # [rows of a forward, ...], one a forward
    columns: tuple[tuple[int, int], ...] = ()  # ranges of the whole result's columns that a rank has; (): not known

    def add(self, positions: Iterable[int], values: Tensor) -> None:
        """Append rows of one forward."""
        self.positions += positions
        self.values.append(values)

    def by_position(self) -> tuple[list[int], Tensor]:
        """Return the positions in their order, and the rows [N, ...]. Of a row that was computed twice, the last."""
        last = {position: row for row, position in enumerate(self.positions)}
        order = sorted(last)
        return order, torch.cat(self.values)[[last[position] for position in order]]


@dataclass
class Recording:
    """The numbers of one run of a sequence."""

    operations: dict[Operation, Rows] = field(default_factory=dict)  # in the order of their first execution
    logprobs: dict[int, float] = field(default_factory=dict)  # by position of the token
    notes: list[str] = field(default_factory=list)  # remarks for people, on what happened in the run

    def save(self, path: Path) -> None:
        """Write the recording as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        listed = []
        for index, (operation, rows) in enumerate(self.operations.items()):
            positions, values = rows.by_position()
            tensors[f"{_POSITIONS}{index}"] = torch.tensor(positions)
            tensors[f"{_VALUES}{index}"] = values.contiguous()
            listed.append([*operation, rows.columns])
        about = {"operations": listed, "logprobs": list(self.logprobs.items()), "notes": self.notes}
        save_file(tensors, path, metadata={"recording": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file that `save` has written."""
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["recording"])
            operations = {}
            for index, (layer, name, what, columns) in enumerate(about["operations"]):
                positions, values = (file.get_tensor(f"{kind}{index}") for kind in (_POSITIONS, _VALUES))
                ranges = tuple((first, end) for first, end in columns)
                operations[Operation(layer, name, what)] = Rows(positions.tolist(), [values], ranges)
        return cls(operations, dict(map(tuple, about["logprobs"])), about["notes"])


def of_ranks(parts: Sequence[Recording], tp: int) -> Recording:
    """Put the recordings of a replica's ranks together, in the order of the ranks: `tp` of them share each stage.

    Columns that ranks share are put side by side; of a result that all of them have, one is taken.
    """
    whole, num_stages = Recording(), len(parts) // tp
    for index in range(num_stages):
        stage = parts[index * tp : (index + 1) * tp]
        for operation in _of_the_model(list(stage[0].operations), index, num_stages):
            its = [part.operations[operation] for part in stage if operation in part.operations]
            if len(its) == tp:
                whole.operations[operation] = _joined(its)
    for part in parts:
        whole.logprobs |= part.logprobs
        whole.notes += [note for note in part.notes if note not in whole.notes]
    return whole


def _of_the_model(operations: list[Operation], stage: int, num_stages: int) -> list[Operation]:
    """Return the operations of a stage that are the model's: of the others, before and behind its own layers, a stage
    passes its input on."""
    layers = [at for at, operation in enumerate(operations) if operation.layer is not None]
    first = layers[0] if stage > 0 and layers else 0
    end = layers[-1] + 1 if stage + 1 < num_stages and layers else len(operations)
    return operations[first:end]


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    positions, first = parts[0].by_position()
    values = [first, *(part.by_position()[1] for part in parts[1:])]
    if all(value.shape == first.shape and torch.equal(value, first) for value in values[1:]):
        return replace(parts[0], positions=positions, values=[first])
    if not parts[0].columns:
        return Rows(positions, [torch.cat(values, 1)])
    width = max(end for part in parts for _, end in part.columns)
    out = first.new_zeros(len(first), width)
    for part, value in zip(parts, values, strict=True):
        at = 0
        for start, end in part.columns:
            out[:, start:end] = value[:, at : at + end - start]
            at += end - start
    return Rows(positions, [out])


def common(first: Mapping[Operation, Rows], second: Mapping[Operation, Rows]) -> list[Operation]:
    """Return the operations that both have, in the order of the first."""
    return [operation for operation in first if operation in second]
