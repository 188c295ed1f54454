"""POST /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ..conversations.store import Sessions
from ..edge.bodies import describe
from ..edge.errors import HttpError
from ..generation.encoding import QUICK_COST
from ..generation.subscriptions import Subscription
from ..openai.api import OpenAIReply, complete
from .fields import ResponsesBody
from .places import Places
from .request import ResponsesRequest, read_response
from .writer import ResponseWriter

router = APIRouter()


@router.post("/v1/responses", openapi_extra=describe(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation of items."""
    places = Places()
    sessions: Sessions = request.app.state.conversations
    read = partial(read_response, places=places, first=partial(first_message, sessions))
    try:
        return await complete(request, read, ResponsesReply)
    except HttpError as error:
        raise places.renamed(error) from None


def first_message(sessions: Sessions, id: str, rid: str) -> dict[str, Any] | None:
    """Return the first message of the conversation of a session's turn; None: there is none."""
    with sessions.lock:
        try:
            turn = sessions.find(id, "id").turns.get(rid)
        except HttpError:  # the beginning of the turn raises it
            return None
    messages = None if turn is None else turn.path[0].messages
    if not messages:
        return None
    found: dict[str, Any] = json.loads(messages[0])
    return found


@dataclass(frozen=True)
class ResponsesReply(OpenAIReply):
    """The answer to one request, see `Reply`."""

    request: ResponsesRequest

    def cost(self, completions: Sequence[Completion]) -> int:
        """See `Reply.cost`."""
        return super().cost(completions) + self._cost_of_repeated

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """See `Reply.whole`. The answer is the end of the stream that it would be."""
        found = super().whole(completions)
        [choice] = found.pop("choices")
        message = choice.pop("message")
        writer = self.writer()
        for delta in self.deltas(completions[0].text, message):
            writer.grow({"choices": [{"delta": delta, "logprobs": None, "finish_reason": None}]})
        writer.grow({"choices": [{**choice, "delta": {}}]})
        writer.grow({**found, "choices": []})
        return writer.whole()

    def writer(self) -> ResponseWriter:
        """See `OpenAIReply.writer`."""
        count = self.limits.tokenising.count_of_output
        return ResponseWriter(self.request, count, is_turn=self.turn is not None)

    def _first_choices(self, subscription: Subscription) -> Iterator[tuple[dict[str, object], int, int]]:
        """See `OpenAIReply._first_choices`. The first events have the whole response."""
        for choice, cost, num_prompt in super()._first_choices(subscription):
            yield choice, cost + self._cost_of_repeated, num_prompt

    @property
    def _cost_of_repeated(self) -> int:
        return self.request.num_repeated // 16

    def _cost(self, chunk: StreamChunk) -> int:
        """See `OpenAIReply._cost`. The end repeats the whole answer, and the tokens of its thoughts are counted."""
        return super()._cost(chunk) + (QUICK_COST + 1 if chunk.completion is not None else 0)
