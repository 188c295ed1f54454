"""The data of a forward pass: tokens, targets and inputs of the loss, checked against model and loss.

Letters: N tokens of a datum, K targets of a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .losses import Loss, loss_named, settings_of

_TARGETS, _WEIGHTS = "target_tokens", "weights"


class BadInput(ValueError):
    """A request that its client has to change."""


@dataclass(frozen=True)
class Datum:
    """One sequence with what its loss reads, as a request has it."""

    token_ids: np.ndarray  # int64 [N]
    inputs: Mapping[str, np.ndarray]  # int64 or float32, by name


@dataclass(frozen=True)
class CheckedDatum:
    """A checked datum, on the CPU."""

    token_ids: Tensor  # int64 [N]
    targets: Tensor  # int64 [N] or [N, K]
    inputs: dict[str, Tensor]  # float32, of the targets' shape, `weights` among them

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        return self.targets.numel()


@dataclass(frozen=True)
class Batch:
    """The checked data of one request, with its loss."""

    name: str
    loss: Loss
    config: dict[str, float]
    sequences: tuple[CheckedDatum, ...]


def batch_of(
    data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str], *, vocab_size: int, max_length: int
) -> Batch:
    """Check the data of a request. Raises BadInput naming the datum, and what is wrong with it."""
    try:
        loss = loss_named(loss_fn)
        settings = settings_of(loss_fn, loss, config)
    except ValueError as error:
        raise BadInput(str(error)) from None
    if not data:
        raise BadInput("data is empty")
    sequences = []
    for index, datum in enumerate(data):
        try:
            sequences.append(_checked(datum, loss_fn, loss, vocab_size, max_length))
        except ValueError as error:
            raise BadInput(f"data[{index}]: {error}") from None
    return Batch(loss_fn, loss, settings, tuple(sequences))


def _checked(datum: Datum, name: str, loss: Loss, vocab_size: int, max_length: int) -> CheckedDatum:
    num_rows = len(datum.token_ids)
    if not 1 <= num_rows <= max_length:
        raise ValueError(f"model_input has {num_rows} tokens; it must have 1 to {max_length}")
    _check_ids("model_input", datum.token_ids, vocab_size)
    if missing := [key for key in (_TARGETS, *loss.required) if key not in datum.inputs]:
        raise ValueError(f"loss_fn_inputs has no {', '.join(missing)}, which {name} needs")
    known = {_TARGETS, _WEIGHTS, *loss.required}
    if unknown := sorted(datum.inputs.keys() - known):
        raise ValueError(f"loss_fn_inputs: {name} does not take {', '.join(unknown)[:200]}")
    targets = datum.inputs[_TARGETS]
    if targets.dtype != np.int64:
        raise ValueError(f"{_TARGETS} must be int64, not {targets.dtype}")
    shapes = "[N, K] or [N]" if loss.takes_several else "[N]"
    if targets.ndim not in ((1, 2) if loss.takes_several else (1,)) or len(targets) != num_rows or not targets.size:
        raise ValueError(f"{_TARGETS} has shape {list(targets.shape)}; {name} takes {shapes}, of {num_rows} tokens")
    _check_ids(_TARGETS, targets, vocab_size)
    inputs = {key: _checked_numbers(key, value, targets) for key, value in datum.inputs.items() if key != _TARGETS}
    if _WEIGHTS not in inputs:
        inputs[_WEIGHTS] = torch.ones(targets.shape, dtype=torch.float32)
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise ValueError("sequence_ratio_mask marks no token")
    return CheckedDatum(torch.from_numpy(datum.token_ids.copy()), torch.from_numpy(targets.copy()), inputs)


def _checked_numbers(key: str, value: np.ndarray, targets: np.ndarray) -> Tensor:
    if value.shape != targets.shape:
        raise ValueError(f"{key} has shape {list(value.shape)}, and {_TARGETS} {list(targets.shape)}")
    numbers = value.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{key} has numbers that are not finite")
    return torch.from_numpy(numbers)


def _check_ids(key: str, ids: np.ndarray, vocab_size: int) -> None:
    first, last = int(ids.min()), int(ids.max())
    if first < 0 or last >= vocab_size:
        raise ValueError(f"{key} has token ids from {first} to {last}; the vocabulary has {vocab_size}")
