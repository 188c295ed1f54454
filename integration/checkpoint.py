"""Checkpoints of the main job: whole or not there, and enough to go on as if nothing had happened.

A checkpoint is a folder `step-000020` with the model, the optimizer's tensors and the step. It is written under another
name, flushed to the disk and renamed. No pickle: tensors are safetensors, the rest is JSON. Every random choice of the
job is a pure function of (seed, step), so no generator state is kept.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

_PREFIX = "step-"
_NUM_KEPT = 2


def save_checkpoint(folder: Path, step: int, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Path:
    """Write the state after `step` finished steps; keeps the newest two checkpoints. One rank calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PREFIX}{step:06d}"
    partial = folder / f".partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, partial / "model.safetensors")
    save_file(_optimizer_tensors(model, optimizer), partial / "optimizer.safetensors")
    (partial / "state.json").write_text(json.dumps({"step": step}) + "\n")
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    if path.exists():  # a run that was resumed comes by here again, with the same bytes
        shutil.rmtree(path)
    partial.rename(path)
    _flush(folder)
    for old in _checkpoints(folder)[:-_NUM_KEPT]:
        shutil.rmtree(old)
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the most steps, or None."""
    return _checkpoints(folder)[-1] if _checkpoints(folder) else None


def load_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Put a checkpoint into model and optimizer, in place; returns its number of finished steps.

    Raises ValueError naming the tensors in which the checkpoint and the model differ.
    """
    saved = load_file(path / "model.safetensors")
    parameters = dict(model.named_parameters())
    differing = sorted(
        name
        for name in {*saved, *parameters}
        if name not in saved or name not in parameters or saved[name].shape != parameters[name].shape
    )
    if differing:
        raise ValueError(f"checkpoint {path} is of another model: {', '.join(differing)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    _load_optimizer(path / "optimizer.safetensors", parameters, optimizer)
    return json.loads((path / "state.json").read_text())["step"]


def _optimizer_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _load_optimizer(path: Path, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    for key_and_name, value in load_file(path).items():
        key, _, name = key_and_name.partition("/")
        parameter = parameters[name]
        # Step counters stay on the CPU, as the optimizer makes them; moments stand beside their parameter.
        optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*")) if folder.is_dir() else []


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
