"""The prompt of a chat: a conversation as its chat template writes it, or token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....rollout.engine import Engine
from ....rollout.sampling_params import SamplingParams
from ..chat.content import Images
from ..chat.template import apply_template, read_messages, settings_of, with_effort
from ..chat.tools import read_tools
from ..conversations.messages import shape_of
from ..conversations.next_turn import NextTurn
from ..edge.bodies import fields_of
from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from ..generation.subscriptions import Hub
from ..images.pictures import SentPicture
from ..images.reading import made_in_thread
from .fields import ChatBody
from .sessions import session_prompt

Messages = list[dict[str, Any]]
_FIELD = "messages"
_NO_ANSWER = SamplingParams(max_new_tokens=0)  # a prompt that is only counted may fill the context


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of one request, not tokenised yet."""

    engine: Engine
    limits: RequestLimits
    body: ChatBody
    tools: Sequence[dict[str, Any]]  # that the template shows to the model
    messages: Messages | None
    pictures: Sequence[SentPicture]  # of the messages, in order
    input_ids: list[int] | None  # instead of messages
    num_kept: int | None  # last tokens of the prompt; None: all

    def check(self) -> None:
        """Raise BadField for fields that do not go with images."""
        if not self.pictures:
            return
        self.limits.images.count(len(self.pictures), _FIELD)
        if self.num_kept is not None:
            raise BadField("truncate_prompt_tokens", "is not supported with images, whose tokens stand")
        assert self.messages is not None
        if self.body.continue_final_message and isinstance(self.messages[-1].get("content"), list):
            raise BadField("continue_final_message", "is not supported where the final message has an image")

    def token_ids(self, params: SamplingParams, turn: NextTurn | None) -> list[int]:
        """Make the prompt. turn: of a session. Slow for long conversations and for images. Raises BadField."""
        tokenising = self.limits.tokenising
        if self.input_ids is not None:
            [found] = tokenising.token_ids([self.input_ids], "input_ids", [params], turn=turn)
            return found
        assert self.messages is not None  # one of the two is given
        if turn is not None:
            return self._of_session(turn, params)
        if self.pictures:
            return self._with_images(params)
        text = self._render(self.messages)
        self.limits.characters(len(text), _FIELD)
        return tokenising.conversation(text, _FIELD, params, self.num_kept)

    def _of_session(self, turn: NextTurn, params: SamplingParams) -> list[int]:
        """Return the prompt of a session's next turn, whose history may have images."""
        assert self.messages is not None
        own = None
        if self.pictures or turn.has_pictures:
            processor = self.limits.images.processor(_FIELD)
            _refuse_spelled(self.messages, processor.placeholder)
            own = processor.chat_template

        # What a request sets comes before what its session was opened with.
        kwargs = {**turn.session.options.chat_template_kwargs, **settings_of(self.body)}
        body = self.body.model_copy(update={"chat_template_kwargs": kwargs}) if kwargs else self.body

        closed = body.model_copy(update={"add_generation_prompt": False, "continue_final_message": False})

        def render(told: Messages) -> str:
            return apply_template(self.engine, told, body, self.tools, own)

        def close(told: Messages) -> str:
            return apply_template(self.engine, told, closed, self.tools, own)

        shape = shape_of(self.tools, settings_of(body))
        return session_prompt(
            turn, self.messages, self.pictures, render, close, self.limits, params, shape,
            continues=self.body.continue_final_message,
        )  # fmt: skip

    def _with_images(self, params: SamplingParams) -> list[int]:
        assert self.messages is not None
        images = self.limits.images
        processor = images.processor(self.pictures[0].field)
        _refuse_spelled(self.messages, processor.placeholder)
        text = apply_template(self.engine, self.messages, self.body, self.tools, processor.chat_template)
        if (num := text.count(processor.placeholder)) != len(self.pictures):
            raise BadField(
                _FIELD, f"the chat template writes {num} placeholders of images ({processor.placeholder}) for "
                f"{len(self.pictures)} images: it may have none in messages of some roles"
            )  # fmt: skip
        self.limits.characters(len(text), _FIELD)
        self.limits.tokenising.refuse_long(text, _FIELD, params)
        found = images.of_text(text, self.pictures, _FIELD, adds_special=False)
        self.limits.tokenising.fits(len(found), _FIELD, params)
        return found

    @property
    def _render(self) -> Callable[[Messages], str]:
        return lambda told: apply_template(self.engine, told, self.body, self.tools)


def prompt_of(
    values: dict[str, object], engine: Engine, limits: RequestLimits, *, adds_special: bool = False
) -> list[int] | ChatPrompt:
    """Return the prompt of a conversation of any length, with the fields of a chat: its tokens, or what `prompt_tokens`
    makes them of where it has images. Slow. Raises BadField."""
    images, fields = Images(limits.images.one), fields_of(ChatBody, with_effort(values))
    messages = read_messages(fields.messages or [], limits, images)
    tools = read_tools(fields, limits)
    shown = () if tools is None else tools.shown
    if images.pictures:
        chat = ChatPrompt(engine, limits, fields, shown, messages, images.pictures, None, None)
        chat.check()
        return chat
    text = apply_template(engine, messages, fields, shown)
    limits.characters(len(text), _FIELD)
    return limits.tokenising.whole(text, adds_special=adds_special)


async def prompt_tokens(hub: Hub, prompt: list[int] | ChatPrompt) -> list[int]:
    """Return the tokens of a prompt; one with images is made in a thread. Raises BadField."""
    if not isinstance(prompt, ChatPrompt):
        return prompt
    make = partial(prompt.token_ids, _NO_ANSWER, None)
    return await made_in_thread(make, prompt.pictures, hub.image_threads, hub.image_bytes)


def _refuse_spelled(messages: Messages, placeholder: str) -> None:
    """Refuse texts that spell the placeholder of an image, whose place another image would take. Raises BadField."""
    for index, message in enumerate(messages):
        for name, value in message.items():
            if placeholder in (value if isinstance(value, str) else repr(value)):
                raise BadField(f"{_FIELD}.{index}.{name}", f"spells {placeholder}, the placeholder of an image")
