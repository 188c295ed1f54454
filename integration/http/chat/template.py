"""Conversations as the texts that a model reads: the chat template of its tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from ....rollout.engine import Engine
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from .content import ROLES, read_message, with_texts_as_arguments
from .form import chat_template_text


class TemplateFields(Protocol):
    """The fields of a request that choose how its conversation becomes a text."""

    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool


def read_messages(given: list[dict[str, Any]], limits: RequestLimits) -> list[dict[str, Any]]:
    """Return messages with one text each. Raises BadField, also where they are too long together, and for a role that
    is neither a common one nor in the chat template."""
    messages = [read_message(message, f"messages.{index}") for index, message in enumerate(given)]
    _refuse_unknown_roles(messages, limits)
    texts = [message.get(name) for message in messages for name in ("content", "reasoning_content")]
    calls = [call for message in given for call in message.get("tool_calls") or ()]
    texts += [call["function"].get("arguments") for call in calls]
    limits.characters(sum(len(text) for text in texts if isinstance(text, str)), "messages")
    return messages


def _refuse_unknown_roles(messages: Sequence[dict[str, Any]], limits: RequestLimits) -> None:
    template = chat_template_text(limits.tokenizer)
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            known = ", ".join(sorted(ROLES))
            what = f"{role[:100]!r} is neither one of {known} nor a role that the chat template names"
            raise BadField(f"messages.{index}.role", what)


def apply_template(
    engine: Engine,
    messages: list[dict[str, Any]],
    asked: TemplateFields,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """Convert a conversation to text by the tokenizer's chat template. tools: those that it shows to the model. Raises
    BadField."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise BadField("messages", "this model has no chat template: send input_ids")
    extra = dict(asked.chat_template_kwargs or {})
    if reserved := sorted(set(extra) & set(inspect.signature(tokenizer.apply_chat_template).parameters)):
        raise BadField("chat_template_kwargs", f"must not set {', '.join(reserved)}")
    if asked.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", asked.reasoning_effort)
    asks_for_answer = asked.add_generation_prompt
    if asks_for_answer is None:
        asks_for_answer = not asked.continue_final_message
    extra |= {"tools": list(tools) or None, "add_generation_prompt": asks_for_answer, "tokenize": False}
    extra["continue_final_message"] = asked.continue_final_message

    shown = str(tokenizer.chat_template)
    if "reasoning_content" not in shown and ".thinking" in shown:  # another name of it, as in gpt-oss's template
        messages = [
            {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
            for message in messages
        ]

    def text(messages: list[dict[str, Any]]) -> str:
        found: Any = tokenizer.apply_chat_template(messages, **extra)
        return str(found)

    try:
        try:
            return text(messages)
        except TypeError:  # some templates join the arguments of calls to texts, and others write them as JSON
            if not any("tool_calls" in message for message in messages):
                raise
            return text(with_texts_as_arguments(messages))
    # A template may fail in any of these ways on a message that its author did not expect.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise BadField("messages", f"the chat template refuses them: {error}") from None
