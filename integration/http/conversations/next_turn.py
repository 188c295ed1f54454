"""A request on a session, from its arrival to its end. Its prompt begins with the tokens of an earlier turn."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ....rollout.completion import Completion
from ....rollout.media.images import Images
from ....rollout.sampling_params import SamplingParams
from ...chat_tail import Template
from ..edge.errors import BadField
from ..edge.session_paths import FIELD
from ..images.pictures import SentPicture
from .history import ChatPrompt, chat_prompt, check_cut, divide
from .messages import chained, encoded
from .params import SessionParams
from .pictures import num_pictures, with_digests
from .sampling import prompt_digest
from .session import Session
from .turns import MESSAGE_BYTES, TOKEN_BYTES, TURN_BYTES, Turn, answer_start, longest_beginning, pictures_of, tokens_of


class Store(Protocol):
    """The sessions, for a request on one of them."""

    def reserve(self, next_turn: NextTurn, num_bytes: int) -> None:
        """Count the bytes that a request will add, without its output. Raises Overloaded where there is no room."""

    def keep(self, next_turn: NextTurn, turn: Turn) -> bool:
        """Add the turn that a request became to its session. Returns whether it has a place there."""

    def finish(self, next_turn: NextTurn) -> None:
        """Count the request no longer. Idempotent."""

    def number(self, next_turn: NextTurn, digest: int) -> int:
        """Return which of its session's requests with this prompt it is, see `Numbers`."""


