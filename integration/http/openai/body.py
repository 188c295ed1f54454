"""The fields of OpenAI's two calls, and SGLang's extras, read from a JSON object."""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from pydantic import Field

from ....rollout.engine import Engine
from ....rollout.request_options import RequestOptions
from ....rollout.sampling_params import SamplingParams
from ..edge.bodies import Body, fields_of
from ..edge.errors import BadField
from ..generation.admission import Size
from ..generation.body import REFUSED as REFUSED_BY_GENERATE
from ..generation.body import drafts_of, namespace, refuse_other_adapters, refuse_unsupported, text_of_token
from ..generation.limits import RequestLimits
from ..generation.meta import Wanted
from ..generation.subscriptions import Asked
from .content import read_message, read_prediction

DEFAULT_MAX_TOKENS = 16  # of a completion; the default of a chat is the rest of the context
REFUSED = (
    *REFUSED_BY_GENERATE, "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "use_beam_search", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
)  # fmt: skip
REFUSED_BY_COMPLETIONS = ("suffix",)
REFUSED_BY_CHAT = (
    "tools", "functions", "function_call", "audio", "web_search_options", "verbosity", "chat_template",
)  # fmt: skip


class StreamOptions(Body):
    """Settings of a streamed answer."""

    include_usage: bool = False


class CommonBody(Body):
    """Fields of both calls. Names are OpenAI's; the names from top_k on are SGLang's."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    custom_params: dict[str, Any] | None = None
    response_format: Any = None
    regex: str | None = None
    ebnf: str | None = None
    jump_forward: str | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    draft_token_ids: list[Any] | None = Field(None, description="see POST /generate")
    speculation: bool = True
    stream_when_final: bool = Field(
        False, description="nothing is streamed before the answer's end, so that a weight commit may draw it again"
    )


class CompletionBody(CommonBody):
    """Fields of POST /v1/completions."""

    prompt: str | list[Any] = Field(description="a text, texts, token ids, or lists of token ids")
    logprobs: int | None = Field(None, ge=0, description="alternatives at each token")
    echo: bool = False
    best_of: int | None = None


class ChatBody(CommonBody):
    """Fields of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = Field(None, description="instead of messages and the chat template")
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    tool_choice: Any = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    prediction: dict[str, Any] | None = Field(
        None, description="an answer that may come again: draft_token_ids, as text"
    )


@dataclass(frozen=True)
class OpenAIRequest:
    """A checked request."""

    id: str
    model: str
    created: int
    is_chat: bool
    n: int
    stream: bool
    include_usage: bool
    wanted: Wanted
    num_top: int
    echo: bool
    prompts: list[Any]  # texts or token ids; empty for a chat, whose prompt `asked` makes
    return_token_ids: bool
    return_prompt_token_ids: bool
    return_meta_info: bool
    decode: Callable[[Sequence[int]], str]
    has_prediction: bool
    size: Size
    asked: Callable[[], Asked]  # tokenises, which may take long; raises BadField


