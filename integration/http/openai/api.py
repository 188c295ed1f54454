"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..edge.bodies import describe, read_as
from ..edge.errors import HttpError, as_http_error, error_body
from ..generation.admission import Size
from ..generation.body import has_stop_regex
from ..generation.encoding import chunk_cost, completion_cost
from ..generation.generate import refuse_ignored
from ..generation.limits import RequestLimits
from ..generation.sse import DONE, dumps, event, event_of
from ..generation.subscriptions import Asked, Subscription, hub_of
from ..observe.model_info import served_name
from .body import ChatBody, CompletionBody, OpenAIRequest, read_chat, read_completion
from .format import answer, chunk_choice, chunk_head, extras, prompt_text, usage

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
    ask = await read_as(
        request, lambda values: read(values, hub.engine, name, hub.limits), is_slow=has_stop_regex,
        ends_with_client=True,
    )  # fmt: skip
    return await hub.answer(request, OpenAIReply(ask, hub.limits, received))


@dataclass(frozen=True)
class OpenAIReply:
    """The answer to one request of OpenAI's API, see `Reply`."""

    request: OpenAIRequest
    limits: RequestLimits
    received: float  # on the monotonic clock
    echoes: list[str] = field(default_factory=list)  # by prompt; `asked` fills it, empty without `echo`

    @property
    def is_streamed(self) -> bool:
        """See `Reply.is_streamed`."""
        return self.request.stream

    @property
    def has_texts(self) -> bool:
        """See `Reply.has_texts`."""
        return self.request.wanted.logprobs

    @property
    def size(self) -> Size:
        """See `Reply.size`."""
        return self.request.size

    def asked(self) -> Asked:
        """See `Reply.asked`."""
        asked = self.request.asked()
        has_logprobs = [self.request.wanted.logprobs or self.request.return_meta_info] * len(asked.prompts)
        self.limits.entries(asked.prompts, asked.params, asked.options, "logprobs", has_logprobs=has_logprobs)
        if self.request.echo:
            self.echoes.extend(map(prompt_text, repeat(self.request), range(len(asked.prompts)), asked.prompts))
        return asked

    def whole(self, completions: list[Completion]) -> object:
        """See `Reply.whole`."""
        for completion in completions:
            refuse_ignored(completion)
        return answer(self.request, completions, self.received, self.echoes)

    async def events(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """Make the events: as with OpenAI, a chunk holds only new output."""
        head, empty_usage = chunk_head(self.request), {"usage": None} if self.request.include_usage else {}
        num_chars = [len(self._echo(index)) for index in range(len(subscription.index_of))]
        answers: dict[int, Completion] = {}

        def chunk_event(choices: list[dict[str, object]]) -> bytes:
            return event_of({**head, "choices": choices, **empty_usage})

        for choice, cost in self._first_choices(subscription):
            yield await subscription.encode(partial(chunk_event, [choice]), cost)

        def next_event(chunk: StreamChunk, index: int, offset: int) -> bytes:
            choice = chunk_choice(self.request, chunk, index, offset)
            if chunk.completion is not None and self.request.return_meta_info:
                choice["meta_info"] = extras(self.request, chunk.completion, self.received)["meta_info"]
            return chunk_event([choice])

        try:
            while subscription.num_open:
                for chunk in await subscription.take():
                    index = subscription.index_of[chunk.id]
                    if chunk.completion is not None:
                        refuse_ignored(chunk.completion)
                        answers[index] = chunk.completion
                    yield await subscription.encode(
                        partial(next_event, chunk, index, num_chars[index]), self._cost(chunk)
                    )
                    num_chars[index] += len(chunk.text)
        except (HttpError, EngineStopped) as error:
            yield event(dumps(error_body(as_http_error(error), openai=True)))
        else:
            if self.request.include_usage:
                in_order = [answers[index] for index in range(len(answers))]
                yield event(dumps({**head, "choices": [], "usage": usage(self.request, in_order)}))
        yield DONE

    def _cost(self, chunk: StreamChunk) -> int:
        """Return what the event of a step's output will cost."""
        cost = chunk_cost(chunk, has_texts=self.request.wanted.logprobs)
        if chunk.completion is not None and self.request.return_meta_info:
            cost += completion_cost(chunk.completion, has_texts=False)
        return cost

    def _echo(self, index: int) -> str:
        """Return the text of the prompt of a sequence if the request echoes it, else an empty text."""
        return self.echoes[index // self.request.n] if self.echoes else ""

    def _first_choices(self, subscription: Subscription) -> Iterator[tuple[dict[str, object], int]]:
        """Make the chunks before the first token, with their costs: the role of a chat's author, or the echoed
        prompt."""
        for index in range(len(subscription.index_of)):
            prompt_ids = subscription.asked.prompts[index // self.request.n]
            choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": None}
            if self.request.return_prompt_token_ids or self.request.return_token_ids:
                choice["prompt_token_ids"] = prompt_ids
            if self.request.is_chat:
                yield {**choice, "delta": {"role": "assistant", "content": ""}}, len(prompt_ids) // 16
            elif self.request.echo or "prompt_token_ids" in choice:
                text = self._echo(index)
                yield {**choice, "text": text}, len(prompt_ids) // 16 + len(text) // 16
