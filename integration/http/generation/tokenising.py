"""Texts to token ids, within bounds of memory: a tokenizer takes about 150 bytes for each character of a text."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from ....rollout.control.desk.intake import prompt_ids
from ....rollout.engine import Engine
from ....rollout.giving_way import give_way, others_compute
from ....rollout.sampling_params import SamplingParams
from ..conversations.next_turn import NextTurn
from ..edge.errors import BadField, TooLong

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
        with others_compute(), self._first, self._changed:
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
        self,
        prompts: Sequence[str | list[int]],
        field: str,
        params: Sequence[SamplingParams],
        num_kept: int | None = None,
        turn: NextTurn | None = None,
    ) -> list[list[int]]:
        """Tokenise prompts that are texts, and check that they fit into the model's context. num_kept: how many last
        tokens of each are kept. turn: the prompt goes on from its history; a text gets no special tokens then. Raises
        BadField."""
        if turn is None:
            return [self._ids(*one, field, num_kept) for one in zip(prompts, params, strict=True)]
        [prompt], [its_params] = prompts, params
        if isinstance(prompt, str) and turn.num_tokens_before and self._engine.tokenizer is not None:
            added = self.conversation(prompt, field, its_params)
        else:
            added = self._ids(prompt, its_params, field)
        return [self._ids(turn.joined(added), its_params, field)]

    def conversation(self, text: str, field: str, params: SamplingParams, num_kept: int | None = None) -> list[int]:
        """Tokenise the text of a chat template, which has its special tokens already, as `token_ids` otherwise."""
        with self._turns.of(len(text)):
            if num_kept is None:
                self._refuse_long(text, field, self.room(params))
            ids = self._tokens(text)
        return self._ids(ids, params, field, num_kept)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are not of a text: ends of turns and their kin. Empty without a tokenizer."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return frozenset()
        added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(tokenizer.all_special_ids))

    def whole(self, text: str, *, adds_special: bool) -> list[int]:
        """Tokenise a text of any length. adds_special: with the special tokens of a prompt."""
        with self._turns.of(len(text)):
            return self._tokens(text, adds_special=adds_special)

    def count_of_output(self, text: str) -> int:
        """Count the tokens of a text that an answer has. It is no longer than an output, and waits for no other text:
        answers are made on the event loop, and in one thread for all long ones."""
        return len(self._tokens(text)) if text else 0

    def draft(self, text: str, field: str) -> list[int]:
        """Tokenise an output that may come again. Raises BadField where it is longer than the context."""
        room = self._engine.max_prompt_len
        with self._turns.of(len(text)):
            self._refuse_long(text, field, room)
            ids = self._tokens(text)
        if len(ids) > room:
            raise self._too_long(field, str(len(ids)), room)
        return ids

    def fits(self, num_tokens: int, field: str, params: SamplingParams) -> None:
        """Check that a prompt of so many tokens has room in the context. Raises BadField."""
        if num_tokens > (room := self.room(params)):
            raise self._too_long(field, str(num_tokens), room)

    def refuse_long(self, text: str, field: str, params: SamplingParams) -> None:
        """Refuse a text that is far longer than the context, before it is tokenised elsewhere. Raises BadField."""
        with self._turns.of(len(text)):
            self._refuse_long(text, field, self.room(params))

    def room(self, params: SamplingParams) -> int:
        """Return the most tokens that a prompt may have. The last token of a sequence needs no KV."""
        return min(self._engine.max_model_len - min(params.max_new_tokens, 1), self._engine.max_prompt_len)

    def _too_long(self, field: str, num_tokens: str, room: int) -> TooLong:
        """Make the error of a prompt of so many tokens, in words."""
        context, why = self._engine.max_prompt_len, ""
        if context < self._engine.max_model_len:
            why = f"Input length ({num_tokens} tokens) exceeds the maximum allowed length ({room} tokens, as the KV "\
                  "pool has room for no more)"  # fmt: skip
        return TooLong(field, num_tokens, room, context, why=why)

    def _ids(
        self, prompt: str | list[int], params: SamplingParams, field: str, num_kept: int | None = None
    ) -> list[int]:
        give_way()
        engine, room = self._engine, self.room(params)
        try:
            if isinstance(prompt, str):
                with self._turns.of(len(prompt)):
                    if num_kept is None:
                        self._refuse_long(prompt, field, room)
                    ids = prompt_ids(prompt, engine.tokenizer, engine.model.vocab_size)
            else:
                ids = prompt_ids(prompt, engine.tokenizer, engine.model.vocab_size)
        except ValueError as error:
            raise BadField(field, str(error)) from None
        if num_kept is not None:
            ids = ids[-num_kept:]
        self.fits(len(ids), field, params)
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
                raise self._too_long(field, f"more than {room}", room)

    def _tokens(self, text: str, *, adds_special: bool = False) -> list[int]:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None  # else texts have been refused
        with others_compute():
            encoding = tokenizer(text, add_special_tokens=adds_special, padding=False, truncation=False)
        return list(encoding["input_ids"])
