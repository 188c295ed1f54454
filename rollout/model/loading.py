"""The transformers class of a model folder, and the tokens that stand for images, which are not supported."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

_MEDIA = ("image", "video", "audio")


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
