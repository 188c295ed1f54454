"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..chat.message import AnswerStream
from ..chat.parser import Beginning
from ..chat.template import read_messages
from ..conversations.next_turn import NextTurn
from ..edge.bodies import describe, read_as
from ..edge.errors import HttpError, as_http_error
from ..edge.session_paths import with_session
from ..generation.admission import Size
from ..generation.asked import Asked
from ..generation.body import has_stop_regex
from ..generation.encoding import chunk_cost, completion_cost
from ..generation.generate import refuse_ignored
from ..generation.going_on import Moving, read_moving
from ..generation.limits import RequestLimits
from ..generation.seam import Seam
from ..generation.session_turns import answer_turn, begin_turn, settled
from ..generation.subscriptions import Subscription, hub_of
from ..observe.model_info import refuse_unknown_model, served_name
from .body import OpenAIRequest, read_chat, read_completion
from .fields import ChatBody, CompletionBody
from .format import (
    answer,
    chunk_choices,
    chunk_head,
    chunk_usage,
    chunk_weights,
    extras,
    plain_message,
    prompt_text,
    sglext,
    usage,
)
from .text_offsets import TextOffsets
from .writers import ChunkWriter, SeamWriter, Writer

router = APIRouter()

HEAD = ("id", "created")  # of a request: all events of a stream repeat them

Read = Callable[[dict[str, object], Engine, str, RequestLimits], OpenAIRequest]


