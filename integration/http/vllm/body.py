"""The fields of vLLM's token-in, token-out call, read from a JSON object."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from ....rollout.engine import Engine
from ....rollout.request_options import RequestOptions
from ....rollout.sampling_params import SamplingParams
from ..edge.bodies import ReceiptKind, fields_of
from ..edge.errors import BadField
from ..generation.admission import Size
from ..generation.asked import Asked
from ..generation.body import namespace, refuse_other_models
from ..generation.going_on import MovingBody
from ..generation.limits import RequestLimits
from ..openai.fields import StreamOptions
from ..openai.vllm_fields import num_prompt_top, refuse_values, structured_settings
from .features import FeaturesBody, SentImages, read_features, read_parts

# vLLM's sampling parameters (0.32) that are ours, too. The others are read by name below, refused, or change no token:
# output_kind, skip_clone, skip_reading_prefix_cache, output_text_buffer_length and routed_experts_prompt_start.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "stream_interval",
)  # fmt: skip
_RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens", "include_stop_str_in_output": "no_stop_trim"}
_REFUSED = ("allowed_token_ids", "bad_words", "logits_processors", "extra_args", "prompt_logprob_token_ids",
            "trace_decode_token_ids", "vllm_xargs", "stop_regex", "custom_params", "kept_special_tokens",
            "jump_forward")  # fmt: skip
# Names that SGLang, OpenAI and earlier versions of vLLM have for some of them: an answer without them would be another.
_ELSEWHERE = {
    **{ours: name for name, ours in _RENAMED.items()},
    "max_new_tokens": "max_tokens",
    **dict.fromkeys(
        ("json_schema", "regex", "ebnf", "structural_tag", "response_format", "guided_decoding", "guided_json",
         "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs",
    ),
}  # fmt: skip
_REFUSED_BODY = ("kv_transfer_params", "ec_transfer_params", "reasoning_parser_kwargs")
# Values that change nothing, by field; every other value is refused.
_HARMLESS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_REFUSED, (None, [], {})),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None, {}, {"max_pattern_size": 0}),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "beam_width": (None, 1),
    "length_penalty": (None, 1.0),
    "truncate_prompt_tokens": (None,),
    "watermarking": (None, False),
    "flat_logprobs": (None, False),
    "prompt_logprob_start": (None, 0),
}
_HARMLESS_BODY: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_REFUSED_BODY, (None, [], {})),
    "reasoning_ended": (None, True),
}

_PREFIX = "generate-tokens-"

Ids = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)]


class InferenceBody(MovingBody):
    """Fields of POST /inference/v1/generate."""

    token_ids: Ids
    features: FeaturesBody | None = Field(None, description="tensors of the images whose tokens token_ids has")
    content_parts: list[Any] | None = Field(
        None, description="instead, images for token_ids with one placeholder each: {type: image_url, url: data:...}"
    )
    sampling_params: dict[str, Any] = Field(description="vLLM's names; max_tokens absent: the rest of the context")
    request_id: str | None = Field(None, max_length=256)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool = Field(False, description="the answer has the prompt's token ids too")
    return_receipt: ReceiptKind | None = Field(None, description="each choice has a receipt; see POST /generate")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int = Field(0, description="read, and changes nothing: requests run in the order of arrival")


@dataclass(frozen=True)
class InferenceRequest:
    """A checked request."""

    id: str
    model: str
    created: int
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk of a stream
    has_text: bool
    num_top: int | None  # alternatives at each output token; None: no log-probabilities
    num_prompt_top: int | None  # of the prompt; None: it is not scored
    has_listed: bool
    return_token_ids: bool
    token_ids: list[int]  # of the prompt, of which images may make more
    params: SamplingParams
    context: int | None  # whose rest is max_tokens; None: the request names it
    options: RequestOptions
    images: SentImages | None
    limits: RequestLimits

    @property
    def size(self) -> Size:
        """The size that counts in the limits of the queue."""
        return Size.of([self.token_ids], [self.params.n]).with_images(self.images.pictures if self.images else ())

    def asked(self) -> Asked:
        """Return the engine's part of the request. Slow for images. Raises BadField."""
        limits, ids, params = self.limits, self.token_ids, self.params
        if self.images is not None:
            ids = self.images.prompt(ids, limits.images)
            if self.context is not None:
                params = replace(params, max_new_tokens=max(self.context - len(ids), 1))
            limits.tokenising.fits(len(ids), "token_ids", params)
        limits.entries([ids], [params], [self.options], "sampling_params", has_logprobs=[self.num_top is not None])
        return Asked([ids], [params], [self.options], [self.id], grammar_field="sampling_params.structured_outputs")