class NextTurn:
    """An open request on a session. The event loop makes and ends it; one thread at a time makes its prompt, and its
    answer."""

    def __init__(
        self,
        session: Session,
        params: SessionParams,
        rid: str,
        base: Turn | None,
        store: Store,
    ) -> None:
        """Begin. base: the turn to go on from."""
        self.session, self.params, self.rid = session, params, rid
        self.is_open = True  # counted as open by the session, until its answer is there
        self.has_ended = False  # also without its answer
        self.kept: Turn | None = None  # the turn that it became
        self.num_begun = 0  # last tokens of the prompt that are of the answer, which goes on
        self.num_reserved = 0  # bytes, see `Store.reserve`
        self.numbered: tuple[int, int] | None = None  # its prompt's digest, and its number, see `Store.number`
        self._base, self._store = base, store
        self._num_history = 0  # tokens of the history that the prompt begins with
        self._messages: tuple[bytes, ...] | None = None  # that the request adds
        self._digest = b""  # of the conversation with them
        self._differs_at: int | None = None
        self._is_chat = False
        self._pictures: tuple[SentPicture, ...] = ()  # that the request adds

    @property
    def num_tokens_before(self) -> int:
        """The number of tokens of the conversation that it goes on from, where the request has not all of it."""
        return 0 if self._base is None or self.params.messages == "all" else self._base.num_tokens

    @property
    def pictures(self) -> list[SentPicture]:
        """The pictures of its prompt, in the order of their tokens, once the prompt is made."""
        return [*pictures_of(self._base), *self._pictures]

    @property
    def has_pictures(self) -> bool:
        """Whether some turn of its session has pictures, from which it may go on."""
        return any(turn.pictures for turn in list(self.session.turns.values()))

    @property
    def new_pictures(self) -> list[SentPicture]:
        """The pictures that the request adds."""
        return list(self._pictures)

    def joined(self, new_ids: Sequence[int], pictures: Sequence[SentPicture] = ()) -> list[int]:
        """Return a prompt of the history and these tokens, or of these where they are the whole. pictures: of these.
        Raises BadField for an offset beyond the history, for one that may cut its images, and for a whole that begins
        otherwise than the history."""
        if self.params.messages == "all":
            self._base = self._base_of_whole(new_ids, pictures)
            new_ids = new_ids[self._base.num_tokens :] if self._base is not None else new_ids
        history = self._history()
        self._pictures = tuple(pictures)
        self._store.reserve(self, TURN_BYTES + TOKEN_BYTES * len(new_ids) + _bytes_of(pictures))
        self._num_history = len(history)
        return [*history, *new_ids]

    def chat_prompt(
        self, given: list[dict[str, Any]], pictures: Sequence[SentPicture], template: Callable[[NextTurn], Template],
        shape: bytes = b"", *, continues: bool = False,
    ) -> list[int]:  # fmt: skip
        """Return the prompt of the conversation that goes on with these messages. pictures: of all of these. template:
        makes the template of this turn, once its pictures are known. shape: see `shape_of`; a branch goes on from turns
        of the same shape only. continues: the last message, an answer that was cut, goes on. Raises BadField for
        messages that do not go on, and where the template refuses them."""
        given = with_digests(given, pictures)
        for name in ("offset", "drop_previous_output"):
            if getattr(self.params, name):
                raise BadField(f"{FIELD}.{name}", "is for prompts of token ids or a text; a chat has messages, and rid")
        pictures = [*pictures_of(self._base), *pictures]  # the last are those of the new messages
        self._base, new = divide(self._base, given, self.params, self.session.with_messages, shape, continues=continues)
        if continues:
            check_cut(self._base, new)
        num_new = num_pictures(new)
        self._pictures = tuple(pictures[len(pictures) - num_new :])
        prompt: ChatPrompt = chat_prompt(
            self._base, new, self.session.options.history, template(self), continues=continues
        )
        self._num_history, self._differs_at, self._is_chat = prompt.num_history, prompt.differs_at, True
        if continues and self._base is not None and prompt.num_history == self._base.num_tokens:
            self.num_begun = len(prompt.token_ids) - answer_start(self._base)
        self._messages = tuple(map(encoded, new))
        num_tokens = len(prompt.token_ids) - prompt.num_history
        num_chars = sum(map(len, self._messages)) + _bytes_of(self._pictures)
        self._store.reserve(self, TURN_BYTES + TOKEN_BYTES * num_tokens + MESSAGE_BYTES * len(new) + num_chars)
        start = shape if self._base is None else self._base.digest
        self._digest = (start, *chained(start, new))[-1]
        return prompt.token_ids

    def sampling(self, prompt: Sequence[int], asked: SamplingParams) -> SamplingParams:
        """Return the settings of the request with those of its session. Raises BadField where the two do not go
        together."""
        own = self.session.options.sampling
        if not own.values:
            return asked
        digest = number = 0
        if own.seed is not None:
            digest = prompt_digest(prompt)
            number = self._store.number(self, digest)
        try:
            return own.params(asked, digest, number)
        except ValueError as error:
            raise BadField(FIELD, f"the session's settings do not go with the request's: {error}") from None

    def keep(
        self, completion: Completion, message: Mapping[str, Any] | None = None, extra_key: str = ""
    ) -> dict[str, object]:
        """Add the answered request to the session; returns the `session` of its answer. message: the answer of a
        chat."""
        tokens = (*completion.prompt_ids, *completion.token_ids)
        messages, digest = self._messages, b""
        if messages is not None:
            assert message is not None, "the answer of a chat is a message"
            [digest] = chained(self._digest, [message])
            messages += (encoded(message),)
        reason, drawn = completion.finish_reason, completion.drawn_with
        turn = Turn(
            self.rid, self._base, self._num_history, array("i", tokens[self._num_history :]),
            len(completion.prompt_ids), reason.matched if reason is not None else None,
            completion.weight_versions, extra_key, messages, digest, self._pictures, _outline_of(completion),
            array("f", completion.logprobs), None if reason is None else reason.type,
            None if drawn is None else drawn.params.temperature,
            None if completion.forced is None else bytes(completion.forced),
        )  # fmt: skip
        is_kept = self._store.keep(self, turn)
        self.kept = turn if is_kept else None
        if is_kept and (on_answer := self.session.options.on_answer) is not None:
            on_answer(self.rid, completion)
        found: dict[str, object] = {
            "id": self.session.id,
            "rid": self.rid if is_kept else None,
            "parent_rid": None if self._base is None else self._base.rid,
            "num_history_tokens": self._num_history,
        }
        if self._is_chat:
            found["template_differs_at"] = self._differs_at
        return found if is_kept else {**found, "why_not_kept": self._why_not_kept()}

    def end(self) -> None:
        """End the request, answered or not. Call it once."""
        self.has_ended = True
        self._store.finish(self)

    def _history(self) -> list[int]:
        """Return the tokens that a prompt of token ids begins with."""
        base, offset = self._base, self.params.offset
        if base is None:
            if offset:
                raise BadField(f"{FIELD}.offset", "there is no turn before this one")
            return []
        if offset and pictures_of(base):
            raise BadField(f"{FIELD}.offset", "is not supported where the history has images, whose tokens stand")
        tokens = tokens_of(base, base.num_prompt if self.params.drop_previous_output else None)
        if abs(offset) > len(tokens):
            raise BadField(f"{FIELD}.offset", f"{offset} is beyond the history, which has {len(tokens)} tokens")
        return tokens[:offset] if offset else tokens

    def _base_of_whole(self, token_ids: Sequence[int], pictures: Sequence[SentPicture]) -> Turn | None:
        """Return the turn that a prompt goes on from which has the history's tokens too. Raises BadField."""
        for name in ("offset", "drop_previous_output"):
            if getattr(self.params, name):
                raise BadField(f"{FIELD}.{name}", "is for prompts behind a history, and this one is the whole")
        if pictures or self.has_pictures:
            raise BadField(
                f"{FIELD}.messages", '"all" is for prompts without images where they are token ids or a text'
            )
        if self.params.branch:
            return longest_beginning(list(self.session.turns.values()), token_ids)
        if self._base is not None and longest_beginning(self._base.path, token_ids) is not self._base:
            raise BadField(
                f"{FIELD}.messages", f"the prompt is the whole, and does not begin with the {self._base.num_tokens} "
                f"tokens of the turn {self._base.rid!r}: with {FIELD}.branch it goes on from an earlier one"
            )  # fmt: skip
        return self._base

    def _why_not_kept(self) -> str:
        if self.has_ended:
            return "the request has ended without its answer"
        if self.session.has_ended:
            return "the session has ended meanwhile"
        return f"the turn {self._base.rid if self._base else ''!r} was replaced meanwhile"


def _bytes_of(pictures: Sequence[SentPicture]) -> int:
    return sum(picture.num_bytes for picture in pictures)


def _outline_of(completion: Completion) -> Images | None:
    drawn = completion.drawn_with
    return None if drawn is None or drawn.images is None else drawn.images.outline
