"""SGLang's own generation call, and the one that renews answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..conversations.next_turn import NextTurn
from ..edge.bodies import describe, read_as
from ..edge.errors import HttpError, as_http_error
from .admission import Size
from .asked import Asked
from .body import GenerateRequest, RenewBody, has_stop_regex, read_generate, read_renew
from .encoding import chunk_cost, completion_cost, copy_cost
from .going_on import Moving, read_moving
from .meta import Wanted, meta_info, stream_meta
from .seam import Seam
from .session_turns import answer_turn, begin_turn, settled
from .sse import DONE, GrowingList, GrowingText, Piece, dumps, event, event_of
from .subscriptions import Hub, Subscription, hub_of

router = APIRouter()


@router.post("/renew", openapi_extra=describe(RenewBody))
async def renew(request: Request) -> Response:
    """Answer as /generate would now, with the noise of earlier answers: their tokens that come again cost a prefill."""
    received = time.monotonic()
    hub = hub_of(request.app)
    hub.refuse_if_draining()

    def read(values: dict[str, object]) -> GenerateRequest:
        return read_renew(values, engine=hub.engine, limits=hub.limits)

    ask = await read_as(request, read, is_slow=has_stop_regex, ends_with_client=True)
    return await answer_generate(request, ask, Moving(), received)


def generate_reader(hub: Hub) -> Callable[[dict[str, object]], tuple[GenerateRequest, Moving]]:
    """Return a function that reads and checks the fields of /generate. It raises BadField."""
    return lambda values: (read_generate(values, engine=hub.engine, limits=hub.limits), read_moving(values))


async def answer_generate(request: Request, ask: GenerateRequest, moving: Moving, received: float) -> Response:
    """Answer a checked request, or a stream's, which came at a time of the monotonic clock."""
    hub = hub_of(request.app)
    turn = begin_turn(request, ask.session, ask.rids[0])
    return await answer_turn(hub, request, GenerateReply(ask, hub.engine, received, turn, moving), turn)


