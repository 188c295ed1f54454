"""A small language of stock phrases, and a model that is trained on it here: answers with an end and a long tail.

An answer is a chain of phrases. A phrase is a fixed run of words with one free word in it, and has a few possible
successors, so a sampled answer is predictable inside a phrase and open between two, as text is. The number of phrases
is lognormal. Real models are more open in some places and less in others: the benchmark prints the entropy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from .presets import PRESETS, cast_parameters

END = 0
_VOCAB_SIZE, _NUM_TOPICS, _FIRST_WORD = 512, 16, 32
_NUM_PHRASES, _LENGTHS = 40, (8, 16)
_SUCCESSORS = (0.6, 0.2, 0.1, 0.1)  # chances of a phrase's successors
_NUM_FREE = 64  # words that may stand in a phrase's free place
PROMPT_TOKENS = 16
_MEDIAN_PHRASES, _SIGMA, _MIN_PHRASES, _MAX_PHRASES = 7, 0.9, 3, 40
MIN_ANSWER_TOKENS = _LENGTHS[0]  # a phrase: the model would end one answer in fifty before
MAX_ANSWER_TOKENS = _MAX_PHRASES * _LENGTHS[1]
TRAINED = PRESETS["small"] | {  # the shape that is trained: layers of a sixth of the width, a quarter of the heads
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "vocab_size": _VOCAB_SIZE,
}  # fmt: skip
PADDED = PRESETS["small"] | {"vocab_size": _VOCAB_SIZE}
_EPSILON = 1e-6  # of the trained model's norms
_BATCH, _CONTEXT, _STEPS, _LEARNING_RATE = 12, 160, 260, 4e-3


@dataclass(frozen=True)
class _Phrase:
    words: tuple[int, ...]
    free_place: int
    free_words: tuple[int, ...]
    successors: tuple[int, ...]


class PhraseLanguage:
    """The language; the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        words = range(_FIRST_WORD, _VOCAB_SIZE)
        self._phrases = [self._phrase(draw, words) for _ in range(_NUM_PHRASES)]

    @staticmethod
    def _phrase(draw: random.Random, words: range) -> _Phrase:
        length = draw.randint(*_LENGTHS)
        return _Phrase(
            tuple(draw.sample(words, length)), draw.randrange(1, 3), tuple(draw.sample(words, _NUM_FREE)),
            tuple(draw.sample(range(_NUM_PHRASES), len(_SUCCESSORS))),
        )  # fmt: skip

    def prompt(self, topic: int) -> list[int]:
        """Return the prompt of a topic, which decides the first phrase."""
        return [2 + topic % _NUM_TOPICS] * PROMPT_TOKENS

    def answer(self, topic: int, draw: random.Random) -> list[int]:
        """Draw an answer to the prompt of a topic, its end included."""
        number, tokens = topic % _NUM_PHRASES, list[int]()
        for _ in range(min(max(round(draw.lognormvariate(0, _SIGMA) * _MEDIAN_PHRASES), _MIN_PHRASES), _MAX_PHRASES)):
            phrase = self._phrases[number]
            words = list(phrase.words)
            words[phrase.free_place] = draw.choice(phrase.free_words)
            tokens += words
            number = draw.choices(phrase.successors, _SUCCESSORS)[0]
        return [*tokens, END]


def train_phrase_model(
    language: PhraseLanguage, dtype: torch.dtype, shape: Mapping[str, int] = PADDED
) -> PreTrainedModel:
    """Train a model of 3 layers of width 128 on answers of the language, and return it as one of a larger shape. Takes
    half a minute on two cores.

    shape: sizes by their names in Qwen3's configuration, none below the trained one's; three query heads of 64 to each
    KV head. By default those of the preset `small`, with the language's vocabulary: 83 M parameters.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(_config(TRAINED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, _STEPS, pct_start=0.1)
    draw = random.Random(1)
    for _ in range(_STEPS):
        rows, labels = _rows(language, draw)
        loss = model(input_ids=rows, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    padded = _padded(model, shape).eval()
    cast_parameters(padded, dtype)
    return padded


def _config(shape: Mapping[str, Any]) -> Qwen3Config:
    return Qwen3Config(
        **shape, tie_word_embeddings=True, eos_token_id=END,
        rms_norm_eps=_EPSILON * TRAINED["hidden_size"] / shape["hidden_size"],
        max_position_embeddings=PROMPT_TOKENS + MAX_ANSWER_TOKENS + 16,
    )  # fmt: skip


def _padded(model: PreTrainedModel, shape: Mapping[str, int]) -> PreTrainedModel:
    """Return the same function as a model of more parameters: with layers and heads that add nothing, and hidden states
    and MLPs whose further columns are zero. A step then takes the time of a model of that shape, and not that of the
    program around it."""
    padded, small = Qwen3ForCausalLM(_config(shape)), model.state_dict()
    # The mean of squares of a wider hidden state is smaller by this ratio.
    narrowing = (TRAINED["hidden_size"] / shape["hidden_size"]) ** 0.5
    with torch.no_grad():
        for name, parameter in padded.named_parameters():
            known = small.get(name)
            if known is None:
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
                continue
            if parameter.dim() == 1 and parameter.shape != known.shape:
                known = known * narrowing
            parameter.zero_()
            parameter[tuple(slice(size) for size in known.shape)] = known
    return padded


def _rows(language: PhraseLanguage, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch: token ids and labels, int64 [B, T]. A long answer stands in a row from a random place on, so that
    the model sees each part of it as often."""
    rows, labels = torch.zeros(_BATCH, _CONTEXT, dtype=torch.int64), torch.full((_BATCH, _CONTEXT), -100)
    for row in range(_BATCH):
        topic = draw.randrange(_NUM_TOPICS)
        prompt, answer = language.prompt(topic), language.answer(topic, draw)
        tokens = torch.tensor([*prompt, *answer])[:_CONTEXT]
        rows[row, : len(tokens)] = tokens
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return rows, labels
