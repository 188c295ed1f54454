"""The transformers class of a model folder, and the tokens that stand for images, which are not supported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..sharding.folder_faults import GENERATION_CONFIG, folder_faults, json_fault, weight_faults
from ..sharding.skeleton import auto_class
from .adapters.folder import CONFIG_FILE as ADAPTER_CONFIG
from .memory import is_out_of_memory

# What transformers and its libraries raise for files and configurations that they do not understand.
_OF_FILES = (
    *(OSError, SafetensorError, StrictDataclassError),
    *(LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, UnpicklingError, ImportError),
)
# Without the first transformers would ask on the terminal whether to run Python code of the folder. A configuration may
# name an attention whose package is not there: the engine puts its own in the place of any.
_NO_CODE = "trust_remote_code"
_OUR_CHOICES: dict[str, Any] = {_NO_CODE: False, "attn_implementation": None}
_OWN_CODE = (
    "it needs Python code of its own (auto_map in its configuration), and the code in a folder is not run: load the "
    "model yourself and pass the module to the engine"
)
_MEDIA = ("image", "video", "audio")


def refuse_missing_folder(path: Path) -> None:
    """Raise ValueError for a path that is no folder, such as a name of the Hub, or has no configuration."""
    if not path.is_dir():
        raise ValueError(f"there is no model folder {str(path)!r}: download a model of the Hub to one first")
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {str(path)!r} holds no config.json")


def read_config(path: Path) -> PretrainedConfig:
    """Return the configuration of a model folder. Raises ValueError that names what is wrong with it, also with the
    generation_config.json beside it: transformers passes over one that it cannot read, and no answer would end."""
    refuse_missing_folder(path)
    if (path / ADAPTER_CONFIG).exists():  # transformers puts it in, and the loader of parts does not
        raise ValueError(
            f"model folder {str(path)!r} holds an adapter beside the model ({ADAPTER_CONFIG}), which is two models: "
            "put the adapter into a folder of its own and load it from there (--lora), or remove the file"
        )
    if fault := json_fault(path / GENERATION_CONFIG):
        raise ValueError(f"model folder {str(path)!r} cannot be loaded: {fault}")
    with named_by_folder(path):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, **_OUR_CHOICES)
    _refuse_quantised_weights(path, config)
    return config


def _refuse_quantised_weights(path: Path, config: PretrainedConfig) -> None:
    """Raise ValueError for a folder of quantised weights. transformers needs a package for most kinds, and returns the
    others dequantised on some machines and quantised on others."""
    for one in (config, config.get_text_config(decoder=True)):
        if (found := getattr(one, "quantization_config", None)) is not None:
            method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            raise ValueError(
                f"model folder {str(path)!r} holds quantised weights (quantization_config in its config.json, "
                f"quant_method {method!r}): not supported, the engine computes in float32 or bfloat16. Take the "
                "model's folder in bfloat16, or save the model dequantised"
            )


def refuse_faulty_weights(path: Path) -> None:
    """Raise ValueError for files of weights that are cut, absent or none, before their bytes are read."""
    if faults := weight_faults(path):
        raise ValueError(f"model folder {str(path)!r} cannot be loaded: {_some(faults)}")


def load_whole(path: Path, config: PretrainedConfig, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """Load the model of a folder. Raises ValueError that names what is wrong with its files, also weights that are
    missing or of another shape, which transformers would give random values."""
    with named_by_folder(path):
        # Not refused by transformers, whose error names neither tensor nor shape.
        module: PreTrainedModel
        module, info = auto_class(config).from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **_OUR_CHOICES
        )
    wrong = [f"it lacks {_some(sorted(info['missing_keys']))}"] if info["missing_keys"] else []
    other = [f"{name} is {list(found)} and not {list(wanted)}" for name, found, wanted in info["mismatched_keys"]]
    wrong += [_some(sorted(other))] if other else []
    wrong += map(str, info["error_msgs"])
    if wrong:
        raise ValueError(f"model folder {str(path)!r} cannot be loaded: {'; '.join(wrong)}")
    return module.to(device)  # type: ignore[arg-type]


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@contextmanager
def named_by_folder(path: Path) -> Iterator[None]:
    """Raise ValueError for what transformers raises in many kinds about a folder's files; it names the file where that
    can be told."""
    try:
        yield
    except _OF_FILES as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        said = str(error).partition("\n\n")[0]  # what follows is advice about other versions of transformers
        reason = _some(folder_faults(path)) or _unknown_rope(path, error)
        reason = reason or (_OWN_CODE if _NO_CODE in said else f"{type(error).__name__}: {said}")
        raise ValueError(f"model folder {str(path)!r} cannot be loaded: {reason}") from error


def _unknown_rope(path: Path, error: Exception) -> str:
    """Return that an error is of a rotary that config.json names and transformers does not know; empty: it is not."""
    if not isinstance(error, KeyError) or not (path / "config.json").is_file():
        return ""
    named: list[object] = []

    def note(part: dict[str, Any]) -> dict[str, Any]:
        named.extend(part[name] for name in ("rope_type", "type") if name in part)
        return part

    json.loads((path / "config.json").read_text(encoding="utf-8"), object_hook=note)
    return f"config.json names the rope_type {error.args[0]!r}, which is not known" if error.args[0] in named else ""


def media_tokens(config: PretrainedConfig) -> dict[int, str]:
    """Return the kind of media that each placeholder token of a composite model stands for."""
    names = [(kind, f"{kind}_token_{end}") for kind in _MEDIA for end in ("id", "index")]
    return {id: kind for kind, name in names if isinstance(id := getattr(config, name, None), int)}
