"""The part of a vocabulary that all its grammars share, and masks of tokens.

A mask has one bit for each token, uint8 [4 * ceil(V / 32)], the first token in the lowest bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Pieces(Protocol):
    """A vocabulary: the bytes that each token spells."""

    @property
    def pieces(self) -> Sequence[bytes]: ...


@dataclass(frozen=True)
class Vocabulary:
    """The part of a vocabulary that is the same for every grammar."""

    library: Any
    text: Pieces
    stop_token_ids: Sequence[int]
    no_text: np.ndarray  # tokens that are part of no UTF-8 text, or spell nothing
    no_json: np.ndarray  # these, and control characters, which JSON text does not have
    silent: np.ndarray  # tokens that spell nothing, stop tokens apart
    after_lead: Mapping[int, np.ndarray]  # tokens that are not allowed after this byte
    byte_ids: np.ndarray  # int64 [256]: the token that spells this byte alone, -1: none
    first_bytes: np.ndarray  # int16 [V]: the byte that each token begins with, -1: none


def pack_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Build the mask of these ids."""
    bits = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")
