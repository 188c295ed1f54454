"""Prompts that are conversations: their messages, and the tokens that the model's chat template makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # heavy
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # role, content, and what else the template reads


@dataclass(frozen=True)
class Conversations:
    """The way in which prompts become conversations."""

    chats: bool = False  # a prompt that is text is a user's message
    system: str = ""  # message before those of each conversation that has none of its own; makes text a message, too
    template_kwargs: Mapping[str, object] = field(default_factory=dict)  # variables of the chat template

    @property
    def takes_text(self) -> bool:
        """Whether a prompt that is text becomes a conversation."""
        return self.chats or bool(self.system)

    def opened(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Return the messages of a prompt, with the system message before them. Raises ValueError naming the fault."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        for number, message in enumerate(messages):
            is_object = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
            if not is_object:
                raise ValueError(f"message {number} must be an object with role and content")
        if not messages:
            raise ValueError("holds no message")
        if messages[-1]["role"] == "assistant" and not self.template_kwargs.get("continue_final_message"):
            raise ValueError("the last message is the assistant's, whose turn it is")
        if self.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def token_ids(self, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the tokens of a conversation up to the model's turn. Raises ValueError where the template refuses
        it."""
        from jinja2 import TemplateError

        settings: dict[str, Any] = {**self.template_kwargs, "tokenize": False}
        settings.setdefault("add_generation_prompt", not settings.get("continue_final_message"))
        try:
            text = str(tokenizer.apply_chat_template([dict(message) for message in messages], **settings))
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        refuse_half_pair("its text", text)
        # The template has written the special tokens that belong there.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def refuse_half_pair(name: str, text: str) -> None:
    """Raise ValueError for a text of that name with half of a surrogate pair, which only an escape of JSON writes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{name} has {half!r}, half of a surrogate pair, which is no character") from error


def is_conversation(prompt: object) -> bool:
    """Return whether a prompt is a list of messages, or meant to be."""
    return isinstance(prompt, list) and any(isinstance(one, Mapping) for one in prompt)


def read_conversations(path: str) -> list[list[Message]]:
    """Read the conversations of a JSON file: one list of messages, or a list of such lists. Raises ValueError naming
    the file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--messages {path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--messages {path}: not JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"--messages {path}: must be a list of messages, or a list of such lists, and not empty")
    return found if all(isinstance(one, list) for one in found) else [found]
