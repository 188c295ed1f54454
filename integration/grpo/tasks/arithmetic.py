"""Verifiable addition: problems, their train / held-out split, worked examples and a character tokenizer.

A prompt is "What is 347 + 285?\\n". A worked solution writes the column sums, the ones first, each with the carry from
the column before it, then the total: "12 13 06=632".
"""

import hashlib
import random
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from .problems import Problem

VOCAB_SIZE = 128  # every entry has a token, so that all tokens that a model can sample can be decoded
CONTEXT_TOKENS = 64  # twice the length of the longest prompt and completion


@contextmanager
def keyed(section: str) -> Iterator[None]:
    """Put the section of their settings before the faults of a specification, which its fields begin."""
    try:
        yield
    except ValueError as error:
        raise ValueError("; ".join(f"{section}.{fault}" for fault in str(error).split("; "))) from error


@dataclass(frozen=True)
class ArithmeticSpec:
    """The range of sums to ask. The split depends on the operands alone, so all seeds hold out the same sums."""

    seed: int = 0  # order of the training problems
    min_digits: int = 3  # least number of digits of each operand, at least 2
    max_digits: int = 3  # largest number of digits of each operand, at most 9
    num_heldout: int = 512
    heldout_one_in: int = 16  # one in this many canonical pairs is never used for training

    def __post_init__(self) -> None:
        faults = []
        if not 2 <= self.min_digits <= self.max_digits <= 9:
            given = f"{self.min_digits} and {self.max_digits}"
            faults.append(f"min_digits and max_digits must be from 2 to 9, in this order, not {given}")
        if self.num_heldout < 1:
            faults.append(f"num_heldout must be at least 1, not {self.num_heldout}")
        if self.heldout_one_in < 2:
            faults.append(f"heldout_one_in must be at least 2, not {self.heldout_one_in}")
        if not faults:
            num_operands = 10**self.max_digits - 10 ** (self.min_digits - 1)
            num_expected = num_operands * (num_operands + 1) // 2 // self.heldout_one_in
            # Drawing without repetition slows down as the pool empties.
            if self.num_heldout * 2 > num_expected:
                faults.append(f"num_heldout={self.num_heldout} is over half of about {num_expected} held-out pairs")
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class ArithmeticData:
    """The addition problems of one `ArithmeticSpec`."""

    spec: ArithmeticSpec
    heldout: tuple[Problem, ...]  # distinct canonical pairs, none of which training draws

    def train_problems(self, step: int, num_problems: int, attempt: int = 0) -> list[Problem]:
        """Draw the problems of one step, all different: a pure function of (spec, step, num_problems, attempt).

        attempt: above 0, others to take their places, which no attempt before has drawn.
        """
        first, end = attempt * num_problems, (attempt + 1) * num_problems
        pairs = _draw_pairs(self.spec, f"train/{self.spec.seed}/{step}", end, wants_heldout=False)
        return [_problem(a, b) for a, b in pairs[first:]]


def arithmetic_problems(spec: ArithmeticSpec) -> ArithmeticData:
    """Build the data set. Only held-out problems are stored; training problems are drawn on request."""
    pairs = _draw_pairs(spec, "heldout", spec.num_heldout, wants_heldout=True)
    return ArithmeticData(spec=spec, heldout=tuple(_problem(a, b) for a, b in pairs))


def is_heldout(a: int, b: int, one_in: int) -> bool:
    """Return whether a + b is held out. The answer for b + a is the same."""
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low}+{high}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def worked_solution(problem: Problem, slip_rate: float = 0.0, rng: random.Random | None = None) -> str:
    """Write the solution of a pupil that forgets each carry with probability `slip_rate`, drawn from `rng`.

    347 + 285 gives "12 13 06=632", or with the first carry forgotten "12 12 06=622". The number after "=" is always the
    sum of the columns as they were written. Raises ValueError for a `slip_rate` without `rng`.
    """
    if slip_rate and rng is None:
        raise ValueError(f"slip_rate={slip_rate} needs a random number generator")
    a, b = operands(problem)
    num_columns = max(len(str(a)), len(str(b)))
    carry, total, columns = 0, 0, []
    for place in range(num_columns):
        if carry and slip_rate and rng is not None and rng.random() < slip_rate:
            carry = 0
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        columns.append(f"{column:02d}")
        carry = column // 10
        total += (column % 10 if place < num_columns - 1 else column) * 10**place
    return f"{' '.join(columns)}={total}"


def operands(problem: Problem) -> tuple[int, int]:
    """Read the two numbers of an arithmetic prompt."""
    first, second = problem.prompt.removeprefix("What is ").removesuffix("?\n").split(" + ")
    return int(first), int(second)


def _problem(a: int, b: int) -> Problem:
    return Problem(prompt=f"What is {a} + {b}?\n", answer=str(a + b))


def _draw_pairs(spec: ArithmeticSpec, stream: str, num_pairs: int, wants_heldout: bool) -> list[tuple[int, int]]:
    # A string seed is hashed with SHA-512, the same on every platform and in every process.
    rng = random.Random(f"arithmetic/{stream}")
    drawn: dict[tuple[int, int], tuple[int, int]] = {}
    while len(drawn) < num_pairs:
        a, b = (_draw_operand(rng, spec) for _ in range(2))
        canonical = (min(a, b), max(a, b))
        if canonical not in drawn and is_heldout(a, b, spec.heldout_one_in) == wants_heldout:
            drawn[canonical] = (a, b)
    return list(drawn.values())


def _draw_operand(rng: random.Random, spec: ArithmeticSpec) -> int:
    num_digits = rng.randint(spec.min_digits, spec.max_digits)
    return rng.randrange(10 ** (num_digits - 1), 10**num_digits)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of single ASCII characters (so every digit is one token) that puts <bos> before each text.

    It has exactly VOCAB_SIZE tokens: <pad>, <bos>, <eos>, <unk>, the printable characters and newline, and reserved
    ones. Decoding a text's tokens without the special ones gives the same text.
    """
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    reserved = [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(special) - len(characters))]
    vocab = {token: index for index, token in enumerate([*special, *characters, *reserved])}
    # A byte-pair model without merges is a character model.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
