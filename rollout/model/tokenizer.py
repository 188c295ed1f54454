"""The tokenizer of a model folder, and the ids that end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .loading import named_by_folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the folder's tokenizer; None if it has none. Raises ValueError naming the folder of one that is damaged."""
    has_one = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not has_one:
        return None
    with named_by_folder(folder):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return all that the tokens of a text, and the text of tokens, follow from, as text."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return str(backend.to_str())
    return repr([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map])


def find_eos_token_ids(module: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return every id that ends a sequence, from the module's generation config and the tokenizer."""
    configured = getattr(module.generation_config, "eos_token_id", None)
    ids = set(_as_ids(configured))
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(id for id in ids if id is not None)


def _as_ids(configured: Any) -> list[int]:
    """Return a setting's ids: transformers takes an int, a list, a tuple and a tensor. Raises ValueError."""
    if isinstance(configured, torch.Tensor | np.ndarray | np.integer):
        configured = configured.tolist()
    ids = list(configured) if isinstance(configured, list | tuple) else [configured]
    if wrong := [one for one in ids if one is not None and not isinstance(one, int | np.integer)]:
        raise ValueError(f"eos_token_id of the generation_config holds {wrong[0]!r:.100}, which is no token id")
    return [int(one) for one in ids if one is not None]


def refuse_other_eos(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase | None, eos_token_ids: frozenset[int]
) -> None:
    """Raise ValueError if other ids end a sequence than these, which the module's engine was made with."""
    if (now := find_eos_token_ids(module, tokenizer)) != eos_token_ids:
        raise ValueError(
            f"eos_token_id of {type(module).__name__}'s generation_config, or of the tokenizer, was changed after the "
            f"engine was made: the engine ends sequences at {sorted(eos_token_ids)}, and they say {sorted(now)} now. "
            "Set it before the engine is made, make the engine anew, or name the tokens in stop_token_ids"
        )
