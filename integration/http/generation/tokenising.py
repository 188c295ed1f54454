"""Texts to token ids, within bounds of memory: a tokenizer takes about 150 bytes for each character of a text."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ....rollout.control.intake import prompt_ids
from ....rollout.engine import Engine
from ....rollout.sampling_params import SamplingParams
from ..edge.errors import BadField

PIECE_CHARS = 1 << 18  # of a longer text, which is counted in pieces before it is tokenised whole


class Turns:
    """Let a bounded number of characters be tokenised at a time, by any threads, in the order in which they ask."""

    def __init__(self, limit: int) -> None:
        """Start without a text. limit: characters; a longer text is tokenised alone."""
        self._limit, self._num_chars = limit, 0
        self._changed = threading.Condition()
        self._first = threading.Lock()  # of the thread that waits; later threads wait for the lock

    @contextmanager
    def of(self, num_chars: int) -> Iterator[None]:
        """Wait for the turn of a text of this length, and count it until the block ends."""
        with self._first, self._changed:
            self._changed.wait_for(lambda: not self._num_chars or self._num_chars + num_chars <= self._limit)
            self._num_chars += num_chars
        try:
            yield
        finally:
            with self._changed:
                self._num_chars -= num_chars
                self._changed.notify()


class Tokenising:
    """Tokenise prompts, and refuse those that are longer than the context. Any thread may call."""

    def __init__(self, engine: Engine, max_chars_at_once: int) -> None:
        self._engine, self._turns = engine, Turns(max_chars_at_once)

    def token_ids(
        self, prompts: Sequence[str | list[int]], field: str, params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Tokenise prompts that are texts, and check that they fit into the model's context. Raises BadField."""
        return [self._ids(*one, field) for one in zip(prompts, params, strict=True)]

    def conversation(self, text: str, field: str, params: SamplingParams) -> list[int]:
        """Tokenise the text of a chat template, which has its special tokens already. Raises BadField."""
        room = self._room(params)
        with self._turns.of(len(text)):
            self._refuse_long(text, field, room)
            ids = self._tokens(text)
        return self._ids(ids, params, field)

    def draft(self, text: str, field: str) -> list[int]:
        """Tokenise an output that may come again. Raises BadField where it is longer than the context."""
        room = self._engine.max_model_len
        with self._turns.of(len(text)):
            self._refuse_long(text, field, room)
            ids = self._tokens(text)
        if len(ids) > room:
            raise _too_long(field, str(len(ids)), room)
        return ids

    def _room(self, params: SamplingParams) -> int:
        return self._engine.max_model_len - min(params.max_new_tokens, 1)

    def _ids(self, prompt: str | list[int], params: SamplingParams, field: str) -> list[int]:
        engine, room = self._engine, self._room(params)
        try:
            if isinstance(prompt, str):
                with self._turns.of(len(prompt)):
                    self._refuse_long(prompt, field, room)
                    ids = prompt_ids(prompt, engine.tokenizer, engine.model.vocab_size)
            else:
                ids = prompt_ids(prompt, engine.tokenizer, engine.model.vocab_size)
        except ValueError as error:
            raise BadField(field, str(error)) from None
        if len(ids) > room:
            raise _too_long(field, str(len(ids)), room)
        return ids

    def _refuse_long(self, text: str, field: str, room: int) -> None:
        """Refuse a long text as soon as the tokens of its pieces are many more than the context has room for.

        A text has about as many tokens as its pieces: a cut changes the few tokens around it. Twice the room allows for
        thousands of tokens at each cut, because no text is longer than `RequestLimits.max_chars`.
        """
        if self._engine.tokenizer is None or len(text) <= PIECE_CHARS:
            return
        num_tokens = 0
        for at in range(0, len(text), PIECE_CHARS):
            num_tokens += len(self._tokens(text[at : at + PIECE_CHARS]))
            if num_tokens > 2 * room:
                raise _too_long(field, f"more than {room}", room)

    def _tokens(self, text: str) -> list[int]:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None  # else texts have been refused
        return list(tokenizer(text, add_special_tokens=False, padding=False, truncation=False)["input_ids"])


def _too_long(field: str, num_tokens: str, room: int) -> BadField:
    return BadField(field, f"Input length ({num_tokens} tokens) exceeds the maximum allowed length ({room} tokens)")
