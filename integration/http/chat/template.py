"""Conversations as the texts that a model reads: the chat template of its tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from ....rollout.engine import Engine
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from .content import ROLES, Images, read_message, texts_of, with_texts_as_arguments
from .form import chat_template_text

# A template may fail in any of these ways on a message that its author did not expect.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
_MARK = "as a text"


class TemplateFields(Protocol):
    """The fields of a request that choose how its conversation becomes a text."""

    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool


def read_messages(
    given: list[dict[str, Any]], limits: RequestLimits, images: Images | None = None
) -> list[dict[str, Any]]:
    """Return messages with one text each, or with parts where they have images. images: takes those; None: there may be
    none. Raises BadField, also where they are too long together, and for a role that is neither a common one nor in the
    chat template."""
    messages = [read_message(message, f"messages.{index}", images) for index, message in enumerate(given)]
    _refuse_unknown_roles(messages, limits)
    texts: list[object] = [text for message in messages for text in texts_of(message)]
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


def settings_of(asked: TemplateFields) -> dict[str, Any]:
    """Return the variables of the template that a request sets, besides its messages and tools."""
    effort = {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
    return effort | (asked.chat_template_kwargs or {})


def apply_template(
    engine: Engine,
    messages: list[dict[str, Any]],
    asked: TemplateFields,
    tools: Sequence[dict[str, Any]] = (),
    template: str | None = None,
) -> str:
    """Convert a conversation to text by the tokenizer's chat template, or by another one. tools: those that it shows to
    the model. Raises BadField."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not (template or tokenizer.chat_template):
        raise BadField("messages", "this model has no chat template: send input_ids")
    if any(message["role"] == "developer" for message in messages) and not takes_developer(engine):
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    extra = settings_of(asked)
    if reserved := sorted(set(extra) & set(inspect.signature(tokenizer.apply_chat_template).parameters)):
        raise BadField("chat_template_kwargs", f"must not set {', '.join(reserved)}")
    asks_for_answer = asked.add_generation_prompt
    if asks_for_answer is None:
        asks_for_answer = not asked.continue_final_message
    extra |= {"tools": list(tools) or None, "add_generation_prompt": asks_for_answer, "tokenize": False}
    extra["continue_final_message"] = asked.continue_final_message
    if template is not None:
        extra["chat_template"] = template

    shown = str(template or tokenizer.chat_template)
    if "reasoning_content" not in shown and ".thinking" in shown:  # another name of it, as in gpt-oss's template
        messages = [
            {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
            for message in messages
        ]

    def text(messages: list[dict[str, Any]]) -> str:
        found: Any = tokenizer.apply_chat_template(messages, **extra)
        # Half of a surrogate pair in the arguments of a call stays the escape that it was, since no text has it.
        return str(found).encode("utf-8", "backslashreplace").decode()

    if engine.model.images is not None and _wants_parts(text):
        messages = [_in_parts(message) for message in messages]
    try:
        try:
            return text(messages)
        except TypeError:  # some templates join the arguments of calls to texts, and others write them as JSON
            if not any("tool_calls" in message for message in messages):
                raise
            return text(with_texts_as_arguments(messages))
    except _FAILURES as error:
        raise BadField("messages", f"the chat template refuses them: {error}") from None


def takes_system_within(engine: Engine) -> bool:
    """Return whether the chat template writes a system's message that is not the first one."""
    ask = {"role": "user", "content": "ask"}
    return _takes(engine, [ask, {"role": "system", "content": _MARK}, {"role": "assistant", "content": "answer"}, ask])


def takes_developer(engine: Engine) -> bool:
    """Return whether the chat template writes the message of a developer: some leave it out, and others refuse it."""
    return _takes(engine, [{"role": "developer", "content": _MARK}, {"role": "user", "content": "ask"}])


def _takes(engine: Engine, messages: list[dict[str, str]]) -> bool:
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return True  # messages are refused altogether
    try:
        return _MARK in str(tokenizer.apply_chat_template(messages, tokenize=False))
    except _FAILURES:
        return False


def _wants_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Return whether a template, as of some models of images, writes content that is a list of parts and no text."""
    message = {"role": "user", "content": _MARK}
    return not _writes(render, message) and _writes(render, _in_parts(message))


def _writes(render: Callable[[list[dict[str, Any]]], str], message: dict[str, Any]) -> bool:
    try:
        return _MARK in render([message])
    except _FAILURES:
        return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
