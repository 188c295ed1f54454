"""A chat over a session: its fields, and the prompt of its next turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....rollout.sampling_params import SamplingParams
from ...chat_tail import Template
from ..conversations.next_turn import NextTurn
from ..conversations.params import SessionParams, read_session_params, refuse_samples
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from .fields import ChatBody

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
    if body.continue_final_message:
        raise BadField("continue_final_message", "is not supported in a session: go on with token ids")
    return session


def session_prompt(
    turn: NextTurn,
    messages: list[dict[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
    limits: RequestLimits,
    params: SamplingParams,
) -> list[int]:
    """Return the prompt of a session's next turn. Slow for long conversations. Raises BadField."""

    def tokenise(text: str) -> list[int]:
        limits.characters(len(text), "messages")
        return limits.tokenising.whole(text, adds_special=False)

    prompt = turn.chat_prompt(messages, Template(render, tokenise, limits.tokenising.special_ids))
    [checked] = limits.tokenising.token_ids([prompt], "messages", [params])
    return checked
