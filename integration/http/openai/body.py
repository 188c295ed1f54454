"""The reading of OpenAI's two calls from JSON objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....rollout.engine import Engine
from ....rollout.grammars.token_text import bytes_of_token
from ....rollout.request_options import RequestOptions
from ....rollout.sampling_params import GRAMMARS, SamplingParams
from ..chat.content import Images, read_prediction
from ..chat.form import ChatForm, read_form
from ..chat.template import read_messages, with_effort
from ..conversations.next_turn import NextTurn
from ..conversations.params import SessionParams
from ..edge.bodies import fields_of
from ..edge.errors import BadField
from ..generation.admission import Size
from ..generation.asked import Asked
from ..generation.body import REFUSED as REFUSED_BY_GENERATE
from ..generation.body import (
    drafts_of,
    namespace,
    refuse_other_adapters,
    refuse_other_models,
    refuse_unsupported,
    text_of_token,
)
from ..generation.limits import RequestLimits
from ..generation.meta import Wanted
from .chat_prompt import ChatPrompt
from .fields import NAMES, ChatBody, CommonBody, CompletionBody, StreamOptions, named_params
from .sessions import read_chat_session, read_completion_session, with_one_name
from .vllm_fields import num_kept, num_prompt_top, refuse_vllm, shortened, structured_settings, token_name

DEFAULT_MAX_TOKENS = 16  # of a completion; the default of a chat is the rest of the context
REFUSED = (
    *REFUSED_BY_GENERATE, "image_data", "json_schema", "structural_tag", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "use_beam_search", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
    "return_spec_tokens_details",
)  # fmt: skip
REFUSED_BY_COMPLETIONS = ("suffix",)
REFUSED_BY_CHAT = (
    "functions", "function_call", "audio", "web_search_options", "verbosity", "chat_template",
)  # fmt: skip


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
    continuous_usage: bool  # in every chunk of a stream
    wanted: Wanted
    num_top: int
    echo: bool
    prompts: list[Any]  # texts or token ids; empty for a chat, whose prompt `asked` makes
    num_prompt_top: int | None  # alternatives at each token of the prompt; None: it is not scored
    return_token_ids: bool
    return_weight_versions: bool
    return_prompt_token_ids: bool
    return_meta_info: bool
    return_cached_details: bool
    decode: Callable[[Sequence[int]], str]
    own_text: Callable[[int], str] | None  # returns a token's text where its id is its name; None: it is the text
    bytes_of: Callable[[int], bytes | None]  # returns a token's bytes; only with log-probabilities
    form: ChatForm | None  # of a chat's answers
    begun: str | None  # the beginning of the answer that a chat's prompt has already
    has_prediction: bool
    size: Size
    asked: Callable[..., Asked]  # (turn=None): tokenises, which may take long; raises BadField. turn: of a session
    session: SessionParams | None = None
    extra_key: str = ""


def read_completion(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> OpenAIRequest:
    """Read and check the fields of a completion. Raises BadField."""
    refuse_unsupported(values, (*REFUSED, *REFUSED_BY_COMPLETIONS))
    refuse_vllm(values, is_chat=False)
    _check_sizes(values, limits)
    values = shortened(values, "prompt", engine.max_prompt_len)
    limits.long_lists(values, "prompt", ("draft_token_ids",))
    body = fields_of(CompletionBody, values)
    refuse_other_adapters(values, engine)
    refuse_other_models(body.model, engine, model)
    if body.best_of not in (None, body.n):
        raise BadField("best_of", "is not supported, but where it equals n")
    params = _params(body, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    kept = num_kept(body.truncate_prompt_tokens, limits.tokenising.room(params))
    prompts = _prompts(body.prompt)
    limits.prompts(len(prompts), "prompt")
    if kept is not None:
        prompts = [prompt if isinstance(prompt, str) else prompt[-kept:] for prompt in prompts]
    limits.lengths(prompts, "prompt")
    limits.top(body.logprobs or 0, "logprobs")
    has_logprobs = body.logprobs is not None
    if body.echo and has_logprobs and body.stream:
        raise BadField("echo", "with logprobs cannot be streamed")
    limits.sequences(len(prompts) * body.n)
    num_top = _num_prompt_top(body, engine, limits)
    start = 0 if (body.echo and has_logprobs) or num_top is not None else -1
    drafts = drafts_of(body.draft_token_ids, len(prompts), len(prompts) > 1, limits)
    key = namespace(body.extra_key, body.cache_salt)
    id = body.rid or f"cmpl-{body.request_id or uuid.uuid4().hex}"
    options = [
        RequestOptions(
            start,
            max(body.logprobs or 0, num_top or 0),
            (),
            key,
            draft,
            body.speculation,
            **_delivery(body),
            max_kept_ids=_max_kept_ids(body, params, limits),
            prompt_temperature=1.0,  # as vLLM's, which does not scale them
            base_id=id if len(prompts) > 1 else "",  # an abort by the answer's id is of all prompts
        )
        for draft in drafts
    ]
    rids = [id] if len(prompts) == 1 else [f"{id}_{index}" for index in range(len(prompts))]
    session = read_completion_session(body, len(prompts), kept)

    def asked(turn: NextTurn | None = None) -> Asked:
        count = len(prompts)
        if turn is not None and turn.has_pictures:
            raise BadField("session_params", "has a history with images, which completions do not go on from")
        token_ids = limits.tokenising.token_ids(prompts, "prompt", [params] * count, kept, turn)
        limits.entries(token_ids, [params] * count, options, "logprobs")
        return Asked(token_ids, [params] * count, options, rids, grammar_field=_grammar_field(body))

    return _request(
        body, id, model, asked, engine, is_chat=False, logprobs=has_logprobs, num_top=body.logprobs or 0,
        echo=body.echo, prompts=[None] * len(prompts) if kept is not None else prompts, start=start,
        num_prompt_top=num_top, size=Size.of(prompts, [body.n] * len(prompts), drafts), session=session, extra_key=key,
    )  # fmt: skip


def read_chat(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> OpenAIRequest:
    """Read and check the fields of a chat completion. Raises BadField."""
    body = _chat_body(values, engine, model, limits)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _params(body, max_tokens if max_tokens is not None else engine.max_model_len)
    limits.sequences(body.n)
    limits.top(body.top_logprobs, "top_logprobs")
    predicted = _predicted(body, engine, limits)
    [draft] = drafts_of(body.draft_token_ids, 1, False, limits)
    key, num_top = namespace(body.extra_key, body.cache_salt), _num_prompt_top(body, engine, limits)
    start = -1 if num_top is None else 0
    options = RequestOptions(
        start, max(body.top_logprobs, num_top or 0), (), key, draft, body.speculation,
        **_delivery(body), max_kept_ids=_max_kept_ids(body, params, limits), prompt_temperature=1.0,
    )  # fmt: skip
    kept = num_kept(body.truncate_prompt_tokens, limits.tokenising.room(params))
    input_ids = body.input_ids if body.input_ids is None or kept is None else body.input_ids[-kept:]
    images = Images(limits.images.one)
    messages = None if body.messages is None else read_messages(body.messages, limits, images)
    contents = [content for message in messages or [] if isinstance(content := message.get("content"), str)]
    limits.lengths([input_ids or []], "input_ids")
    form = read_form(body, engine.tokenizer, limits)
    shown = () if form.tools is None else form.tools.shown
    begun = contents[-1] if contents and body.continue_final_message else None
    id = body.rid or f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
    session = read_chat_session(body, kept)

    prompt = ChatPrompt(engine, limits, body, shown, messages, images.pictures, input_ids, kept)
    prompt.check()

    def asked(turn: NextTurn | None = None) -> Asked:
        token_ids = prompt.token_ids(params, turn)
        room = max(engine.max_model_len - len(token_ids), 1)
        its_params = params if max_tokens is not None else named_params(lambda: replace(params, max_new_tokens=room))
        beginning = form.beginning(token_ids, begun, turn.num_begun if turn else 0)
        has_begun = bool(begun or beginning.begun)
        its_params = form.params(its_params, beginning, _grammar_field(body), has_begun=has_begun)
        its_options = options
        if predicted:
            its_options = replace(options, draft_token_ids=tuple(limits.tokenising.draft(predicted, "prediction")))
        limits.entries([token_ids], [its_params], [its_options], "top_logprobs")
        field = "tools" if form.has_grammar else _grammar_field(body)
        return Asked([token_ids], [its_params], [its_options], [id], grammar_field=field)

    return _request(
        body, id, model, asked, engine, is_chat=True, logprobs=body.logprobs, num_top=body.top_logprobs, echo=False,
        prompts=[], start=start, num_prompt_top=num_top,
        size=Size.of([input_ids or "".join(contents)], [body.n], [predicted or draft]).with_images(images.pictures),
        form=form, begun=begun, session=session, extra_key=key,
    )  # fmt: skip


def _chat_body(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> ChatBody:
    """Return the fields of a chat completion, sizes first. Raises BadField."""
    refuse_unsupported(values, (*REFUSED, *REFUSED_BY_CHAT))
    refuse_vllm(values, is_chat=True)
    values = with_effort(with_one_name(values))
    _check_sizes(values, limits)
    values = shortened(values, "input_ids", engine.max_prompt_len)
    limits.long_lists(values, "input_ids", ("draft_token_ids",))
    body = fields_of(ChatBody, values)
    refuse_other_adapters(values, engine)
    refuse_other_models(body.model, engine, model)
    if body.modalities not in (None, ["text"]):
        raise BadField("modalities", "only text is supported")
    if body.top_logprobs and not body.logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true")
    if (body.messages is None) == (body.input_ids is None):
        raise BadField("messages", "exactly one of messages, input_ids and prompt_token_ids is needed")
    return body


def _predicted(body: ChatBody, engine: Engine, limits: RequestLimits) -> str | None:
    """Return the text of an answer that may come again. Raises BadField."""
    predicted = read_prediction(body.prediction)
    limits.characters(len(predicted or ""), "prediction")
    if predicted and (body.draft_token_ids is not None or engine.tokenizer is None):
        raise BadField("prediction", "is a text, and there is no tokenizer, or draft_token_ids are given too")
    return predicted


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
    asked: Callable[..., Asked],
    engine: Engine,
    *,
    is_chat: bool,
    logprobs: bool,
    num_top: int,
    echo: bool,
    prompts: list[Any],
    start: int,
    num_prompt_top: int | None,
    size: Size,
    form: ChatForm | None = None,
    begun: str | None = None,
    session: SessionParams | None = None,
    extra_key: str = "",
) -> OpenAIRequest:
    own_text = text_of_token(engine)
    text_of = token_name if body.return_tokens_as_token_ids else own_text
    streaming = body.stream_options or StreamOptions()
    return OpenAIRequest(
        id=id,
        model=body.model or engine.model.adapter_name or model,
        created=int(time.time()),
        is_chat=is_chat,
        n=body.n,
        stream=body.stream,
        include_usage=bool(streaming.include_usage),
        continuous_usage=streaming.has_continuous_usage,
        wanted=Wanted(logprobs, start, num_top > 0, False, text_of),
        num_prompt_top=num_prompt_top,
        num_top=num_top,
        echo=echo,
        prompts=prompts,
        return_token_ids=body.return_token_ids,
        return_weight_versions=body.return_weight_versions,
        return_prompt_token_ids=body.return_prompt_token_ids,
        return_meta_info=body.return_meta_info,
        return_cached_details=body.return_cached_tokens_details,
        has_prediction=getattr(body, "prediction", None) is not None,
        decode=_decoder(engine, body.skip_special_tokens),
        own_text=(own_text or (lambda _: "")) if body.return_tokens_as_token_ids else None,
        bytes_of=bytes_of_token(engine.tokenizer if logprobs else None),
        size=size,
        asked=asked,
        form=form,
        begun=begun,
        session=session,
        extra_key=extra_key,
    )


def _decoder(engine: Engine, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    if engine.tokenizer is None:
        return lambda ids: ""
    decode: Callable[..., Any] = engine.tokenizer.decode  # typed as a list of texts, too, which it is for batches only
    return lambda ids: decode(list(ids), skip_special_tokens=skip_special_tokens)


def _params(body: CommonBody, max_new_tokens: int) -> SamplingParams:
    same = (
        "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
        "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "skip_special_tokens",
        "custom_params", "regex", "ebnf", "jump_forward", "spaces_between_special_tokens",
    )  # fmt: skip
    given = {name: getattr(body, name) for name in same} | {ours: getattr(body, name) for name, ours in NAMES.items()}
    given["max_new_tokens"] = max_new_tokens
    given["no_stop_trim"] = body.no_stop_trim or body.include_stop_str_in_output
    for name, settings in (
        ("response_format", format_settings(body.response_format)),
        ("structured_outputs", structured_settings(body.structured_outputs)),
    ):
        if twice := [other for other in GRAMMARS if settings and given.get(other) is not None]:
            raise BadField(name, f"and {twice[0]}: only one grammar can constrain an output")
        given |= settings
    if body.stream and (body.return_token_ids or getattr(body, "logprobs", None) not in (None, False)):
        # A jump by text may replace tokens, but chunks can only add tokens.
        if given["jump_forward"] == "text":
            raise BadField("jump_forward", '"text" cannot be streamed with logprobs or token ids')
        given["jump_forward"] = given["jump_forward"] or "exact"
    return named_params(lambda: SamplingParams.from_dict(given))


def _grammar_field(body: CommonBody) -> str | None:
    """Return the field of a request that its grammar is made of; None: it has none."""
    if format_settings(body.response_format):
        return "response_format"
    if structured_settings(body.structured_outputs):
        return "structured_outputs"
    return next((name for name in ("regex", "ebnf") if getattr(body, name) is not None), None)


def _num_prompt_top(body: CommonBody, engine: Engine, limits: RequestLimits) -> int | None:
    """Return the alternatives at each token of the prompt; None: it is not scored. Raises BadField."""
    num_top = num_prompt_top(body.prompt_logprobs, engine.model.vocab_size)
    limits.top(num_top or 0, "prompt_logprobs")
    if num_top is not None and body.stream:
        raise BadField("prompt_logprobs", "cannot be streamed")
    return num_top


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


def _max_kept_ids(body: CommonBody, params: SamplingParams, limits: RequestLimits) -> int:
    """Return how many tokens that its filters keep an answer may report. Raises BadField."""
    num = limits.max_kept_ids(params)
    if num and not body.return_meta_info:
        raise BadField("custom_params", "return_top_p_token_ids needs return_meta_info, which has the token ids")
    return num


def _delivery(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the options that follow from a stream, of which a client of OpenAI's API takes nothing back."""
    takes_back = not body.stream or body.stream_when_final
    return {
        "stream_when_final": body.stream_when_final,
        "takes_back": takes_back,
        "return_receipt": body.return_receipt,
    }
