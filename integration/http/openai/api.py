"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..chat.message import AnswerStream
from ..chat.template import read_messages
from ..conversations.next_turn import NextTurn
from ..edge.bodies import describe, read_as
from ..edge.errors import HttpError, as_http_error, error_body
from ..generation.admission import Size
from ..generation.body import has_stop_regex
from ..generation.encoding import chunk_cost, completion_cost
from ..generation.generate import refuse_ignored
from ..generation.limits import RequestLimits
from ..generation.session_turns import answer_turn, begin_turn
from ..generation.sse import DONE, dumps, event, event_of
from ..generation.subscriptions import Asked, Subscription, hub_of
from ..observe.model_info import refuse_unknown_model, served_name
from .body import OpenAIRequest, read_chat, read_completion
from .fields import ChatBody, CompletionBody
from .format import answer, chunk_choices, chunk_head, extras, plain_message, prompt_text, usage

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

    def read_known(values: dict[str, object]) -> OpenAIRequest:
        refuse_unknown_model(request.app, values.get("model"))
        return read(values, hub.engine, name, hub.limits)

    ask = await read_as(request, read_known, is_slow=has_stop_regex, ends_with_client=True)
    turn = begin_turn(request, ask.session, ask.id)
    return await answer_turn(hub, request, OpenAIReply(ask, hub.limits, received, turn), turn)


@dataclass(frozen=True)
class OpenAIReply:
    """The answer to one request of OpenAI's API, see `Reply`."""

    request: OpenAIRequest
    limits: RequestLimits
    received: float  # on the monotonic clock
    turn: NextTurn | None = None  # of a session
    echoes: list[str] = field(default_factory=list)  # by prompt; `asked` fills it, empty without `echo`
    prefixes: list[str] = field(default_factory=list)  # of a chat's answers, see `AnswerForm.prefix`; likewise

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
        return self.request.size.after(self.turn)

    def asked(self) -> Asked:
        """See `Reply.asked`."""
        asked = self.request.asked(self.turn)
        has_logprobs = [self.request.wanted.logprobs or self.request.return_meta_info] * len(asked.prompts)
        self.limits.entries(asked.prompts, asked.params, asked.options, "logprobs", has_logprobs=has_logprobs)
        if self.request.echo:
            self.echoes.extend(map(prompt_text, repeat(self.request), range(len(asked.prompts)), asked.prompts))
        if (form := self.request.form) is not None:
            self.prefixes.append(form.beginning(asked.prompts[0], self.request.begun).prefix)
        return asked

    def whole(self, completions: list[Completion]) -> object:
        """See `Reply.whole`."""
        for completion in completions:
            refuse_ignored(completion)
        found = answer(self.request, completions, self.received, self.echoes, self.prefixes)
        if self.turn is not None:
            choices: Any = found["choices"]
            found |= self._session(completions[0], choices[0]["message"])
        return found

    async def events(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """Make the events: as with OpenAI, a chunk holds only new output."""
        head, empty_usage = chunk_head(self.request), {"usage": None} if self.request.include_usage else {}
        num_chars = [len(self._echo(index)) for index in range(len(subscription.index_of))]
        answers: dict[int, Completion] = {}

        def chunk_event(choices: list[dict[str, object]], session: Mapping[str, object] | None = None) -> bytes:
            return event_of({**head, "choices": choices, **empty_usage, **(session or {})})

        for choice, cost in self._first_choices(subscription):
            yield await subscription.encode(partial(chunk_event, [choice]), cost)

        streams = self._streams(len(subscription.index_of))

        def next_events(chunk: StreamChunk, index: int, offset: int) -> bytes:
            choices = chunk_choices(self.request, chunk, index, offset, streams[index] if streams else None)
            if chunk.completion is not None and self.request.return_meta_info:
                choices[-1]["meta_info"] = extras(self.request, chunk.completion, self.received)["meta_info"]
            session = {}
            if chunk.completion is not None and self.turn is not None:
                message = streams[index].message if streams else plain_message(chunk.completion.text)
                session = self._session(chunk.completion, message)
            events = [chunk_event([choice]) for choice in choices[:-1]]
            return b"".join([*events, chunk_event(choices[-1:], session)])

        try:
            while subscription.num_open:
                for chunk in await subscription.take():
                    index = subscription.index_of[chunk.id]
                    if chunk.completion is not None:
                        refuse_ignored(chunk.completion)
                        answers[index] = chunk.completion
                    cost = self._cost(chunk)
                    if streams:
                        cost += streams[index].cost(chunk.text, is_last=chunk.completion is not None)
                    yield await subscription.encode(partial(next_events, chunk, index, num_chars[index]), cost)
                    num_chars[index] += len(chunk.text)
        except (HttpError, EngineStopped) as error:
            yield event(dumps(error_body(as_http_error(error), openai=True)))
        else:
            if self.request.include_usage:
                in_order = [answers[index] for index in range(len(answers))]
                yield event(dumps({**head, "choices": [], "usage": usage(self.request, in_order)}))
        yield DONE

    def _streams(self, num: int) -> list[AnswerStream]:
        """Make the messages of a chat's answers; none where they are content alone."""
        form = self.request.form
        if form is None or form.answers is None:
            return []
        return [AnswerStream(form.answers, self.prefixes[0], keeps_message=self.turn is not None) for _ in range(num)]

    def _cost(self, chunk: StreamChunk) -> int:
        """Return what the event of a step's output will cost."""
        cost = chunk_cost(chunk, has_texts=self.request.wanted.logprobs)
        if chunk.completion is not None and self.request.return_meta_info:
            cost += completion_cost(chunk.completion, has_texts=False)
        return cost

    def _session(self, completion: Completion, message: dict[str, Any]) -> dict[str, object]:
        """Make the fields of an answer that is a turn of a session: the turn has ended with this message."""
        assert self.turn is not None
        [as_sent] = read_messages([message], self.limits)
        return {"session": self.turn.keep(completion, as_sent, self.request.extra_key)}

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
                has_parts = self.request.form is not None and self.request.form.answers is not None
                delta = {"role": "assistant", "content": None if has_parts else ""}
                yield {**choice, "delta": delta}, len(prompt_ids) // 16
            elif self.request.echo or "prompt_token_ids" in choice:
                text = self._echo(index)
                yield {**choice, "text": text}, len(prompt_ids) // 16 + len(text) // 16
