"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from ....rollout.completion import Completion
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..edge.bodies import describe, read_object
from ..edge.errors import HttpError, as_http_error, error_body
from ..generation.generate import CLIENT_GONE, refuse_ignored
from ..generation.sse import DONE, EventStream, dumps, event
from ..generation.subscriptions import Hub, Subscription, hub_of, unless_gone
from ..observe.model_info import served_name
from .body import ChatBody, CompletionBody, OpenAIRequest, read_chat, read_completion
from .format import answer, chunk_choice, chunk_head, echoed, extras, usage

router = APIRouter()

Read = Callable[[dict[str, object], Engine, str], OpenAIRequest]


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
    values = await read_object(request)
    hub = hub_of(request.app)
    ask = read(values, hub.engine, served_name(request.app.state.service, request.app.state.config))
    if ask.stream:
        subscription = await hub.subscribe(ask.asked, streamed=True)
        return EventStream(_events(subscription, ask, received), on_end=lambda: hub.leave(subscription))
    try:
        answers = await unless_gone(request, _answers(hub, ask))
    except ClientDisconnect:
        return CLIENT_GONE
    return JSONResponse(answer(ask, answers, received))


async def _answers(hub: Hub, ask: OpenAIRequest) -> list[Completion]:
    async with hub.open(ask.asked, streamed=False) as subscription:
        found = await subscription.completions()
    for completion in found:
        refuse_ignored(completion)
    return found


async def _events(subscription: Subscription, ask: OpenAIRequest, received: float) -> AsyncIterator[bytes]:
    """Chunks hold what is new, as OpenAI's do."""
    head, empty_usage = chunk_head(ask), {"usage": None} if ask.include_usage else {}
    num_chars = [0] * len(subscription.index_of)
    answers: dict[int, Completion] = {}

    def chunk_event(choices: list[dict[str, object]]) -> bytes:
        return event(dumps({**head, "choices": choices, **empty_usage}))

    for choice in _first_choices(ask, subscription, num_chars):
        yield chunk_event([choice])
    try:
        while subscription.num_open:
            for chunk in await subscription.take():
                index = subscription.index_of[chunk.id]
                choice = chunk_choice(ask, chunk, index, num_chars[index])
                num_chars[index] += len(chunk.text)
                if chunk.completion is not None:
                    refuse_ignored(chunk.completion)
                    answers[index] = chunk.completion
                    if ask.return_meta_info:
                        choice["meta_info"] = extras(ask, chunk.completion, received)["meta_info"]
                yield chunk_event([choice])
    except (HttpError, EngineStopped) as error:
        yield event(dumps(error_body(as_http_error(error), openai=True)))
    else:
        if ask.include_usage:
            in_order = [answers[index] for index in range(len(answers))]
            yield event(dumps({**head, "choices": [], "usage": usage(ask, in_order)}))
    yield DONE


def _first_choices(ask: OpenAIRequest, subscription: Subscription, num_chars: list[int]) -> list[dict[str, object]]:
    """What comes before the first token: the role of a chat's author, or the prompt that is echoed."""
    found = []
    for index in range(len(num_chars)):
        prompt_ids = subscription.asked.prompts[index // ask.n]
        choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": None}
        if ask.return_prompt_token_ids or ask.return_token_ids:
            choice["prompt_token_ids"] = prompt_ids
        if ask.is_chat:
            found.append({**choice, "delta": {"role": "assistant", "content": ""}})
        elif ask.echo or "prompt_token_ids" in choice:
            text = echoed(ask, index, prompt_ids)
            num_chars[index] = len(text)
            found.append({**choice, "text": text})
    return found
