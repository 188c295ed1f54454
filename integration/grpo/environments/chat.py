"""Messages and tokens of episodes, as the model's tokenizer and chat template write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ....rollout.media.reader import image_tensors
from ...chat_tail import Template
from ..settings.sections import DataSettings
from ..tasks.chat import ChatPrompts
from ..tasks.picture_reader import PictureReader
from ..tasks.pictures import pictures_of


class EpisodeChat:
    """The chat of a job's episodes: its template, and the messages that stand before each conversation."""

    def __init__(
        self, data: DataSettings, tokenizer: PreTrainedTokenizerBase, pictures: PictureReader | None = None
    ) -> None:
        """Read what stands before each conversation. pictures: of the model's folder. Raises ValueError as
        `ChatPrompts`."""
        self._prompts = ChatPrompts(data, tokenizer)
        self._pictures = pictures or PictureReader("")
        self._tokenizer = tokenizer
        self._end = len(tokenizer)
        self.template_kwargs = data.chat_template_kwargs
        self._settings: dict[str, Any] = {**data.chat_template_kwargs, "tokenize": False}
        self._settings.setdefault("add_generation_prompt", True)
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def writer(self, messages: Sequence[Mapping[str, Any]]) -> TurnWriter:
        """Return the writer of a turn that adds these messages. Raises ValueError for a picture without a file."""
        pictures = pictures_of(messages)
        if None in pictures:
            raise ValueError('a part of the type "image" needs the picture: an image of Pillow, or a path, as "image"')
        return TurnWriter(self, pictures)

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

    def render(self, messages: list[dict[str, Any]], *, is_closed: bool = False) -> str:
        """Return the text of a prompt, or of a conversation that ends with these messages. Raises ValueError where the
        template refuses them."""
        if not self._tokenizer.chat_template:
            raise ValueError("messages need a chat template, and the tokenizer of model.path has none: add token ids")
        settings = {**self._settings, "add_generation_prompt": False} if is_closed else self._settings
        try:
            return str(self._tokenizer.apply_chat_template(messages, **settings))
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def tokenise(self, text: str, pictures: Sequence[Any]) -> tuple[list[int], dict[str, Tensor]]:
        """Return the tokens of a text of the template, and the tensors of its pictures."""
        # The template has written the special tokens that belong there.
        if not pictures:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]), {}
        read = self._pictures(text, pictures, is_whole=False)
        return read["input_ids"][0].tolist(), image_tensors(read)


class TurnWriter:
    """The template for one turn, which keeps the tensors of the pictures that the turn adds."""

    def __init__(self, chat: EpisodeChat, pictures: Sequence[Any]) -> None:
        self._chat, self._pictures = chat, pictures
        self.tensors: dict[str, Tensor] = {}  # of the text that was tokenised last
        self.template = Template(
            chat.render, self._tokenise, chat.special_ids, lambda text: chat.tokenise(text, ())[0],
            lambda told: chat.render(told, is_closed=True),
        )  # fmt: skip

    def _tokenise(self, text: str) -> list[int]:
        ids, self.tensors = self._chat.tokenise(text, self._pictures)
        return ids
