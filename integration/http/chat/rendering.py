"""The rendering of conversations by a chat template, and questions to it.

Templates differ in what they write: some leave out a developer's message, others keep only the first call of an answer,
and none says so. A question is a small conversation with marks in it, and the text shows which of them are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from .content import with_texts_as_arguments

Message = dict[str, Any]
Render = Callable[[list[Message]], str]

# A template may fail in any of these ways on a message that its author did not expect.
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
_TOOL = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Rendering:
    """A chat template, as one request uses it."""

    tokenizer: Any
    settings: Mapping[str, Any]  # of `apply_chat_template`
    has_parts: bool = False  # content is a list of parts, as some templates of models with images want it

    def __call__(self, messages: list[Message]) -> str:
        """Return the text of a conversation. Raises one of `FAILURES` where the template refuses it."""
        if self._has_other_thoughts:
            messages = [
                {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
                for message in messages
            ]
        if self.has_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            return self._text(messages)
        except TypeError:  # some templates join the arguments of calls to texts, and others write them as JSON
            if not any("tool_calls" in message for message in messages):
                raise
            return self._text(with_texts_as_arguments(messages))

    @property
    def asking(self) -> Rendering:
        """The same template for questions: of a conversation that ends with its last message, with one tool if any."""
        tools = [{"type": "function", "function": _TOOL}] if self.settings.get("tools") else None
        other = {"tools": tools, "add_generation_prompt": False, "continue_final_message": False}
        return replace(self, settings={**self.settings, **other})

    def fitting_parts(self) -> Rendering:
        """Return the rendering with content in parts if the template writes only those."""
        in_parts = replace(self, has_parts=True).asking
        marked = [{"role": "user", "content": "as a text"}]
        if not writes(self.asking, marked, ["as a text"]) and writes(in_parts, marked, ["as a text"]):
            return replace(self, has_parts=True)
        return self

    def with_tools_described(self) -> Rendering:
        """Return the rendering with an empty description of each tool that has none, if the template needs it."""
        tools = self.settings.get("tools") or []
        if all(tool["function"].get("description") is not None for tool in tools):
            return self
        bare = {"type": "function", "function": {name: _TOOL[name] for name in ("name", "parameters")}}
        without = replace(self.asking, settings={**self.asking.settings, "tools": [bare]})
        asked = [{"role": "user", "content": "ask"}]
        if writes(without, asked, ()) or not writes(self.asking, asked, ()):
            return self
        described = [
            {**tool, "function": {**tool["function"], "description": tool["function"].get("description") or ""}}
            for tool in tools
        ]
        return replace(self, settings={**self.settings, "tools": described})

    @property
    def _has_other_thoughts(self) -> bool:
        """Whether the template has another name for thoughts, as gpt-oss's."""
        shown = str(self.settings.get("chat_template") or self.tokenizer.chat_template)
        return "reasoning_content" not in shown and ".thinking" in shown

    def _text(self, messages: list[Message]) -> str:
        # transformers' own method takes away what is none, for which some templates ask.
        write = self._with_none if any(_has_none(message) for message in messages) else self._plain
        found = write(messages)
        # Half of a surrogate pair in the arguments of a call stays the escape that it was, since no text has it.
        return found.encode("utf-8", "backslashreplace").decode()

    def _plain(self, messages: list[Message]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, **self.settings))

    def _with_none(self, messages: list[Message]) -> str:
        given = {name: value for name, value in self.settings.items() if name != "tokenize"}
        given = {**self.tokenizer.special_tokens_map, **given}
        given["chat_template"] = self.tokenizer.get_chat_template(given.get("chat_template"), given.get("tools"))
        # (texts, places of answers in them), whatever its annotation says
        written: Any = render_jinja_template(conversations=[messages], **given)
        return str(written[0][0])


def writes(render: Render, messages: list[Message], marks: Sequence[str]) -> bool:
    """Return whether a template writes a conversation with all of these marks, in their order."""
    try:
        text = render(messages)
    except FAILURES:
        return False
    at = 0
    for mark in marks:
        at = text.find(mark, at)
        if at < 0:
            return False
        at += len(mark)
    return True


def writes_roles(render: Render, first: Sequence[str], late: Collection[str]) -> bool:
    """Return whether a template writes messages of these roles at the beginning of a conversation, and later, before an
    answer and behind it."""
    roles = [*first, "user", *late, "assistant", *late, "user"]
    marks = [f"({role} {number})" for number, role in enumerate(roles)]
    told = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    return writes(render, told, marks)


def chat_template_text(tokenizer: Any) -> str:
    """Return the text of all chat templates of a tokenizer, empty without any."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def _has_none(message: Message) -> bool:
    return "tool_calls" in message and message.get("content", "") is None


def _in_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