def read_completion(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> OpenAIRequest:
    """Read and check the fields of a completion. Raises BadField."""
    refuse_unsupported(values, (*REFUSED, *REFUSED_BY_COMPLETIONS))
    _check_sizes(values, limits)
    body = fields_of(CompletionBody, values)
    _check_model(body.model, values, engine, model)
    if body.best_of not in (None, body.n):
        raise BadField("best_of", "is not supported, but where it equals n")
    prompts = _prompts(body.prompt)
    limits.prompts(len(prompts), "prompt")
    limits.lengths(prompts, "prompt")
    limits.top(body.logprobs or 0, "logprobs")
    has_logprobs = body.logprobs is not None
    if body.echo and has_logprobs and body.stream:
        raise BadField("echo", "with logprobs cannot be streamed")
    params = _params(body, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    limits.sequences(len(prompts) * body.n)
    start = 0 if body.echo and has_logprobs else -1
    drafts = drafts_of(body.draft_token_ids, len(prompts), len(prompts) > 1, limits)
    key = namespace(body.extra_key, body.cache_salt)
    options = [
        RequestOptions(start, body.logprobs or 0, (), key, draft, body.speculation, **_streaming(body))
        for draft in drafts
    ]
    id = body.rid or f"cmpl-{uuid.uuid4().hex}"
    rids = [id] if len(prompts) == 1 else [f"{id}_{index}" for index in range(len(prompts))]

    def asked() -> Asked:
        count = len(prompts)
        token_ids = limits.tokenising.token_ids(prompts, "prompt", [params] * count)
        limits.entries(token_ids, [params] * count, options, "logprobs")
        return Asked(token_ids, [params] * count, options, rids)

    return _request(
        body, id, model, asked, engine, is_chat=False, logprobs=has_logprobs, num_top=body.logprobs or 0,
        echo=body.echo, prompts=prompts, start=start, size=Size.of(prompts, [body.n] * len(prompts), drafts),
    )  # fmt: skip


def read_chat(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> OpenAIRequest:
    """Read and check the fields of a chat completion. Raises BadField."""
    refuse_unsupported(values, (*REFUSED, *REFUSED_BY_CHAT))
    _check_sizes(values, limits)
    body = fields_of(ChatBody, values)
    _check_model(body.model, values, engine, model)
    if body.tool_choice not in (None, "none", "auto"):
        raise BadField("tool_choice", "is not supported")
    if body.modalities not in (None, ["text"]):
        raise BadField("modalities", "only text is supported")
    if body.top_logprobs and not body.logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true")
    if (body.messages is None) == (body.input_ids is None):
        raise BadField("messages", "exactly one of messages and input_ids is needed")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _params(body, max_tokens if max_tokens is not None else engine.max_model_len)
    limits.sequences(body.n)
    limits.top(body.top_logprobs, "top_logprobs")
    predicted = read_prediction(body.prediction)
    limits.characters(len(predicted or ""), "prediction")
    if predicted and (body.draft_token_ids is not None or engine.tokenizer is None):
        raise BadField("prediction", "is a text, and there is no tokenizer, or draft_token_ids are given too")
    [draft] = drafts_of(body.draft_token_ids, 1, False, limits)
    key = namespace(body.extra_key, body.cache_salt)
    options = RequestOptions(-1, body.top_logprobs, (), key, draft, body.speculation, **_streaming(body))
    messages = None if body.messages is None else [read_message(message) for message in body.messages]
    contents = [content for message in messages or [] if isinstance(content := message.get("content"), str)]
    limits.characters(sum(map(len, contents)), "messages")
    limits.lengths([body.input_ids or []], "input_ids")
    id = body.rid or f"chatcmpl-{uuid.uuid4().hex}"

    def asked() -> Asked:
        if body.input_ids is not None:
            [token_ids] = limits.tokenising.token_ids([body.input_ids], "input_ids", [params])
        else:
            assert messages is not None  # one of the two is given: checked above
            text = apply_template(engine, messages, body)
            limits.characters(len(text), "messages")
            token_ids = limits.tokenising.conversation(text, "messages", params)
        room = max(engine.max_model_len - len(token_ids), 1)
        its_params = params if max_tokens is not None else replace(params, max_new_tokens=room)
        its_options = options
        if predicted:
            its_options = replace(options, draft_token_ids=tuple(limits.tokenising.draft(predicted, "prediction")))
        limits.entries([token_ids], [its_params], [its_options], "top_logprobs")
        return Asked([token_ids], [its_params], [its_options], [id])

    return _request(
        body, id, model, asked, engine, is_chat=True, logprobs=body.logprobs, num_top=body.top_logprobs, echo=False,
        prompts=[], start=-1,
        size=Size.of([body.input_ids or "".join(contents)], [body.n], [predicted or draft]),
    )  # fmt: skip


def apply_template(engine: Engine, messages: list[dict[str, Any]], body: ChatBody) -> str:
    """Convert a conversation to text by the tokenizer's chat template. Raises BadField."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise BadField("messages", "this model has no chat template: send input_ids")
    extra = dict(body.chat_template_kwargs or {})
    if reserved := sorted(set(extra) & set(inspect.signature(tokenizer.apply_chat_template).parameters)):
        raise BadField("chat_template_kwargs", f"must not set {', '.join(reserved)}")
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    asks_for_answer = body.add_generation_prompt
    if asks_for_answer is None:
        asks_for_answer = not body.continue_final_message
    try:
        text: Any = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=asks_for_answer,
            continue_final_message=body.continue_final_message,
            tokenize=False,
            **extra,
        )
    # A template may fail in any of these ways on a message that its author did not expect.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise BadField("messages", f"the chat template refuses them: {error}") from None
    return str(text)


def format_settings(given: object) -> dict[str, object]:
    """Translate a response_format to sampling parameters. Raises BadField."""
    if given is None:
        return {}
    fields: Mapping[str, object] = given if isinstance(given, Mapping) else {}
    kind = fields.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object", "additionalProperties": True}}
    if kind == "json_schema":
        described = fields.get("json_schema")
        if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
            raise BadField("response_format", "needs json_schema.schema, an object")
        return {"json_schema": described["schema"]}
    if kind == "structural_tag":
        return {"structural_tag": given}
    raise BadField("response_format", 'needs the type "text", "json_object", "json_schema" or "structural_tag"')


def _request(
    body: CommonBody,
    id: str,
    model: str,
    asked: Callable[[], Asked],
    engine: Engine,
    *,
    is_chat: bool,
    logprobs: bool,
    num_top: int,
    echo: bool,
    prompts: list[Any],
    start: int,
    size: Size,
) -> OpenAIRequest:
    return OpenAIRequest(
        id=id,
        model=body.model or model,
        created=int(time.time()),
        is_chat=is_chat,
        n=body.n,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        wanted=Wanted(logprobs, start, num_top > 0, False, text_of_token(engine)),
        num_top=num_top,
        echo=echo,
        prompts=prompts,
        return_token_ids=body.return_token_ids,
        return_prompt_token_ids=body.return_prompt_token_ids,
        return_meta_info=body.return_meta_info,
        has_prediction=getattr(body, "prediction", None) is not None,
        decode=_decoder(engine, body.skip_special_tokens),
        size=size,
        asked=asked,
    )


def _decoder(engine: Engine, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    if engine.tokenizer is None:
        return lambda ids: ""
    decode: Callable[..., Any] = engine.tokenizer.decode  # typed as a list of texts, too, which it is for batches only
    return lambda ids: decode(list(ids), skip_special_tokens=skip_special_tokens)


def _params(body: CommonBody, max_new_tokens: int) -> SamplingParams:
    names = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
    same = (
        "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
        "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "skip_special_tokens",
        "custom_params", "regex", "ebnf", "jump_forward",
    )  # fmt: skip
    given = {name: getattr(body, name) for name in same} | {ours: getattr(body, name) for name, ours in names.items()}
    given["max_new_tokens"] = max_new_tokens
    given |= format_settings(body.response_format)
    if body.stream and (body.return_token_ids or getattr(body, "logprobs", None) not in (None, False)):
        # A jump by text may replace tokens, but chunks can only add tokens.
        if given["jump_forward"] == "text":
            raise BadField("jump_forward", '"text" cannot be streamed with logprobs or token ids')
        given["jump_forward"] = given["jump_forward"] or "exact"
    try:
        return SamplingParams.from_dict(given)
    except ValueError as error:
        message = str(error).removeprefix("sampling parameters: ")
        for name, ours in (*names.items(), ("max_tokens", "max_new_tokens")):
            message = message.replace(ours, name)
        raise BadField(message.split()[0], message.partition(" ")[2]) from None


def _check_model(name: str | None, values: Mapping[str, object], engine: Engine, base: str) -> None:
    """Refuse other adapters than the loaded one, and the base by its own name while an adapter answers every request.
    Raises BadField."""
    refuse_other_adapters(values, engine)
    loaded = engine.model.adapter_name
    if name is not None and loaded is not None and name == base:
        why = f"names the base, but the adapter {loaded!r} is loaded and answers every request"
        raise BadField("model", f"{why}: ask for {loaded!r}, or unload it")
    if name is not None and name.startswith(f"{base}:") and name != f"{base}:{loaded}":
        raise BadField("model", f"names an adapter that is not loaded: {name.removeprefix(f'{base}:')!r}")


def _check_sizes(values: Mapping[str, object], limits: RequestLimits) -> None:
    """Check the sizes of fields that are no prompts, before any is walked. Raises BadField."""
    limits.lists(values, ())
    limits.given_params({name: value for name, value in values.items() if name not in ("prompt", "input_ids")})


def _prompts(given: str | list[Any]) -> list[Any]:
    """Return the prompts as a list of texts or of lists of token ids. Raises BadField."""
    if not given:
        raise BadField("prompt", "must not be empty")
    if isinstance(given, str) or all(isinstance(entry, int) and not isinstance(entry, bool) for entry in given):
        return [given]
    if all(isinstance(entry, str) for entry in given) or all(isinstance(entry, list) for entry in given):
        return given
    raise BadField("prompt", "must be a text, a list of texts, token ids, or a list of lists of token ids")


def _streaming(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the options that follow from a stream, of which a client of OpenAI's API takes nothing back."""
    return {"stream_when_final": body.stream_when_final, "takes_back": not body.stream or body.stream_when_final}
