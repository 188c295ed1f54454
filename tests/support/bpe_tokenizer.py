"""A small tokenizer of the kind that language models have."""

from __future__ import annotations

import json

import tokenizers
import transformers


def train_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE of 1,000 tokens: `<eos>` (0), a special `<|im_start|>` and a control word `<think>`."""
    words = ("name", "value", "items", "type", "object", "string", "true", "false", "città", "ключ", "the", "and")
    lines = [json.dumps({a: [b, {b: 10 * i + j}]}, ensure_ascii=False)
             for i, a in enumerate(words) for j, b in enumerate(words)]  # fmt: skip
    lines += [f'"{a}": "{b} of the {a}", 0.{i}25, -{i}7' for i, a in enumerate(words) for b in words]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=999, special_tokens=["<eos>", "<|im_start|>"], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    backend.train_from_iterator(lines, trainer)
    backend.add_tokens(["<think>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<|im_start|>"]
    )
