"""Messages and tokens of episodes, as the model's tokenizer and chat template write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ...chat_tail import Template
from ..settings.sections import DataSettings
from ..tasks.chat import ChatPrompts


class EpisodeChat:
    """The chat of a job's episodes: its template, and the messages that stand before each conversation."""

    def __init__(self, data: DataSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read what stands before each conversation. Raises ValueError as `ChatPrompts`."""
        self._prompts = ChatPrompts(data, tokenizer)
        self._tokenizer = tokenizer
        self._end = len(tokenizer)
        self._settings: dict[str, Any] = {**data.chat_template_kwargs, "tokenize": False}
        self._settings.setdefault("add_generation_prompt", True)
        self.template = Template(self._render, self._tokenise, frozenset(tokenizer.all_special_ids))

    def opened(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the first messages of a conversation, with the system prompt and the examples before them."""
        return [dict(message) for message in self._prompts.opened(messages)]

    def checked(self, token_ids: Sequence[Any]) -> list[int]:
        """Return token ids. Raises ValueError for what is none of this tokenizer's."""
        found = []
        for token in token_ids:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= (one := index(token)) < self._end:
                raise ValueError(f"a turn has {token!r} among its token ids, which are 0 to {self._end - 1}")
            found.append(one)
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("messages need a chat template, and the tokenizer of model.path has none: add token ids")
        try:
            return str(self._tokenizer.apply_chat_template(messages, **self._settings))
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _tokenise(self, text: str) -> list[int]:
        # The template has written the special tokens that belong there.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