@router.post("/v1/completions", openapi_extra=describe(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue texts or token ids."""
    return await complete(request, read_completion)


@router.post("/v1/chat/completions", openapi_extra=describe(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await complete(request, read_chat)


async def complete(request: Request, read: Read, form: type[OpenAIReply] | None = None) -> Response:
    """Answer a request whose fields `read` reads. form: of its answer; None: OpenAI's."""
    received = time.monotonic()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(400, "the Content-Type must be application/json", param="Content-Type")
    hub = hub_of(request.app)
    hub.refuse_if_draining()
    name = served_name(request.app.state.service, request.app.state.config)

    def read_known(values: dict[str, object]) -> tuple[OpenAIRequest, Moving]:
        values = with_session(request.scope, values)
        refuse_unknown_model(request.app, values.get("model"), or_adapter=True)
        return read(values, hub.engine, name, hub.limits), read_moving(values)

    ask, moving = await read_as(request, read_known, is_slow=has_stop_regex, ends_with_client=True)
    turn = begin_turn(request, ask.session, ask.id)
    ask = replace(ask, **moving.head_of(HEAD))
    reply = (form or OpenAIReply)(ask, hub.limits, received, turn, moving=moving, engine=hub.engine)
    return await answer_turn(hub, request, reply, turn)


@dataclass(frozen=True)
class OpenAIReply:
    """The answer to one request of OpenAI's API, see `Reply`."""

    request: OpenAIRequest
    limits: RequestLimits
    received: float  # on the monotonic clock
    turn: NextTurn | None = None  # of a session
    echoes: list[str] = field(default_factory=list)  # by prompt; `asked` fills it, empty without `echo`
    beginnings: list[Beginning] = field(default_factory=list)  # of a chat's answers; likewise
    moving: Moving = field(kw_only=True)
    engine: Engine = field(kw_only=True)

    @property
    def is_streamed(self) -> bool:
        """See `Reply.is_streamed`."""
        return self.request.stream

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
            num_begun = 0 if self.turn is None else self.turn.num_begun
            self.beginnings.append(form.beginning(asked.prompts[0], self.request.begun, num_begun))
        return self.moving.asked(settled(asked, self.turn), self.engine)

    def cost(self, completions: Sequence[Completion]) -> int:
        """See `Reply.cost`."""
        has_texts = self.request.wanted.logprobs
        return sum(completion_cost(completion, has_texts=has_texts) for completion in completions)

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """See `Reply.whole`."""
        for completion in completions:
            refuse_ignored(completion)
        completions = list(map(Seam(self.moving, self.engine).completion, count(), completions))
        found = answer(self.request, completions, self.received, self.echoes, self.beginnings)
        if self.turn is not None:
            choices: Any = found["choices"]
            found |= self._session(completions[0], choices[0].get("message"))
        return found

    def writer(self) -> Writer:
        """Make the writer of the events of a stream."""
        return ChunkWriter()

    async def events(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """Make the events: as with OpenAI, a chunk holds only new output."""
        head, writer = chunk_head(self.request), SeamWriter(self.writer(), self.moving)
        offsets = [TextOffsets(self.request, len(self._echo(index))) for index in range(len(subscription.index_of))]
        num_new, answers = [0] * len(subscription.index_of), dict[int, Completion]()
        seam = Seam(self.moving, self.engine, {name: getattr(self.request, name) for name in HEAD})

        def chunk_event(choices: list[dict[str, object]], others: Mapping[str, object]) -> bytes:
            return writer.chunk({**head, "choices": choices, **others})

        for choice, cost, num_prompt in self._first_choices(subscription):
            others = dict(chunk_usage(self.request, num_prompt, 0))
            if self.request.is_chat and self.request.return_token_ids:
                others["prompt_token_ids"] = choice["prompt_token_ids"]  # where the whole answer has them
            first = await subscription.encode(partial(chunk_event, [choice], others), cost)
            if not seam.has_begun(index := int(str(choice["index"]))):
                yield seam.notes(index) + seam.group(first)

        streams = self._streams(len(subscription.index_of))

        def next_events(chunk: StreamChunk, index: int, num_new: int, is_end: bool) -> bytes:
            choices = chunk_choices(self.request, chunk, index, offsets[index], streams[index] if streams else None)
            if chunk.completion is not None and self.request.return_meta_info:
                choices[-1]["meta_info"] = extras(self.request, chunk.completion, self.received)["meta_info"]
            others = (counts := chunk_usage(self.request, chunk.num_prompt_tokens, num_new)) | chunk_weights(chunk)
            if is_end and self.request.return_cached_details:
                others["sglext"] = sglext(answers[0])
            if chunk.completion is not None and self.turn is not None:
                message = streams[index].message if streams else plain_message(chunk.completion.text)
                others |= self._session(chunk.completion, message)
            events = [chunk_event([choice], counts) for choice in choices[:-1]]
            return b"".join([*events, chunk_event(choices[-1:], others)])

        try:
            while subscription.num_open:
                for given in await subscription.take():
                    index = subscription.index_of[given.id]
                    known, fresh = seam.parts(index, [given])
                    for chunk, is_new in [*zip(known, repeat(False)), *zip(fresh, repeat(True))]:
                        if chunk.completion is not None:
                            refuse_ignored(chunk.completion)
                            answers[index] = chunk.completion
                        cost = self._cost(chunk)
                        if streams:
                            cost += streams[index].cost(chunk.text, is_last=chunk.completion is not None)
                        if is_new:
                            writer.pass_seam()
                        num_new[index] += len(chunk.token_ids) - chunk.num_taken_back
                        made = partial(next_events, chunk, index, num_new[index], len(answers) == len(num_new))
                        events = await subscription.encode(made, cost)
                        if is_new:
                            yield seam.notes(index, [chunk]) + seam.group(events)
        except (HttpError, EngineStopped) as error:
            yield writer.failed(as_http_error(error))
        else:
            if self.request.include_usage and not seam.has_usage:
                told = usage(self.request, [answers[index] for index in range(len(answers))])
                yield seam.usage_note() + seam.group(writer.chunk({**head, "choices": [], "usage": told}))
        yield writer.end()

    def deltas(self, text: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """List the pieces of a chat's whole message in the order of the answer's text."""
        form = self.request.form
        if form is None or form.answers is None:
            return [dict(message)]
        deltas = AnswerStream(form.answers, self.beginnings[0]).deltas(text, is_last=True)
        calls = message.get("tool_calls", ())
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    call["id"] = calls[call["index"]]["id"]
        return deltas

    def _streams(self, num: int) -> list[AnswerStream]:
        """Make the messages of a chat's answers; none where they are content alone."""
        form = self.request.form
        if form is None or form.answers is None:
            return []
        return [AnswerStream(form.answers, self.beginnings[0], keeps_message=self.turn is not None) for _ in range(num)]

    def _cost(self, chunk: StreamChunk) -> int:
        """Return what the event of a step's output will cost."""
        cost = chunk_cost(chunk, has_texts=self.request.wanted.logprobs)
        if chunk.completion is not None and self.request.return_meta_info:
            cost += completion_cost(chunk.completion, has_texts=False)
        return cost

    def _session(self, completion: Completion, message: dict[str, Any] | None) -> dict[str, object]:
        """Make the fields of an answer that is a turn of a session: the turn has ended with this message, that of a
        completion with tokens alone."""
        assert self.turn is not None
        as_sent = None if message is None else read_messages([message], self.limits)[0]
        return {"session": self.turn.keep(completion, as_sent, self.request.extra_key)}

    def _echo(self, index: int) -> str:
        """Return the text of the prompt of a sequence if the request echoes it, else an empty text."""
        return self.echoes[index // self.request.n] if self.echoes else ""

    def _first_choices(self, subscription: Subscription) -> Iterator[tuple[dict[str, object], int, int]]:
        """Make the chunks before the first token, with their costs and the lengths of their prompts: the role of a
        chat's author, or the echoed prompt."""
        for index in range(len(subscription.index_of)):
            prompts = subscription.asked.prompts
            prompt_ids = prompts[index * len(prompts) // len(subscription.index_of)]
            choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": None}
            if self.request.return_prompt_token_ids or self.request.return_token_ids:
                choice["prompt_token_ids"] = prompt_ids
            if self.request.is_chat:
                has_parts = self.request.form is not None and self.request.form.answers is not None
                delta = {"role": "assistant", "content": None if has_parts else ""}
                yield {**choice, "delta": delta}, len(prompt_ids) // 16, len(prompt_ids)
            elif self.request.echo or "prompt_token_ids" in choice:
                text = self._echo(index)
                yield {**choice, "text": text}, len(prompt_ids) // 16 + len(text) // 16, len(prompt_ids)
