"""A tiny random model, built in a moment, for examples that get no model. Its text has no meaning.

The other examples of this folder call `load`. Your own program calls transformers instead.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def load(path: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the folder, or build a Qwen3 of 0.1 million parameters whose tokens are bytes."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    tokenizer = _bytes_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval(), tokenizer


def _bytes_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer with a token for each byte, and `<eos>`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
