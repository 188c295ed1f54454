"""Files of the history of samples: JSON with the tokens in base64, int32 each. They are read as data from anywhere."""

from __future__ import annotations

import json
import os
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

KEY_BYTES = 16  # of the name of a prompt
_FORMAT = 1
_MAX_RATIO = 4  # bytes of a file to bytes of the samples in it, at most, and a MiB

Histories = Mapping[bytes, Sequence[bytes]]  # by prompt: the tokens of its samples, the newest last


def write_histories(path: Path, histories: Histories) -> None:
    """Write histories to a file, whole or not at all. Raises OSError."""
    prompts = {b64encode(key).decode(): [b64encode(s).decode() for s in samples] for key, samples in histories.items()}
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(json.dumps({"format": _FORMAT, "prompts": prompts}, separators=(",", ":")))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_histories(path: Path, vocab_size: int, max_bytes: int) -> dict[bytes, list[bytes]]:
    """Read a file that `write_histories` wrote. max_bytes: of samples that the reader keeps.

    Raises OSError, and ValueError naming the file for one that is too long, or no such file, or has other tokens.
    """
    num_bytes = path.stat().st_size
    if num_bytes > (limit := _MAX_RATIO * max_bytes + 2**20):
        raise ValueError(
            f"{path} has {num_bytes} bytes, more than {limit}, enough for all that is kept (speculation_memory_mb)"
        )
    try:
        with path.open("rb") as file:
            return _histories(json.loads(file.read(limit)), vocab_size)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no saved history of samples: {error}") from error


def _histories(data: object, vocab_size: int) -> dict[bytes, list[bytes]]:
    """Return the histories in the value of a file. Raises ValueError, and TypeError for parts that are no text."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("prompts"), dict):
        raise ValueError(f'it must be an object with "format": {_FORMAT} and "prompts"')
    histories = {}
    for key, samples in data["prompts"].items():
        name = b64decode(key, validate=True)
        if len(name) != KEY_BYTES or not isinstance(samples, list):
            raise ValueError(f"a prompt has a name of {KEY_BYTES} bytes and a list of samples")
        histories[name] = [_sample(text, vocab_size) for text in samples]
    return histories


def _sample(text: str, vocab_size: int) -> bytes:
    sample = b64decode(text, validate=True)
    token_ids = array("i", sample)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise ValueError(f"a sample has token ids outside the vocabulary, which ends at {vocab_size - 1}")
    return sample
