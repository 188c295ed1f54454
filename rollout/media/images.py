"""The images of one prompt: their tensors, their tokens, and the positions of the prompt's tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one prompt, in the order of their tokens."""

    inputs: Sequence[Mapping[str, Tensor]]  # of each image, by the names of the encoder's parameters
    tokens: Sequence[int]  # ascending indices of the prompt's tokens that stand for images
    ends: Sequence[int]  # of each image, in `tokens`
    digest: str  # SHA-256 of the tensors
    digests: Sequence[str]  # SHA-256 of the tensors of each image
    prompt_positions: Tensor | None = None  # int64 [S, P], of each part of the rotary; None: those of the tokens
    offset: int = 0  # of the rotary positions behind the prompt, to those of the tokens
    beside: Mapping[str, Tensor] = field(default_factory=dict)  # [1, P]: what else of the tokens a processor has given
    blocks: Sequence[tuple[int, int]] = ()  # tokens [begin, end) that see each other both ways; ascending
    block_tokens: Sequence[str] = ()  # SHA-256 of the tokens of each of them
    block_keys: dict[int, Mapping[int, str]] = field(default_factory=dict)  # by size, see `kv_keys`

    @property
    def outline(self) -> Images:
        """The images without their tensors, by which the cached blocks of their prompt are found."""
        return replace(self, inputs=(), beside={})

    def parts(self, start: int, end: int) -> Iterator[ImagePart]:
        """Yield the parts of images whose tokens are among the prompt's tokens from `start` to `end` - 1."""
        first, last = bisect_left(self.tokens, start), bisect_left(self.tokens, end)
        begin = 0
        for index, image_end in enumerate(self.ends):
            if max(first, begin) < min(last, image_end):
                yield ImagePart(self, index, max(first, begin) - begin, min(last, image_end) - begin)
            begin = image_end

    def whole_blocks(self, start: int, end: int) -> int:
        """Return the end of a chunk from token `start` to about `end` that ends in no block: the keys of its rows are
        computed together. It is before `end` where a block begins behind `start`, else behind the block."""
        for first, last in self.blocks:
            if first < end < last:
                return first if first > start else last
        return end

    def in_blocks(self, start: int, end: int) -> Iterator[int]:
        """Yield the tokens from `start` to `end` - 1 that are in blocks, counted from `start`."""
        for first, last in self.blocks:
            yield from range(max(first, start) - start, min(last, end) - start)

    def num_tokens_of(self, index: int) -> int:
        """Return the number of tokens of one image."""
        return self.ends[index] - (self.ends[index - 1] if index else 0)

    def rows(self, start: int, end: int) -> Sequence[int]:
        """Return the tokens from `start` to `end` - 1 that stand for images, counted from `start`."""
        first, last = bisect_left(self.tokens, start), bisect_left(self.tokens, end)
        return [token - start for token in self.tokens[first:last]]

    def rotary_positions(self, positions: np.ndarray) -> np.ndarray:
        """Return the rotary positions, [S, N] or [N], of tokens at these positions [N]."""
        if self.prompt_positions is None:
            return positions
        of_prompt = self.prompt_positions.numpy()
        num_parts, num_prompt = of_prompt.shape
        behind = np.broadcast_to(positions + self.offset, (num_parts, len(positions)))
        return np.where(positions < num_prompt, of_prompt[:, np.minimum(positions, num_prompt - 1)], behind)


class PromptWithImages(list[int]):
    """The token ids of a prompt whose images are read. Copies of the list have no images."""

    def __init__(self, token_ids: Sequence[int], images: Images) -> None:
        super().__init__(token_ids)
        self.images = images


@dataclass(frozen=True)
class ImagePart:
    """The features of one image, from number `first` to `end` - 1, which rows of a step take."""

    images: Images
    index: int
    first: int
    end: int


@dataclass
class ImageRows:
    """The rows of a step that take features of images, and the rotary positions of all its rows if some have others
    than their tokens'."""

    rows: list[int] = field(default_factory=list)  # of the step, ascending
    parts: list[ImagePart] = field(default_factory=list)
    positions: Tensor | None = None  # int64 [S, N] or [N]
    in_blocks: list[int] = field(default_factory=list)  # rows that see each other both ways, block by block

    def add(self, images: Images, start: int, num_tokens: int, first_row: int) -> None:
        """Add the rows of a sequence: `num_tokens` tokens from number `start`, the first at row `first_row`."""
        self.rows += [first_row + row for row in images.rows(start, start + num_tokens)]
        self.parts += images.parts(start, start + num_tokens)
        self.in_blocks += [first_row + row for row in images.in_blocks(start, start + num_tokens)]

    def to(self, device: torch.device) -> ImageRows:
        """Copy the positions to a device."""
        if self.positions is None:
            return self
        return replace(self, positions=self.positions.to(device, non_blocking=True))
