"""Conversations as the texts that a model reads: the chat template of its tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from ....rollout.engine import Engine
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from .content import ROLES, Images, read_message, texts_of
from .past_calls import PastCalls
from .rendering import FAILURES, Rendering, chat_template_text, writes_roles
from .roles import Roles

_NO_EFFORT = "none"  # of reasoning
_KINDS_OF_THINKING = ("enabled", "adaptive", "disabled")


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
    own, effort = asked.chat_template_kwargs or {}, asked.reasoning_effort
    return {**own} if effort is None else {"reasoning_effort": effort, **_thinks(effort != _NO_EFFORT), **own}


def with_effort(values: dict[str, object]) -> dict[str, object]:
    """Return the values of a chat in which SGLang's `reasoning` and `thinking` are its reasoning_effort and variables
    of its template. Raises BadField."""
    reasoning, thinking, given = (values.get(name) for name in ("reasoning", "thinking", "chat_template_kwargs"))
    if (reasoning is None and thinking is None) or not isinstance(given, dict | None):
        return values  # another check refuses it
    found, thinks = dict(values), None
    if reasoning is not None:
        if not isinstance(reasoning, dict):
            raise BadField("reasoning", "must be an object")
        if (effort := reasoning.get("effort")) is not None:
            if not isinstance(effort, str):
                raise BadField("reasoning.effort", "must be a text")
            found["reasoning_effort"] = effort
        if (thinks := reasoning.get("enabled")) is not None and not isinstance(thinks, bool):
            raise BadField("reasoning.enabled", "must be true or false")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else thinking
        if isinstance(kind, bool):
            thinks = kind
        elif kind in _KINDS_OF_THINKING:
            thinks = kind != "disabled"
        else:
            raise BadField(
                "thinking", f"must be true, false, or an object with the type {', '.join(_KINDS_OF_THINKING)}"
            )
    return found if thinks is None else {**found, "chat_template_kwargs": {**_thinks(thinks), **(given or {})}}


def _thinks(thinks: bool) -> dict[str, object]:
    """Return the variables by which the templates of Qwen, GLM and DeepSeek think or not."""
    return {"enable_thinking": thinks, "thinking": thinks}


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
    render = Rendering(tokenizer, extra).with_tools_described()
    if engine.model.images is not None:
        render = render.fitting_parts()
    messages = Roles(partial(writes_roles, render.asking)).fitted(messages).messages
    messages = PastCalls(render.asking).fitted(messages)
    try:
        return render(messages)
    except FAILURES as error:
        raise BadField("messages", f"the chat template refuses them: {error}") from None


def roles_of(engine: Engine) -> Roles:
    """Return the roles that an engine's chat template writes."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return Roles(lambda first, late: True)  # messages are refused altogether
    render = Rendering(tokenizer, {"tokenize": False})
    if engine.model.images is not None:
        render = render.fitting_parts()
    return Roles(partial(writes_roles, render.asking))