@dataclass(frozen=True)
class GenerateReply:
    """The answer to one /generate request, see `Reply`."""

    request: GenerateRequest
    engine: Engine
    received: float  # on the monotonic clock
    turn: NextTurn | None = None  # of a session
    moving: Moving = field(default_factory=Moving)

    @property
    def is_streamed(self) -> bool:
        """See `Reply.is_streamed`."""
        return self.request.stream

    @property
    def size(self) -> Size:
        """See `Reply.size`."""
        samples = (params.n for params in self.request.params)
        renewals = [one.renewal for one in self.request.options]
        drafts = [one.draft_token_ids for one in self.request.options]
        known = [r.token_ids if r is not None else draft for r, draft in zip(renewals, drafts, strict=True)]
        pictures = chain.from_iterable(self.request.pictures)
        return Size.of(self.request.prompts, samples, known).after(self.turn).with_images(pictures)

    def asked(self) -> Asked:
        """See `Reply.asked`."""
        return self.moving.asked(settled(self.request.asked(self.engine, self.turn), self.turn), self.engine)

    def cost(self, completions: Sequence[Completion]) -> int:
        """See `Reply.cost`."""
        has_texts = any(wanted.text_of is not None for wanted in self.request.wanted)
        return sum(completion_cost(completion, has_texts=has_texts) for completion in completions)

    def whole(self, completions: list[Completion]) -> object:
        """See `Reply.whole`."""
        seam = Seam(self.moving, self.engine)
        pairs = zip(map(seam.completion, count(), completions), self._wanted_by_sequence(), strict=True)
        answers = [self._answer(completion, wanted) for completion, wanted in pairs]
        return answers if self.request.answers_list else answers[0]

    async def events(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """Make the events: each chunk repeats the earlier output. A slow client gets one chunk for several steps."""
        is_list, wanted = self.request.answers_list, self._wanted_by_sequence()
        answers = [StreamedAnswer(one, index if is_list else None) for index, one in enumerate(wanted)]
        seam = Seam(self.moving, self.engine)
        try:
            while subscription.num_open:
                for index, given in by_sequence(subscription, await subscription.take()).items():
                    known, chunks = seam.parts(index, given)
                    for chunk in known:
                        answers[index].add(chunk)
                    if not chunks:
                        continue
                    if (completion := chunks[-1].completion) is None:
                        make = partial(answers[index].event, chunks, self.received)
                        cost = answers[index].cost(chunks)
                    else:
                        make = partial(self._last_event, completion, wanted[index], index if is_list else None)
                        cost = completion_cost(completion, has_texts=wanted[index].text_of is not None)
                    yield seam.notes(index, chunks) + await subscription.encode(make, cost)
        except (HttpError, EngineStopped) as error:
            yield error_event(error)
        yield DONE

    def _last_event(self, completion: Completion, wanted: Wanted, index: int | None) -> bytes:
        answer = self._answer(completion, wanted)
        return event_of(answer if index is None else {**answer, "index": index})

    def _answer(self, completion: Completion, wanted: Wanted) -> dict[str, object]:
        refuse_ignored(completion)
        meta = meta_info(completion, wanted, self.received)
        if self.turn is not None:
            meta["session"] = self.turn.keep(completion, extra_key=self.request.options[0].extra_key)
        answer: dict[str, object] = {"text": completion.text, "output_ids": completion.token_ids, "meta_info": meta}
        if self.request.return_prompt_token_ids:
            answer["prompt_token_ids"] = completion.prompt_ids
        return answer

    def _wanted_by_sequence(self) -> list[Wanted]:
        per_prompt = zip(self.request.wanted, self.request.params, strict=True)
        return [wanted for wanted, params in per_prompt for _ in range(params.n)]


class StreamedAnswer:
    """One sequence's answer while tokens are added, as JSON."""

    def __init__(self, wanted: Wanted, index: int | None) -> None:
        self._wanted = wanted
        self._index = "" if index is None else f',"index":{index}'
        self._text, self._token_ids = GrowingText(), GrowingList()
        self._lists: dict[str, GrowingList] = {}
        self._num_tokens = 0
        if wanted.logprobs:
            self._lists["output_token_logprobs"] = GrowingList()
        if wanted.top:
            self._lists["output_top_logprobs"] = GrowingList()
        if wanted.listed:
            self._lists["output_token_ids_logprobs"] = GrowingList()

    def add(self, chunk: StreamChunk) -> None:
        """Add the output of a step."""
        if chunk.num_taken_back:
            for entries in (self._token_ids, *self._lists.values()):
                entries.take_back(chunk.num_taken_back)
        if chunk.num_chars_taken_back:
            self._text.take_back(chunk.num_chars_taken_back)
        self._num_tokens += len(chunk.token_ids) - chunk.num_taken_back
        self._text.append(chunk.text)
        self._token_ids.extend(chunk.token_ids)
        wanted, lists = self._wanted, self._lists
        if wanted.logprobs:
            lists["output_token_logprobs"].extend(wanted.triples(chunk.logprobs, chunk.token_ids))
        if wanted.top:
            lists["output_top_logprobs"].extend(wanted.ranked(chunk.top_logprobs))
        if wanted.listed:
            lists["output_token_ids_logprobs"].extend(wanted.ranked(chunk.listed_logprobs))

    def cost(self, chunks: list[StreamChunk]) -> int:
        """Return what `event` will cost."""
        has_texts = self._wanted.text_of is not None
        num_bytes = len(self._text) + len(self._token_ids) + sum(map(len, self._lists.values()))
        return sum(chunk_cost(chunk, has_texts=has_texts) for chunk in chunks) + copy_cost(num_bytes)

    def event(self, chunks: list[StreamChunk], received: float) -> bytes:
        """Add the output of further steps and make an event of the whole output so far."""
        for chunk in chunks:
            self.add(chunk)
        meta = dumps(stream_meta(chunks[-1], self._num_tokens, received))
        pieces: list[Piece] = [b'data: {"text":', *self._text.pieces, b',"output_ids":', *self._token_ids.pieces]
        pieces.append(f',"meta_info":{meta[:-1]}'.encode())
        for name, entries in self._lists.items():
            pieces += [f',"{name}":'.encode(), *entries.pieces]
        if self._wanted.logprobs:
            pieces.append(f',"output_token_logprobs_length":{self._num_tokens}'.encode())
        return b"".join([*pieces, f"}}{self._index}}}\n\n".encode()])


def refuse_ignored(completion: Completion) -> None:
    """Refuse a completion whose prompt can never run. Raises HttpError 400."""
    reason = completion.finish_reason
    if reason is not None and reason.type == "ignored":
        raise HttpError(400, f"the prompt cannot be run: {reason.message}")


def by_sequence(subscription: Subscription, chunks: list[StreamChunk]) -> dict[int, list[StreamChunk]]:
    """Return the chunks of each sequence."""
    found: dict[int, list[StreamChunk]] = {}
    for chunk in chunks:
        found.setdefault(subscription.index_of[chunk.id], []).append(chunk)
    return found


def error_event(error: Exception) -> bytes:
    """Make the last event of a stream that failed, with the error."""
    answer = as_http_error(error)
    kind = "invalid_request_error" if answer.status < 500 else "server_error"
    return event(dumps({"error": {"message": answer.message, "type": kind, "code": answer.status, "retryable": False}}))
