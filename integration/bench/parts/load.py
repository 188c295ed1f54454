"""The load of a throughput benchmark: prompts and lengths, the same for every engine."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

import torch

LENGTHS = ("fixed", "lognormal")
_SIGMA = 0.9  # of the logarithm: the longest of 32 is then about six times the median
_LONGEST = 4  # times new_tokens; longer draws are cut


@dataclass(frozen=True)
class Load:
    """The sequences of one repeat. Example: `Load(32, 512, 128, group=8)`: four prompts, eight samples of each."""

    batch: int
    prompt_tokens: int
    new_tokens: int  # of every sequence; with lognormal lengths their mean, about
    group: int = 1  # sequences that share a prompt
    lengths: str = "fixed"

    def __post_init__(self) -> None:
        if self.batch % self.group:
            raise ValueError(f"--batch {self.batch} is not a multiple of --group {self.group}")

    @property
    def max_new_tokens(self) -> int:
        """The most new tokens that a repeat can draw."""
        return self.new_tokens * (_LONGEST if self.lengths == "lognormal" else 1)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.max_new_tokens

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Draw random token ids, a pure function of the load and the repeat. A group's members are neighbours."""
        generator = torch.Generator().manual_seed(1000 + repeat)
        shape = (self.batch // self.group, self.prompt_tokens)
        prompts = torch.randint(vocab_size, shape, generator=generator).tolist()
        return [prompt for prompt in prompts for _ in range(self.group)]

    def counts(self, repeat: int) -> list[int]:
        """Draw the number of new tokens of each sequence, a pure function of the load and the repeat."""
        if self.lengths == "fixed":
            return [self.new_tokens] * self.batch
        draw = random.Random(2000 + repeat)
        location = math.log(self.new_tokens) - _SIGMA**2 / 2
        drawn = (draw.lognormvariate(location, _SIGMA) for _ in range(self.batch))
        return [min(max(round(count), 1), self.max_new_tokens) for count in drawn]

    def num_new_tokens(self, repeat: int) -> int:
        """Return the number of new tokens of all sequences of the repeat."""
        return sum(self.counts(repeat))


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, default=32, help="sequences at a time")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--group", type=positive, default=1, help="sequences that share a prompt")
    parser.add_argument(
        "--lengths", choices=LENGTHS, default="fixed",
        help="lognormal: a long tail around --new-tokens, the same draws for every engine",
    )  # fmt: skip


def load_of(options: argparse.Namespace) -> Load:
    """Build the load of the options. Raises ValueError for groups that do not fill the batch."""
    return Load(options.batch, options.prompt_tokens, options.new_tokens, options.group, options.lengths)


def positive(text: str) -> int:
    """Parse an argument of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
