"""POST /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StrictInt

from ....rollout.engine import Engine
from ....rollout.giving_way import give_way
from ..admin.common import json_response
from ..edge.bodies import Body, describe, fields_of, read_as
from ..edge.errors import BadField
from ..generation.answers import Answer
from ..generation.body import refuse_unsupported
from ..generation.encoding import encode
from ..generation.limits import RequestLimits
from ..generation.subscriptions import hub_of
from ..observe.model_info import refuse_unknown_model
from ..openai.chat_prompt import ChatPrompt, prompt_of, prompt_tokens

_SLICE = 1024  # tokens that are named between two looks at what else waits
_IDS_PER_COST, _COST_WITH_STRINGS = 16, 4  # of an answer, see `Encoder.run`

router = APIRouter()


class TokenizeBody(Body):
    """Fields of POST /tokenize: a text, or a conversation, to which the chat template adds its tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = Field(None, description="shown to the model by the chat template")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Fields of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[StrictInt, Field(ge=0)]]
    skip_special_tokens: bool = Field(False, description="leave them out, as SGLang's client asks for")


@router.post("/tokenize", openapi_extra=describe(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Convert a text or a conversation to token ids."""
    hub = hub_of(request.app)

    def read(values: dict[str, object]) -> tuple[TokenizeBody, list[int] | ChatPrompt, list[str] | None]:
        refuse_unknown_model(request.app, values.get("model"), or_root=True)
        refuse_unsupported(values, ("chat_template",))
        hub.limits.long_lists(values, "prompt")
        body = fields_of(TokenizeBody, values)
        ids = _token_ids(body, values, hub.engine, hub.limits)
        if isinstance(ids, ChatPrompt) or not body.return_token_strs:
            return body, ids, None
        return body, ids, _strings(ids, hub.engine)

    # On a thread, also where the body is short: a template may take long.
    body, prompt, strings = await read_as(request, read, is_slow=lambda values: True)
    ids = await prompt_tokens(hub, prompt)

    def make() -> bytes:
        shown = _strings(ids, hub.engine) if body.return_token_strs and strings is None else strings
        return encode(
            {"count": len(ids), "max_model_len": hub.engine.max_prompt_len, "tokens": ids, "token_strs": shown}
        )

    cost = len(ids) * (_COST_WITH_STRINGS if body.return_token_strs else 1) // _IDS_PER_COST
    return Answer(await hub.encoder.run(make, cost), on_end=lambda: None)


@router.post("/detokenize", openapi_extra=describe(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Convert token ids to their text: `prompt` as with vLLM, and the same `text` as with SGLang."""
    hub = hub_of(request.app)

    def read(values: dict[str, object]) -> dict[str, object]:
        refuse_unknown_model(request.app, values.get("model"), or_root=True)
        hub.limits.long_lists(values, "tokens")
        if isinstance(given := values.get("tokens"), list) and any(isinstance(entry, list) for entry in given):
            raise BadField("tokens", "must be one list of token ids: lists of lists are not supported")
        body = fields_of(DetokenizeBody, values)
        hub.limits.draft(body.tokens, "tokens")
        tokenizer = _tokenizer(hub.engine)
        if bad := [id for id in body.tokens if id >= hub.engine.model.vocab_size]:
            raise BadField("tokens", f"names {bad[:5]}, but the vocabulary ends at {hub.engine.model.vocab_size - 1}")
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return {"prompt": text, "text": text}

    return json_response(await read_as(request, read, is_slow=lambda values: True))


def _token_ids(
    body: TokenizeBody, values: dict[str, object], engine: Engine, limits: RequestLimits
) -> list[int] | ChatPrompt:
    """Return the token ids of a text or a conversation; one with images comes back as its prompt, which is slow to
    make. Raises BadField."""
    _tokenizer(engine)
    if (body.prompt is None) == (body.messages is None):
        raise BadField("prompt", "exactly one of prompt and messages is needed")
    if body.messages is not None:
        return prompt_of(values, engine, limits, adds_special=bool(body.add_special_tokens))
    assert body.prompt is not None
    limits.characters(len(body.prompt), "prompt")
    return limits.tokenising.whole(body.prompt, adds_special=body.add_special_tokens is not False)


def _strings(ids: list[int], engine: Engine) -> list[str]:
    """Return the tokens' names in the vocabulary, and give way meanwhile."""
    tokenizer, names = _tokenizer(engine), list[str]()
    for at in range(0, len(ids), _SLICE):
        give_way()
        names += tokenizer.convert_ids_to_tokens(ids[at : at + _SLICE])
    return names


def _tokenizer(engine: Engine) -> Any:
    if engine.tokenizer is None:
        raise BadField("model", "has no tokenizer")
    return engine.tokenizer
