"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ....rollout.engine import Engine
from ..admin.common import json_response
from ..conversations.next_turn import NextTurn
from ..edge.bodies import describe, read_as
from ..generation.asked import Asked
from ..generation.encoding import QUICK_COST
from ..generation.limits import RequestLimits
from ..generation.subscriptions import hub_of
from ..observe.model_info import refuse_unknown_model
from ..openai.api import OpenAIReply, complete
from ..openai.body import OpenAIRequest, read_chat
from ..openai.chat_prompt import ChatPrompt, prompt_of, prompt_tokens
from ..openai.writers import Writer
from .answer import EventWriter, message_of
from .fields import AskedChat, CountBody, MessagesBody, read_chat_of

router = APIRouter()


@router.post("/v1/messages", openapi_extra=describe(MessagesBody))
async def messages(request: Request) -> Response:
    """Answer a conversation, with Anthropic's fields."""
    return await complete(request, read_message, MessageReply)


@router.post("/v1/messages/count_tokens", openapi_extra=describe(CountBody))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt. A session is not looked at."""
    hub = hub_of(request.app)

    def read(values: dict[str, object]) -> tuple[AskedChat, list[int] | ChatPrompt]:
        refuse_unknown_model(request.app, values.get("model"), or_adapter=True)
        chat = read_chat_of(values, hub.engine, hub.limits, CountBody)
        with chat.named():
            return chat, prompt_of(chat.values, hub.engine, hub.limits)

    chat, prompt = await read_as(request, read, is_slow=lambda values: True)
    with chat.named():
        return json_response({"input_tokens": len(await prompt_tokens(hub, prompt))})


def read_message(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> OpenAIRequest:
    """Read and check the fields of a message. Raises BadField."""
    chat = read_chat_of(values, engine, limits)
    name = chat.values.get("request_id") or uuid.uuid4().hex
    with chat.named():
        ask = read_chat({"rid": f"msg_{name}", **chat.values}, engine, model, limits)

    def asked(turn: NextTurn | None = None) -> Asked:
        with chat.named():
            found = ask.asked(turn)
            field = found.grammar_field
            return found if field is None else replace(found, grammar_field=chat.name(field))

    return replace(ask, asked=asked)


class MessageReply(OpenAIReply):
    """The answer to one request of the Messages API, see `Reply`."""

    def _cost(self, chunk: StreamChunk) -> int:
        """See `OpenAIReply._cost`. The end repeats the tokens and log-probabilities of the whole answer."""
        return super()._cost(chunk) + (QUICK_COST + 1 if chunk.completion is not None else 0)

    def writer(self) -> Writer:
        """See `OpenAIReply.writer`."""
        return EventWriter(self.engine.max_model_len)

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """See `Reply.whole`."""
        chat = super().whole(completions)
        deltas = self.deltas(completions[0].text, chat["choices"][0]["message"])
        return message_of(chat, deltas, self.engine.max_model_len)
