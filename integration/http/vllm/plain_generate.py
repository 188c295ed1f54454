"""POST | PUT /generate, of which there are two: SGLang's, and where the body has a `prompt` the plain one of vLLM.

The plain call has the sampling parameters beside the prompt, and answers with lists that have an entry for each sample:
texts, finish reasons, token ids and, at each token, log-probabilities by id, the token's own first. Atropos' servers of
kind `vllm` have it, which are vLLM's simple API server with log-probabilities.
"""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ....rollout.completion import Completion
from ....rollout.engine import Engine
from ..edge.bodies import describe, read_as
from ..edge.errors import BadField
from ..edge.session_paths import FIELD, with_session
from ..generation.body import GenerateBody, GenerateRequest, has_stop_regex
from ..generation.generate import answer_generate, generate_reader
from ..generation.going_on import Moving, MovingBody, read_moving
from ..generation.limits import RequestLimits
from ..generation.subscriptions import hub_of
from ..observe.model_info import served_name
from .body import InferenceRequest, read_inference
from .generate import InferenceReply, ending, finite

router = APIRouter()

_MAX_TOKENS = 16  # vLLM's default


@router.put("/generate", openapi_extra=describe(GenerateBody), operation_id="generate_put")
@router.post("/generate", openapi_extra=describe(GenerateBody), operation_id="generate_post")
async def generate(request: Request) -> Response:
    """Complete one prompt or several. An aborted request is answered too, with its output so far. Where the body has a
    `prompt`, {"prompt_token_ids": [...]} beside vLLM's sampling parameters, it is vLLM's plain call."""
    received = time.monotonic()
    hub = hub_of(request.app)
    hub.refuse_if_draining()
    name, read_other = served_name(request.app.state.service, request.app.state.config), generate_reader(hub)

    def read(values: dict[str, object]) -> tuple[GenerateRequest | InferenceRequest, Moving]:
        values = with_session(request.scope, values)
        if "prompt" in values:
            if values.get(FIELD):
                raise BadField("prompt", "is of no session: send input_ids or a text")
            return read_plain(values, hub.engine, name, hub.limits), read_moving(values)
        return read_other(values)

    ask, moving = await read_as(request, read, is_slow=has_stop_regex, ends_with_client=True)
    if isinstance(ask, GenerateRequest):
        return await answer_generate(request, ask, moving, received)
    return await hub.answer(request, PlainReply(ask, hub.engine, moving))


def read_plain(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> InferenceRequest:
    """Read and check the fields of vLLM's plain call. Raises BadField."""
    prompt = values["prompt"]
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if ids is None:
        raise BadField(
            "prompt", 'must be {"prompt_token_ids": [...]}; texts are taken by /v1/completions, or as `text`'
        )
    if values.get("stream"):
        raise BadField("stream", "is not supported beside `prompt`: /v1/completions streams")
    moving = {name: values[name] for name in MovingBody.model_fields if name in values}
    params = {name: value for name, value in values.items() if name not in {"prompt", "stream", *moving}}
    params.setdefault("max_tokens", _MAX_TOKENS)
    body = {**moving, "token_ids": ids, "sampling_params": params}
    ask = read_inference(body, engine, model, limits)
    return replace(ask, has_text=engine.tokenizer is not None and params.get("detokenize") is not False)


class PlainReply(InferenceReply):
    """The answer to one plain request, see `Reply`."""

    def whole(self, completions: list[Completion]) -> object:
        """See `Reply.whole`."""
        completions = self.joined(completions)
        ask, [first, *_] = self.request, completions
        answer: dict[str, object] = {
            "text": [completion.text for completion in completions] if ask.has_text else None,
            "prompt": None,
            "finish_reasons": [ending(completion)["finish_reason"] for completion in completions],
            "prompt_token_ids": first.prompt_ids,
            "token_ids": [completion.token_ids for completion in completions],
            "weight_versions": [self.versions(completion) for completion in completions],
        }
        if any(messages := [ending(completion).get("finish_message") for completion in completions]):
            answer["finish_messages"] = messages
        if ask.num_top is not None:
            answer["logprobs"] = [[[at] for at in self._by_id(completion)] for completion in completions]
        if (scored := self.scored(first)) is not None:
            answer["prompt_logprobs"] = [
                None if at is None else {id: entry["logprob"] for id, entry in at.items()} for at in scored
            ]
        return answer

    def _by_id(self, completion: Completion) -> list[dict[str, float]]:
        """List the log-probabilities of each output token by id: its own, and the likeliest ones."""
        top = completion.top_logprobs or ((),) * len(completion.token_ids)
        own = zip(completion.token_ids, completion.logprobs, top, strict=True)
        return [
            {str(id): finite(logprob)}
            | {str(other): finite(its) for its, other in likeliest[: self.request.num_top] if other != id}
            for id, logprob, likeliest in own
        ]
