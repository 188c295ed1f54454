"""Prompts that are conversations, as the model's chat template writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..settings.sections import DataSettings
from .picture_reader import PictureReader
from .pictures import placed
from .problems import Message, Problem, load_problems


class ChatPrompts:
    """Writer of the prompts of a job: with messages before each, and the template's text and tokens."""

    def __init__(
        self, data: DataSettings, tokenizer: PreTrainedTokenizerBase, pictures: PictureReader | None = None
    ) -> None:
        """Read the rows that are shown before each prompt, whose own system messages are left out. pictures: of the
        model's folder. Raises ValueError for a wrong file, or shown rows without an answer."""
        self._data, self._tokenizer, self._pictures = data, tokenizer, pictures
        self._system: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        self._shown: list[Message] = []
        if data.few_shot_path:
            for shown in load_problems(data.few_shot_path, data.prompt_field, data.answer_field):
                if not shown.answer:
                    raise ValueError(f"{shown.source}: a row that is shown needs an answer")
                if shown.pictures:
                    raise ValueError(f"{shown.source}: a row that is shown must have no pictures")
                _, messages = _divided(_messages(shown))
                self._shown += [*messages, {"role": "assistant", "content": shown.answer}]

    def written(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems with the prompts that the model gets. Raises ValueError naming the first problem that
        the template refuses, and for a model without a template."""
        return [self._written(problem) for problem in problems]

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a conversation with the system prompt and the shown rows before them. A system message
        of its own takes the place of the job's, before the shown rows."""
        own, others = _divided(messages)
        return [*(own or self._system), *self._shown, *others]

    def _written(self, problem: Problem) -> Problem:
        read = self._pictures if problem.pictures else None
        if not (problem.messages or self._data.chat or self._system or self._shown):
            return replace(problem, read=read)
        where = problem.place
        if not self._tokenizer.chat_template:
            raise ValueError(f"{where}: messages need a chat template, and the tokenizer of model.path has none")
        try:
            settings: dict[str, Any] = {**self._data.chat_template_kwargs, "tokenize": False}
            settings.setdefault("add_generation_prompt", True)
            messages = [dict(message) for message in self.opened(placed(_messages(problem), problem.pictures))]
            text = str(self._tokenizer.apply_chat_template(messages, **settings))
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"{where}: the chat template refuses it: {error}") from error
        # The template has written the special tokens that belong there.
        if read is not None:
            return replace(problem, prompt=text, read=partial(read, is_whole=False))
        ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return replace(problem, prompt=text, prompt_ids=ids)


def _messages(problem: Problem) -> list[Message]:
    return list(problem.messages) or [{"role": "user", "content": problem.prompt}]


def _divided(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system message at the beginning, if there is one, and the others."""
    num = int(messages[0].get("role") == "system")
    return list(messages[:num]), list(messages[num:])
