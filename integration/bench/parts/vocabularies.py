"""Tokenizers of benchmarks: byte-level BPEs of any size, trained on the sources of the standard library."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_NUM_BYTES = 3_000_000  # of sources: enough for 16,384 tokens


def byte_level_bpe(vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a BPE, in some seconds; the same for one version of Python. `<eos>` is token 0."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def _texts() -> list[str]:
    """Read sources of the standard library, also as JSON, for which the vocabulary needs tokens too."""
    texts, num_bytes = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if num_bytes > _NUM_BYTES:
            break
        text = path.read_text(encoding="utf-8", errors="replace")
        num_bytes += len(text)
        lines = [line.split() for line in text.splitlines()[:200]]
        texts += [text, json.dumps([{line[0]: line[1:]} for line in lines if line])]
    return texts
