"""Adapters for the job: made by PEFT around a frozen base, and saved in PEFT's layout."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ....kernels.sampling.draws import derive_seed
from ..settings.training import LoraSettings

ALL_LINEAR = "all-linear"  # PEFT's name for every linear layer but the output


def missing_package() -> list[str]:
    """Return a fault if PEFT is not installed."""
    if importlib.util.find_spec("peft") is not None:
        return []
    return ["peft must be installed for train.lora, the extra `lora`: pip install -e '.[lora]'"]


def add_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int, base: Path | None = None) -> Any:
    """Add adapters to the layers of a model, in place, and freeze the rest. Returns the PeftModel around it.

    The adapters' first values follow from the seed; they change no output. base: the folder of the model, which the
    saved adapters name. Raises ValueError for layers that the model does not have.
    """
    from peft import LoraConfig, get_peft_model

    names = [name.strip() for name in settings.targets.split(",")]
    if missing := [n for n in names if n != ALL_LINEAR and not any(m.endswith(n) for m, _ in model.named_modules())]:
        raise ValueError(f"train.lora.targets: {type(model).__name__} has no layers named {', '.join(missing)}")
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
        task_type="CAUSAL_LM", base_model_name_or_path=None if base is None else str(base.resolve()),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, settings.rank))
        adapted = get_peft_model(model, config)
    if base is not None:  # PEFT writes the path that the model was loaded from
        config.base_model_name_or_path = str(base.resolve())
    return adapted
