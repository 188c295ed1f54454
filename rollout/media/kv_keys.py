"""Keys of a prompt's blocks: what their KV depends on beside the tokens of the block and those before it.

A row's KV follows from the tokens up to it, the features that rows up to it take, their rotary positions, and what a
row sees behind it. Block by block a key tells of the features and positions of the block's own rows, and of the tokens
that see each other both ways with some of them. So two prompts share the KV of the blocks before their images differ,
as two turns of a conversation do, of which the later has one more image.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from .images import Images


def block_keys(images: Images, block_size: int) -> Mapping[int, str]:
    """Return the keys of those blocks of `block_size` tokens that have one, by the block's number. Made once: the
    samples of a prompt have the same images."""
    if block_size not in images.block_keys:
        images.block_keys[block_size] = _made(images, block_size)
    return images.block_keys[block_size]


def _made(images: Images, block_size: int) -> dict[int, str]:
    told: defaultdict[int, list[str]] = defaultdict(list)
    if images.tokens:
        for number in range(images.tokens[0] // block_size, images.tokens[-1] // block_size + 1):
            told[number] += _features(images, number * block_size, (number + 1) * block_size)
    steps = _steps(images)
    _tell_positions(steps, block_size, told)
    for (start, stop), tokens in zip(images.blocks, images.block_tokens, strict=True):
        digest = hashlib.sha256(steps[:, start:stop].tobytes()).hexdigest()
        seen = " ".join([tokens, digest, *_features(images, start, stop)])
        for number in range(start // block_size, (stop - 1) // block_size + 1):
            told[number].append(f"both ways {start - number * block_size} {stop - start} {seen}")
    return {number: hashlib.sha256("\n".join(lines).encode()).hexdigest() for number, lines in told.items() if lines}


def _features(images: Images, start: int, stop: int) -> list[str]:
    """Return a line about the features that each image has among the tokens from `start` to `stop` - 1."""
    parts = images.parts(start, stop)
    return [f"features {part.first} to {part.end} of {images.digests[part.index]}" for part in parts]


def _steps(images: Images) -> np.ndarray:
    """Return the steps of the rotary positions int64 [S, P + 1], from token to token up to the first one behind the
    prompt; [1, 0] where the positions are those of the tokens. They do not depend on where the prompt ends."""
    if images.prompt_positions is None:
        return np.empty((1, 0), dtype=np.int64)
    positions = images.rotary_positions(np.arange(images.prompt_positions.shape[1] + 1))
    return np.diff(positions, axis=1, prepend=-1)


def _tell_positions(steps: np.ndarray, block_size: int, told: dict[int, list[str]]) -> None:
    """Tell of the rows whose position is not the one after the row before."""
    rows = (steps != 1).any(0).nonzero()[0]
    for number in np.unique(rows // block_size).tolist():
        own = rows[rows // block_size == number]
        digest = hashlib.sha256((own % block_size).tobytes() + steps[:, own].tobytes())
        told[number].append(f"positions {digest.hexdigest()}")
