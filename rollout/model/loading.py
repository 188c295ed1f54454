"""The transformers class of a model folder, and the tokens that stand for images, which are not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

_MEDIA = ("image", "video", "audio")


def refuse_missing_folder(path: Path) -> None:
    """Raise ValueError for a path that is no folder, such as a name of the Hub, or has no configuration."""
    if not path.is_dir():
        raise ValueError(f"there is no model folder {str(path)!r}: download a model of the Hub to one first")
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {str(path)!r} holds no config.json")


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' class that loads this model: of causal models, or of models of images and text, which run
    on text through their text model."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    if not is_causal and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def media_tokens(config: PretrainedConfig) -> dict[int, str]:
    """Return the kind of media that each placeholder token of a composite model stands for."""
    names = [(kind, f"{kind}_token_{end}") for kind in _MEDIA for end in ("id", "index")]
    return {id: kind for kind, name in names if isinstance(id := getattr(config, name, None), int)}
