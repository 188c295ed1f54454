"""POST /inference/v1/generate: vLLM's call with token ids in and token ids out, and its abort."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion, FinishReason, ListedLogprobs, StreamChunk, TopLogprobs
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped
from ..edge.bodies import Body, describe, fields_of, read_as
from ..edge.early_aborts import note_abort
from ..edge.errors import HttpError, as_http_error, error_body
from ..generation.admission import Size
from ..generation.asked import Asked
from ..generation.body import has_stop_regex, text_of_token
from ..generation.encoding import chunk_cost, completion_cost
from ..generation.generate import refuse_ignored
from ..generation.going_on import Moving, read_moving
from ..generation.meta import cause
from ..generation.seam import Seam
from ..generation.sse import DONE, dumps, event, event_of
from ..generation.subscriptions import Subscription, hub_of
from ..images.intake import ProcessedPrompt
from ..observe.model_info import refuse_unknown_model, served_name
from ..openai.vllm_fields import prompt_logprobs, token_name
from .body import InferenceBody, InferenceRequest, read_inference, with_prefix

router = APIRouter()

_LEAST = -9999.0  # JSON has no infinity
Entry = dict[str, object]
HEAD = ("id", "created")  # of a request: all events of a stream repeat them


@router.post("/inference/v1/generate", openapi_extra=describe(InferenceBody))
async def inference_generate(request: Request) -> Response:
    """Continue token ids, as vLLM's call does. Every answer says which weights drew which of its tokens."""
    hub = hub_of(request.app)
    hub.refuse_if_draining()
    name = served_name(request.app.state.service, request.app.state.config)

    def read(values: dict[str, object]) -> tuple[InferenceRequest, Moving]:
        refuse_unknown_model(request.app, values.get("model"))
        return read_inference(values, hub.engine, name, hub.limits), read_moving(values)

    ask, moving = await read_as(request, read, is_slow=has_stop_regex, ends_with_client=True)
    return await hub.answer(request, InferenceReply(replace(ask, **moving.head_of(HEAD)), hub.engine, moving))


class AbortBody(Body):
    """Fields of POST /inference/v1/abort_requests."""

    request_ids: list[str]


@router.post("/inference/v1/abort_requests", openapi_extra=describe(AbortBody), response_class=Response)
async def abort_requests(request: Request) -> Response:
    """Abort requests by the ids that their clients gave them, or by those of their answers. They are answered with
    what they have; ids that are not live are ignored."""
    body = await read_as(request, lambda values: fields_of(AbortBody, values))
    engine, reason = hub_of(request.app).engine, FinishReason("abort", message="aborted by abort_requests")
    for id in body.request_ids:
        note_abort(request.app, with_prefix(id), reason)

    def abort(_: float | None) -> None:
        for id in body.request_ids:
            engine.abort_request(with_prefix(id), finished_reason=reason)

    await request.app.state.operations.run("abort_requests", abort)
    return Response()


