"""Tests of how texts become token ids within bounds of memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.generation.tokenising import PIECE_CHARS, Tokenising, Turns
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.bpe_tokenizer import train_tokenizer
from lockstep.tests.support.callers import PATIENCE, soon, submit

ROOM = 1000


class Recorder:
    """A tokenizer with a token for every `chars_per_token` characters, and the lengths of what it was given."""

    def __init__(self, chars_per_token: int = 1) -> None:
        self.chars_per_token, self.lengths = chars_per_token, list[int]()

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        self.lengths.append(len(text))
        return {"input_ids": [1] * -(-len(text) // self.chars_per_token)}


def tokenising(tokenizer: Any, room: int = ROOM, limit: int = 4 << 20) -> Tokenising:
    model = SimpleNamespace(vocab_size=1000)
    engine: Any = SimpleNamespace(tokenizer=tokenizer, max_model_len=room, max_prompt_len=room, model=model)
    return Tokenising(engine, limit)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_text_with_too_many_tokens_is_refused_after_one_bounded_piece(is_chat):
    tokenizer, text, params = Recorder(), "a" * (20 * PIECE_CHARS), SamplingParams(max_new_tokens=1)
    texts = tokenising(tokenizer)
    with pytest.raises(BadField, match=r"more than 999 tokens\) exceeds the maximum allowed length \(999 tokens\)"):
        texts.conversation(text, "messages", params) if is_chat else texts.token_ids([text], "text", [params])
    assert tokenizer.lengths == [PIECE_CHARS]


def test_a_long_text_that_fits_is_tokenised_whole():
    tokenizer, text = Recorder(1 << 11), "a" * (3 * PIECE_CHARS + 1)
    [ids] = tokenising(tokenizer).token_ids([text], "text", [SamplingParams(max_new_tokens=1)])
    assert len(ids) == 385 and tokenizer.lengths == [PIECE_CHARS] * 3 + [1, len(text)]


def test_pieces_of_a_text_have_about_as_many_tokens_as_the_whole():
    tokenizer = train_tokenizer()
    text = '"name": "value of the items", città ключ 0.125, ' * 12_000
    num = len(tokenizer(text)["input_ids"])
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
    assert len(pieces) == 3 and abs(sum(len(tokenizer(piece)["input_ids"]) for piece in pieces) - num) < 10
    params = SamplingParams(max_new_tokens=0)
    [ids] = tokenising(tokenizer, room=num).token_ids([text], "text", [params])
    assert ids == tokenising(tokenizer, room=num).conversation(text, "messages", params) == tokenizer(text)["input_ids"]


def test_texts_wait_for_each_other_where_they_are_longer_than_the_limit_together():
    turns, begun, may_end = Turns(100), threading.Event(), threading.Event()
    order: list[str] = []

    def tokenise(name: str, num_chars: int) -> None:
        with turns.of(num_chars):
            order.append(name)
            begun.set()
            assert may_end.wait(PATIENCE)

    first = submit(tokenise, "first", 70)
    assert begun.wait(PATIENCE)
    with turns.of(30):
        pass  # fits beside it
    long = submit(tokenise, "long", 10**9)
    assert order == ["first"]
    may_end.set()
    soon(first), soon(long)
    assert order == ["first", "long"]
