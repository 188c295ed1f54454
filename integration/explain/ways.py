"""The ways in which a sequence can be run, and how they are written. Plain values.

A way is written as words with commas: `decode`, `prefill,chunk=16`, `decode,tp=2`, `trainer,dtype=bfloat16`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

RUNNERS = ("decode", "prefill", "trainer", "transformers")
BLOCK_SIZE = 16
DTYPES = ("float32", "bfloat16")

# Shorter words, and what they stand for.
_WORDS: dict[str, dict[str, object]] = {
    "chunked": {"runner": "prefill", "chunk": 16},
    "prefix-hit": {"prefix": BLOCK_SIZE},
    "speculation": {"draft": 4},
    "no-invariant": {"invariant": False},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
}


class RunFailed(RuntimeError):
    """An error of a way that could not be run to its end."""


@dataclass(frozen=True)
class Way:
    """One way to run a sequence.

    decode: its prompt in one prefill, then a step a token; prefill: prompt and output in one prefill; both in an engine
    with its paged KV. trainer: the training forward, over packed rows and with gradients. transformers: the module's
    own operations.
    """

    runner: str = "decode"
    chunk: int = 0  # rows of a prefill a step; 0: all at once
    prefix: int = 0  # first tokens whose KV an earlier request has computed, a multiple of the block size
    draft: int = 0  # rows a decode step for the tokens that come next
    mates: int = 0  # other sequences in the same steps, or in the same packed row
    tp: int = 1  # ranks that share each layer
    pp: int = 1  # stages
    k_blocks: int = 0  # partial products of row-parallel layers; 0: as many as the larger tp of the two ways
    invariant: bool = True
    dtype: str = ""  # "float32" | "bfloat16"; "": the folder's
    attention: str = "eager"  # of transformers' own: "eager", "sdpa", "flash_attention_2", ...
    model: str = ""  # folder; "": the one that is given for both ways

    def __post_init__(self) -> None:
        wrong = []
        if self.runner not in RUNNERS:
            wrong.append(f"a way is one of {', '.join(RUNNERS)}, not {self.runner!r}")
        for name, least in (("chunk", 0), ("prefix", 0), ("draft", 0), ("mates", 0), ("tp", 1), ("pp", 1),
                            ("k_blocks", 0)):  # fmt: skip
            if getattr(self, name) < least:
                wrong.append(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.prefix % BLOCK_SIZE:
            wrong.append(f"prefix must be a multiple of {BLOCK_SIZE}, the size of a block, not {self.prefix}")
        if self.dtype not in ("", *DTYPES):
            wrong.append(f"dtype must be {' or '.join(DTYPES)}, not {self.dtype!r}")
        if self.draft and self.runner != "decode":
            wrong.append(f"{self.runner} has no draft: only decode draws tokens")
        engine_only = [n for n in ("chunk", "prefix") if getattr(self, n)] + [n for n in ("tp", "pp") if self.size(n)]
        if not self.is_engine and engine_only:
            wrong.append(f"{self.runner} has no {', '.join(engine_only)}: that is of an engine (decode, prefill)")
        if self.runner == "transformers" and self.mates:
            wrong.append("transformers runs the sequence alone: no mates")
        if wrong:
            raise ValueError("; ".join(wrong))

    def size(self, name: str) -> int:
        """Return the number of ranks of `tp` or `pp`, 0 if it is one."""
        value = getattr(self, name)
        return value if value > 1 else 0

    @property
    def is_engine(self) -> bool:
        return self.runner in ("decode", "prefill")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def describe(self) -> str:
        """Return the way as it is written."""
        parts = [self.runner]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value == field.default:
                continue
            parts.append("no-invariant" if field.name == "invariant" else f"{field.name}={value}")
        if self.runner == "transformers" and self.attention == "eager":
            parts.append("attention=eager")
        return ",".join(parts)


def parse_way(text: str) -> Way:
    """Read a way. Raises ValueError naming every word that is none."""
    values: dict[str, Any] = {}
    wrong = []
    readers: dict[str, Callable[[str], object]] = {
        **dict.fromkeys(("chunk", "prefix", "draft", "mates", "tp", "pp", "k_blocks"), int),
        **dict.fromkeys(("dtype", "attention", "model"), str),
    }
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = word.partition("=")
        if not equals and (key in RUNNERS or key in _WORDS):
            values |= {"runner": key} if key in RUNNERS else _WORDS[key]
        elif equals and key in readers:
            try:
                values[key] = readers[key](value)
            except ValueError:
                wrong.append(f"{word!r} is no whole number")
        else:
            wrong.append(f"{word!r} is none of {', '.join((*RUNNERS, *_WORDS))}, NAME=VALUE ({', '.join(readers)})")
    if wrong or not values:
        raise ValueError(f"the way {text!r}: {'; '.join(wrong) or 'is empty'}")
    try:
        return Way(**values)
    except ValueError as error:
        raise ValueError(f"the way {text!r}: {error}") from error


def with_equal_blocks(first: Way, second: Way) -> tuple[Way, Way]:
    """Return the ways with numbers of K-blocks where they name none and ranks share layers: the larger `tp` of the two,
    so that the layout alone makes no difference where both are invariant."""
    blocks = max(first.tp, second.tp)
    if blocks == 1:
        return first, second
    return _with_blocks(first, blocks), _with_blocks(second, blocks)


def _with_blocks(way: Way, blocks: int) -> Way:
    return way if way.k_blocks else replace(way, k_blocks=blocks)