@dataclass(frozen=True)
class InferenceReply:
    """The answer to one request, see `Reply`."""

    request: InferenceRequest
    engine: Engine
    moving: Moving
    prompts: list[Sequence[int]] = field(default_factory=list)  # the one prompt, filled by `asked`

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
        asked = self.request.asked()
        self.prompts[:] = asked.prompts
        return self.moving.asked(asked, self.engine)

    def cost(self, completions: Sequence[Completion]) -> int:
        """See `Reply.cost`."""
        has_texts = self.request.has_text or self.request.num_prompt_top is not None
        return sum(completion_cost(completion, has_texts=has_texts) for completion in completions)

    def whole(self, completions: list[Completion]) -> object:
        """See `Reply.whole`."""
        completions = self.joined(completions)
        ask, [first, *_] = self.request, completions
        listed = first.prompt_listed_logprobs if ask.has_listed and ask.num_prompt_top is not None else None
        return {
            **self._head(),
            "usage": _usage(completions),
            "choices": [self._choice(completion) for completion in completions],
            "prompt_logprobs": self.scored(first),
            "prompt_token_ids": first.prompt_ids if ask.return_token_ids else None,
            "prompt_token_id_logprobs": None if listed is None else [
                at and {str(id): finite(logprob) for logprob, id in at} for at in listed
            ],
            "mm_placeholders": self._places(),
            **dict.fromkeys(("metrics", "kv_transfer_params", "ec_transfer_params")),
        }  # fmt: skip

    def joined(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return completions with the parts that other workers had drawn. Raises where the engine has ignored one."""
        for completion in completions:
            refuse_ignored(completion)
        return list(map(Seam(self.moving, self.engine).completion, count(), completions))

    def scored(self, first: Completion) -> list[dict[str, Entry] | None] | None:
        """List the log-probabilities of the prompt; None where they were not asked for."""
        num_top = self.request.num_prompt_top
        return None if num_top is None else prompt_logprobs(first, num_top, self._text_of)

    @staticmethod
    def versions(c: Completion) -> list[Entry]:
        """List the weights' versions that drew the tokens of a completion."""
        return [{"version": span.version, "start": span.start, "end": span.end} for span in c.weight_versions]

    async def events(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """Make the events: each has only what is new. The first has the prompt where it is asked for, the last of each
        choice says which weights drew its tokens."""
        ask, answers = self.request, dict[int, Completion]()
        head = self._head()
        seam = Seam(self.moving, self.engine, {name: getattr(ask, name) for name in HEAD})
        first: Entry = {}
        if ask.return_token_ids and not seam.has_events:
            places = self._places()
            first = {"prompt_token_ids": self.prompts[0], **({} if places is None else {"mm_placeholders": places})}
        num_prompt, num_new = len(self.prompts[0]), [0] * len(subscription.index_of)

        def chunk_event(chunk: StreamChunk, index: int, more: Entry) -> bytes:
            return event_of({**head, "choices": [self._delta(chunk, index)], **more})

        try:
            while subscription.num_open:
                for given in await subscription.take():
                    index = subscription.index_of[given.id]
                    known, fresh = seam.parts(index, [given])
                    for chunk in (*known, *fresh):
                        if chunk.completion is not None:
                            refuse_ignored(chunk.completion)
                            answers[index] = chunk.completion
                    num_new[index] += sum(len(chunk.token_ids) - chunk.num_taken_back for chunk in known)
                    for chunk in fresh:
                        num_new[index] += len(chunk.token_ids) - chunk.num_taken_back
                        counts: Entry = {"usage": _counts(num_prompt, num_new[index])} if ask.continuous_usage else {}
                        cost = chunk_cost(chunk, has_texts=ask.has_text)
                        make = partial(chunk_event, chunk, index, first | counts)
                        yield seam.notes(index, [chunk]) + await subscription.encode(make, cost)
                        first = {}
        except (HttpError, EngineStopped) as error:
            yield event(dumps(error_body(as_http_error(error), openai=True)))
        else:
            if ask.include_usage and not seam.has_usage:
                in_order = [answers[index] for index in range(len(answers))]
                yield seam.usage_note() + event_of({**head, "choices": [], "usage": _usage(in_order)})
        yield DONE

    def _places(self) -> Entry | None:
        """Return the tokens of each image of the prompt; None: it has none."""
        [prompt] = self.prompts
        if not isinstance(prompt, ProcessedPrompt):
            return None
        return {"image": [{"offset": begin, "length": end - begin} for begin, end in prompt.made.ranges]}

    def _head(self) -> Entry:
        ask = self.request
        mode = "text" if ask.has_text else "tokens"
        return {"request_id": ask.id, "model": ask.model, "created": ask.created, "output_mode": mode}

    def _choice(self, c: Completion) -> Entry:
        found: Entry = {
            "index": c.index,
            **ending(c),
            "token_ids": c.token_ids,
            "logprobs": self._logprobs(c.token_ids, c.logprobs, c.top_logprobs, c.listed_logprobs),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": self.versions(c),
        }
        found |= _receipt(c)
        return found | {"text": c.text} if self.request.has_text else found

    def _delta(self, chunk: StreamChunk, index: int) -> Entry:
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, chunk.listed_logprobs)
        found: Entry = {"index": index, "token_ids": chunk.token_ids, "logprobs": logprobs, **ending(chunk.completion)}
        if self.request.has_text:
            found["text"] = chunk.text
        if chunk.completion is not None:
            found["weight_versions"] = self.versions(chunk.completion)
            found |= _receipt(chunk.completion)
        return found

    def _logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[TopLogprobs] | None,
        listed: Sequence[ListedLogprobs] | None,
    ) -> Entry | None:
        """List the log-probabilities of output tokens; None: they were not asked for. A token that is not among the
        likeliest has no rank: it was not counted."""
        num_top = self.request.num_top
        if num_top is None:
            return None
        content = []
        for at, (id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            ranked = [(other, its_own, rank) for rank, (its_own, other) in enumerate(top[at] if top else (), 1)]
            rank = next((rank for other, _, rank in ranked if other == id), None)
            others = [(other, its_own, None) for its_own, other in (listed[at] if listed else ())]
            alternatives = [self._entry(*one) for one in (*ranked[:num_top], *others)]
            content.append({**self._entry(id, logprob, rank), "top_logprobs": alternatives})
        return {"content": content}

    def _entry(self, id: int, logprob: float, rank: int | None) -> Entry:
        # Without a text the token's name is its id, as OpenAI's calls have it with return_tokens_as_token_ids:
        # `renderers`, the client of verifiers and prime-rl, compares it.
        name = self._text_of(id) if self.request.has_text else token_name(id)
        return {"token_id": id, "token": name, "logprob": finite(logprob), "rank": rank}

    @property
    def _text_of(self) -> Callable[[int], str]:
        return text_of_token(self.engine) or (lambda token_id: "")


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can have."""
    return logprob if math.isfinite(logprob) else _LEAST


def ending(c: Completion | None) -> Entry:
    """Return why a completion has ended, in vLLM's words; None for one that has not."""
    reason = None if c is None else c.finish_reason
    return {
        "finish_reason": None if reason is None else reason.type,
        "stop_reason": None if reason is None else reason.matched,
        **cause(reason),
    }


def _receipt(c: Completion) -> Entry:
    return {} if c.receipt is None else {"receipt": c.receipt}


def _usage(completions: Sequence[Completion]) -> Entry:
    return _counts(len(completions[0].prompt_ids), sum(len(c.token_ids) for c in completions))


def _counts(num_prompt: int, num_new: int) -> Entry:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
