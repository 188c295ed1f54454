"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..edge.bodies import describe, read_as
from ..edge.errors import HttpError, as_http_error, error_body
from ..generation.body import has_stop_regex
from ..generation.generate import refuse_ignored
from ..generation.limits import RequestLimits
from ..generation.sse import DONE, dumps, event
from ..generation.subscriptions import Asked, Size, Subscription, hub_of
from ..observe.model_info import served_name
from .body import ChatBody, CompletionBody, OpenAIRequest, read_chat, read_completion
from .format import answer, chunk_choice, chunk_head, echoed, extras, usage

router = APIRouter()

Read = Callable[[dict[str, object], Engine, str, RequestLimits], OpenAIRequest]


@router.post("/v1/completions", openapi_extra=describe(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue texts or token ids."""
    return await _complete(request, read_completion)


@router.post("/v1/chat/completions", openapi_extra=describe(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await _complete(request, read_chat)


async def _complete(request: Request, read: Read) -> Response:
    received = time.monotonic()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(400, "the Content-Type must be application/json", param="Content-Type")
    hub = hub_of(request.app)
    hub.refuse_if_draining()
    name = served_name(request.app.state.service, request.app.state.config)
    ask = await read_as(request, lambda values: read(values, hub.engine, name, hub.limits), is_slow=has_stop_regex)
    return await hub.answer(request, OpenAIReply(ask, received))


@dataclass(frozen=True)
class OpenAIReply:
    """The answer to one request of OpenAI's API, see `Reply`."""

    request: OpenAIRequest
    received: float  # on the monotonic clock

    @property
    def is_streamed(self) -> bool:
        """See `Reply.is_streamed`."""
        return self.request.stream

    @property
    def size(self) -> Size:
        """See `Reply.size`."""
        return self.request.size

    def asked(self) -> Asked:
        """See `Reply.asked`."""
        return self.request.asked()

    def whole(self, completions: list[Completion]) -> object:
        """See `Reply.whole`."""
        for completion in completions:
            refuse_ignored(completion)
        return answer(self.request, completions, self.received)

    async def events(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """Make the events: as with OpenAI, a chunk holds only new output."""
        head, empty_usage = chunk_head(self.request), {"usage": None} if self.request.include_usage else {}
        num_chars = [0] * len(subscription.index_of)
        answers: dict[int, Completion] = {}

        def chunk_event(choices: list[dict[str, object]]) -> bytes:
            return event(dumps({**head, "choices": choices, **empty_usage}))

        for choice in self._first_choices(subscription, num_chars):
            yield chunk_event([choice])
        try:
            while subscription.num_open:
                for chunk in await subscription.take():
                    index = subscription.index_of[chunk.id]
                    choice = chunk_choice(self.request, chunk, index, num_chars[index])
                    num_chars[index] += len(chunk.text)
                    if chunk.completion is not None:
                        refuse_ignored(chunk.completion)
                        answers[index] = chunk.completion
                        if self.request.return_meta_info:
                            choice["meta_info"] = extras(self.request, chunk.completion, self.received)["meta_info"]
                    yield chunk_event([choice])
        except (HttpError, EngineStopped) as error:
            yield event(dumps(error_body(as_http_error(error), openai=True)))
        else:
            if self.request.include_usage:
                in_order = [answers[index] for index in range(len(answers))]
                yield event(dumps({**head, "choices": [], "usage": usage(self.request, in_order)}))
        yield DONE

    def _first_choices(self, subscription: Subscription, num_chars: list[int]) -> list[dict[str, object]]:
        """Make the chunks before the first token: the role of a chat's author, or the echoed prompt."""
        found = []
        for index in range(len(num_chars)):
            prompt_ids = subscription.asked.prompts[index // self.request.n]
            choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": None}
            if self.request.return_prompt_token_ids or self.request.return_token_ids:
                choice["prompt_token_ids"] = prompt_ids
            if self.request.is_chat:
                found.append({**choice, "delta": {"role": "assistant", "content": ""}})
            elif self.request.echo or "prompt_token_ids" in choice:
                text = echoed(self.request, index, prompt_ids)
                num_chars[index] = len(text)
                found.append({**choice, "text": text})
        return found
