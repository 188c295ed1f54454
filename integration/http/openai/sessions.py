"""A chat over a session: its fields, and the prompt of its next turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....rollout.sampling_params import SamplingParams
from ...chat_tail import Template
from ..conversations.joined import with_pictures
from ..conversations.next_turn import NextTurn
from ..conversations.params import SessionParams, read_session_params, refuse_samples
from ..conversations.pictures import without_digests
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from ..images.pictures import SentPicture
from .fields import ChatBody, CompletionBody

_MESSAGES = "messages"
_SAME = "prompt_token_ids"  # another name of input_ids


def with_one_name(values: dict[str, object]) -> dict[str, object]:
    """Return the fields with `input_ids` where they have `prompt_token_ids`. Raises BadField where they have both."""
    if values.get(_SAME) is None:
        return values
    if values.get("input_ids") is not None:
        raise BadField(_SAME, "exactly one of messages, input_ids and prompt_token_ids is needed")
    return {name: value for name, value in values.items() if name != _SAME} | {"input_ids": values[_SAME]}


def read_chat_session(body: ChatBody, num_kept: int | None) -> SessionParams | None:
    """Return the session's fields of a chat. num_kept: last tokens of its prompt that it asks for. Raises BadField."""
    if (session := read_session_params(body.session_params)) is None:
        return None
    refuse_samples(1, body.n)
    if num_kept is not None:
        raise BadField("truncate_prompt_tokens", "is not supported in a session, whose tokens stand")
    return session


def read_completion_session(body: CompletionBody, num_prompts: int, num_kept: int | None) -> SessionParams | None:
    """Return the session's fields of a completion. num_kept: see `read_chat_session`. Raises BadField."""
    if (session := read_session_params(body.session_params)) is None:
        return None
    refuse_samples(num_prompts, body.n)
    if num_kept is not None:
        raise BadField("truncate_prompt_tokens", "is not supported in a session, whose tokens stand")
    if body.echo:
        raise BadField("echo", "is not supported in a session, whose prompt has its history too")
    return session


def session_prompt(
    turn: NextTurn,
    messages: list[dict[str, Any]],
    pictures: Sequence[SentPicture],
    render: Callable[[list[dict[str, Any]]], str],
    close: Callable[[list[dict[str, Any]]], str],
    limits: RequestLimits,
    params: SamplingParams,
    shape: bytes,
    *,
    continues: bool,
) -> list[int]:
    """Return the prompt of a session's next turn. pictures: of the messages. render, close: see `Template`. shape: see
    `shape_of`. continues: the last message goes on. Slow for long conversations and for images. Raises BadField."""

    def template(turn: NextTurn) -> Template:
        def tokenise(text: str) -> list[int]:
            limits.characters(len(text), _MESSAGES)
            return _tokens_of(text, turn, limits)

        return Template(
            lambda told: render(without_digests(told)), tokenise, limits.tokenising.special_ids,
            close=lambda told: close(without_digests(told)),
        )  # fmt: skip

    prompt = turn.chat_prompt(messages, pictures, template, shape, continues=continues)
    [checked] = limits.tokenising.token_ids([prompt], _MESSAGES, [params])
    return with_pictures(checked, turn.pictures, limits.images, _MESSAGES)


def _tokens_of(text: str, turn: NextTurn, limits: RequestLimits) -> list[int]:
    """Return the tokens of what the template wrote of the whole conversation, or of the new messages alone."""
    if not turn.pictures:
        return limits.tokenising.whole(text, adds_special=False)
    placeholder = limits.images.processor(_MESSAGES).placeholder
    num = text.count(placeholder)
    if num == 0:
        return limits.tokenising.whole(text, adds_special=False)
    its = next((own for own in (turn.pictures, turn.new_pictures) if len(own) == num), None)
    if its is None:
        raise BadField(
            _MESSAGES, f"the chat template writes {num} placeholders of images ({placeholder}) for "
            f"{len(turn.new_pictures)} new images: it may have none in messages of some roles"
        )  # fmt: skip
    return limits.images.of_text(text, its, _MESSAGES, adds_special=False)