def read_inference(values: dict[str, object], engine: Engine, model: str, limits: RequestLimits) -> InferenceRequest:
    """Read and check the fields. Raises BadField."""
    refuse_values(values, _HARMLESS_BODY)
    limits.lists(values, ())
    limits.long_lists(values, "token_ids")
    body = fields_of(InferenceBody, values)
    refuse_other_models(body.model, engine, model)
    given = body.sampling_params
    limits.given_params(given, "sampling_params")
    limits.lengths([body.token_ids], "token_ids")
    if body.output_mode == "text" and (engine.tokenizer is None or given.get("detokenize") is False):
        raise BadField("output_mode", '"text" needs a tokenizer, and detokenize')
    params = _params(given, engine.max_model_len - len(body.token_ids))
    limits.tokenising.fits(len(body.token_ids), "token_ids", params)
    limits.sequences(params.n)
    num_top = _count(given, "logprobs", engine.model.vocab_size)
    prompt_top = num_prompt_top(_integer(given, "prompt_logprobs"), engine.model.vocab_size)
    for num, name in ((num_top, "logprobs"), (prompt_top, "prompt_logprobs")):
        limits.top(num or 0, f"sampling_params.{name}")
    if body.stream and prompt_top is not None:
        raise BadField("sampling_params.prompt_logprobs", "cannot be streamed")
    listed = [] if given.get("logprob_token_ids") is None else given["logprob_token_ids"]
    if not isinstance(listed, list) or not all(isinstance(id, int) and not isinstance(id, bool) for id in listed):
        raise BadField("sampling_params.logprob_token_ids", "must be a list of token ids")
    limits.listed(listed, "sampling_params.logprob_token_ids")
    options = RequestOptions(
        -1 if prompt_top is None else 0, max(num_top or 0, prompt_top or 0), tuple(listed),
        namespace(None, body.cache_salt), takes_back=not body.stream,
        return_receipt=body.return_receipt, prompt_temperature=1.0,
    )  # fmt: skip
    streaming = body.stream_options or StreamOptions()
    id = with_prefix(body.request_id or uuid.uuid4().hex)
    return InferenceRequest(
        id, body.model or engine.model.adapter_name or model, int(time.time()), body.stream,
        bool(streaming.include_usage), streaming.has_continuous_usage, body.output_mode == "text",
        num_top if num_top is not None or not listed else 0, prompt_top, bool(listed), body.return_token_ids,
        body.token_ids, params, engine.max_model_len if given.get("max_tokens") is None else None, options,
        _images(body, limits), limits,
    )  # fmt: skip


def _images(body: InferenceBody, limits: RequestLimits) -> SentImages | None:
    """Return the images of a request; None: it has none. Raises BadField."""
    if body.features is not None and body.content_parts:
        raise BadField("content_parts", "does not go with features: images come as they are, or as tensors")
    if body.features is not None:
        return read_features(body.features, len(body.token_ids), limits.images)
    return read_parts(body.content_parts, limits.images) if body.content_parts else None


def with_prefix(request_id: str) -> str:
    """Return the id of a request as its answer has it."""
    return request_id if request_id.startswith(_PREFIX) else f"{_PREFIX}{request_id}"


def _params(given: dict[str, Any], room: int) -> SamplingParams:
    """Translate vLLM's sampling parameters. Raises BadField naming the wrong one."""
    refuse_values(given, _HARMLESS, "sampling_params.")
    for name, known in _ELSEWHERE.items():
        if given.get(name) not in (None, False):
            raise BadField(f"sampling_params.{name}", f"is called {known} here")
    ours = {name: given[name] for name in _SAME if given.get(name) is not None}
    ours |= {_RENAMED[name]: given[name] for name in _RENAMED if given.get(name) is not None}
    most = given.get("max_tokens")
    ours["max_new_tokens"] = max(room, 1) if most is None else most
    structured = given.get("structured_outputs")
    if structured is not None and not isinstance(structured, dict):
        raise BadField("sampling_params.structured_outputs", "must be an object")
    # A jump by text replaces tokens, which this wire cannot take back; and a stream's tokens are the whole answer's.
    ours |= structured_settings(structured) | {"jump_forward": "exact"}
    try:
        return SamplingParams.from_dict(ours)
    except ValueError as error:
        message = str(error).removeprefix("sampling parameters: ")
        for name, of_ours in (*_RENAMED.items(), ("max_tokens", "max_new_tokens")):
            message = message.replace(of_ours, name)
        raise BadField("sampling_params", message) from None


def _integer(given: dict[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise BadField(f"sampling_params.{name}", "must be an integer")
    return value


def _count(given: dict[str, Any], name: str, vocab_size: int) -> int | None:
    """Return a number of alternatives; -1 means all tokens. Raises BadField."""
    value = _integer(given, name)
    if value is not None and value < -1:
        raise BadField(f"sampling_params.{name}", f"must be -1 (all tokens) or more, not {value}")
    return vocab_size if value == -1 else value
