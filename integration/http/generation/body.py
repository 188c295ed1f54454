"""The fields of a /generate request: one entry per prompt, all checked before a sequence is queued."""

from __future__ import annotations

import json
import marshal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from pydantic import Field, StrictInt, StrictStr

from ....rollout.engine import Engine
from ....rollout.giving_way import give_way
from ....rollout.request_options import Renewal, RequestOptions
from ....rollout.sampling_params import SamplingParams
from ....rollout.sequences.request import fresh_ids
from ..conversations.joined import joined_prompt, processed_prompt
from ..conversations.next_turn import NextTurn
from ..conversations.params import SessionParams, read_session_params, refuse_samples
from ..edge.bodies import Divisor, ReceiptKind, fields_of
from ..edge.errors import BadField
from ..images.image_data import read_image_data
from ..images.pictures import SentPicture
from .asked import Asked
from .going_on import MovingBody
from .limits import RequestLimits
from .meta import Wanted

# Fields that may have an entry for each prompt.
PER_PROMPT = (
    "text", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "input_logprob_temperature", "extra_key",
    "cache_salt", "speculation", "return_receipt",
)  # fmt: skip
# Fields of SGLang's that we do not support and cannot ignore: without them the answer would be a different one.
REFUSED = (
    "input_embeds", "video_data", "audio_data", "multi_modal_data", "images", "videos", "audios",
    "lora_id", "custom_logit_processor",
    "return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask",
    "return_entropy", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "watermark", "max_thinking_tokens",
    "require_reasoning", "positional_embed_overrides", "multi_item_delimiter_indices", "token_indices_to_pool",
    "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "images_config",
)  # fmt: skip
_REFUSED_HERE = ("mm_processor_kwargs", "modalities")  # of images; other calls read or refuse them by their own rules


class GenerateBody(MovingBody):
    """Fields of POST /generate. Exactly one of text and input_ids is given; nested lists are batches."""

    text: StrictStr | list[StrictStr] | None = None
    input_ids: list[Any] | None = Field(None, description="token ids, or a list of such lists")
    image_data: StrictStr | list[Any] | None = Field(
        None, description="images of the prompt, data:image/...;base64,... or base64 alone; lists for several"
    )
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = Field(-1, description="-1: log-probabilities of the output only")
    top_logprobs_num: int | list[int] = 0
    input_logprob_temperature: Divisor | list[Divisor] = Field(
        1.0, description="divides the logits of the prompt's log-probabilities, as `temperature` the output's"
    )
    token_ids_logprob: list[Any] | None = Field(None, description="token ids, or a list of such lists")
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    extra_key: str | list[str] | None = Field(None, description="requests share cached prefixes only under equal keys")
    cache_salt: str | list[str] | None = None
    draft_token_ids: list[Any] | None = Field(
        None, description="an output that may come again, or one for each prompt: saves steps, and changes no bit"
    )
    speculation: bool | list[bool] = Field(True, description="false: no drafts for this request")
    stream_when_final: bool = Field(False, description="nothing is streamed before the answer's end")
    return_receipt: ReceiptKind | list[ReceiptKind | None] | None = Field(
        None, description="true: meta_info has a receipt of the sample; digests: with hashes in the place of tokens"
    )
    session_params: Any = Field(None, description="the session, and the turn of it, that the prompt goes on from")


class RenewBody(GenerateBody):
    """Fields of POST /renew: those of the /generate request, and for each prompt the answer that is renewed."""

    output_ids: list[list[StrictInt]] = Field(description="of each answer")
    seeds: list[Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]] = Field(
        description="`seed` in each answer's meta_info"
    )
    sample_indexes: list[Annotated[StrictInt, Field(ge=0, lt=2**31)]] | None = Field(
        None, description="`sample_index` in each answer's meta_info; default: 0"
    )


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request. Its prompts are not tokenised."""

    prompts: list[str] | list[list[int]]
    field: str  # of the prompts
    is_batch: bool
    params: list[SamplingParams]
    options: list[RequestOptions]
    wanted: list[Wanted]  # one per prompt
    rids: list[str]
    stream: bool
    return_prompt_token_ids: bool
    limits: RequestLimits
    session: SessionParams | None = None
    pictures: Sequence[list[SentPicture]] = ()  # of each prompt; empty: there are none

    @property
    def answers_list(self) -> bool:
        """Whether the answer is a list."""
        return self.is_batch or self.params[0].n > 1

    def asked(self, engine: Engine, turn: NextTurn | None = None) -> Asked:
        """Tokenise the prompts and return the engine's part of the request. turn: of the session. Slow for long texts.
        Raises BadField."""
        token_ids = self._token_ids(turn)
        self.limits.entries(
            token_ids, self.params, self.options, "top_logprobs_num", repeats=self.stream,
            has_logprobs=[wanted.logprobs for wanted in self.wanted],
        )  # fmt: skip
        return Asked(token_ids, self.params, self.options, self.rids)

    def _token_ids(self, turn: NextTurn | None) -> list[list[int]]:
        limits, own = self.limits, self.pictures or [[]] * len(self.prompts)
        if self.pictures:
            limits.images.check_pixels([one for pictures in own for one in pictures])
        rest = (limits.tokenising, limits.images, self.field)
        prompts = cast("list[str | list[int]]", self.prompts)
        if turn is None:
            return [processed_prompt(*one, *rest) for one in zip(prompts, own, self.params, strict=True)]
        [prompt], [pictures], [params] = prompts, own, self.params
        return [joined_prompt(prompt, pictures, turn, params, *rest)]


def read_generate(values: dict[str, object], engine: Engine, limits: RequestLimits) -> GenerateRequest:
    """Read and check a request's fields. Raises BadField, or ValueError naming the field."""
    refuse_unsupported(values, (*REFUSED, *_REFUSED_HERE))
    limits.lists(values, PER_PROMPT)
    limits.long_lists(values, "input_ids", ("token_ids_logprob", "draft_token_ids"))
    refuse_other_adapters(values, engine)
    body = fields_of(GenerateBody, values)
    prompts, field, is_batch = _prompts(body)
    count = len(prompts)
    limits.prompts(count, field)
    limits.lengths(prompts, field)
    given = _spread("sampling_params", body.sampling_params, count, is_batch)
    limits.sequences(sum(map(_num_samples, given)))  # before settings are built that would be refused
    params = _all_params(given, limits)
    limits.sequences(sum(p.n for p in params))
    options, wanted = _options(body, params, is_batch, limits, text_of_token(engine))
    rids = _rids(body.rid, count, is_batch)
    if is_batch and body.rid and isinstance(body.rid, str):
        options = [replace(one, base_id=body.rid) for one in options]
    pictures = read_image_data(body.image_data, count, is_batch, limits.images)
    if (session := read_session_params(body.session_params)) is not None:
        refuse_samples(count if is_batch else 1, params[0].n)
    return GenerateRequest(
        prompts, field, is_batch, params, options, wanted, rids, body.stream, body.return_prompt_token_ids, limits,
        session, pictures,
    )  # fmt: skip


def _options(
    body: GenerateBody,
    params: list[SamplingParams],
    is_batch: bool,
    limits: RequestLimits,
    text_of: Callable[[int], str] | None,
) -> tuple[list[RequestOptions], list[Wanted]]:
    """Return the options of each prompt, and what its answer reports. Raises BadField, or ValueError naming the
    field."""
    count = len(params)
    fields = zip(
        _spread("return_logprob", body.return_logprob, count, is_batch),
        _spread("logprob_start_len", body.logprob_start_len, count, is_batch),
        _spread("top_logprobs_num", body.top_logprobs_num, count, is_batch),
        _spread("input_logprob_temperature", body.input_logprob_temperature, count, is_batch),
        _listed(body.token_ids_logprob, count, is_batch, limits),
        _spread("extra_key", body.extra_key, count, is_batch),
        _spread("cache_salt", body.cache_salt, count, is_batch),
        drafts_of(body.draft_token_ids, count, is_batch, limits),
        _spread("speculation", body.speculation, count, is_batch),
        _spread("return_receipt", body.return_receipt, count, is_batch),
        strict=True,
    )
    options, wanted = [], []
    for its_params, its in zip(params, fields, strict=True):
        has_logprobs, start, num_top, divisor, listed, extra_key, salt, draft, has_drafts, receipt = its
        others: dict[str, Any] = {
            "extra_key": namespace(extra_key, salt), "draft_token_ids": draft, "speculation": has_drafts,
            "stream_when_final": body.stream_when_final, "max_kept_ids": limits.max_kept_ids(its_params),
            "return_receipt": receipt,
        }  # fmt: skip
        if not has_logprobs:
            options.append(RequestOptions(**others))
            wanted.append(Wanted())
            continue
        limits.top(num_top, "top_logprobs_num")
        options.append(RequestOptions(start, num_top, listed, **others, prompt_temperature=divisor))
        shown = text_of if body.return_text_in_logprobs else None
        wanted.append(Wanted(True, start, num_top > 0, bool(listed), shown))
    return options, wanted


def read_renew(values: dict[str, object], engine: Engine, limits: RequestLimits) -> GenerateRequest:
    """Read and check the fields of a renewal. Raises BadField, or ValueError naming the field."""
    refuse_unsupported(values, ("session_params",))
    limits.lists(values, ("output_ids", "seeds", "sample_indexes"))
    limits.long_lists(values, "output_ids")
    body = fields_of(RenewBody, values)
    asked = read_generate(values, engine, limits)
    count = len(asked.prompts)
    indexes = body.sample_indexes if body.sample_indexes is not None else [0] * count
    given: dict[str, Sequence[object]] = {"output_ids": body.output_ids, "seeds": body.seeds, "sample_indexes": indexes}
    for name, one in given.items():
        if len(one) != count:
            raise BadField(name, f"has {len(one)} entries for {count} prompts")
    for token_ids in body.output_ids:
        limits.draft(token_ids, "output_ids")
    renewals = map(Renewal, map(tuple, body.output_ids), body.seeds, indexes)
    options = [replace(one, renewal=renewal) for one, renewal in zip(asked.options, renewals, strict=True)]
    return replace(asked, params=[replace(params, n=1) for params in asked.params], options=options)


def has_stop_regex(values: Mapping[str, object]) -> bool:
    """Return whether a body has patterns, which take too long to compile for the event loop."""
    params = values.get("sampling_params")
    return "stop_regex" in values or any(
        isinstance(one, dict) and "stop_regex" in one for one in (params if isinstance(params, list) else [params])
    )


def refuse_unsupported(values: Mapping[str, object], names: Sequence[str]) -> None:
    """Refuse fields that are not supported. Raises BadField for the first name that has a value."""
    for name in names:
        if values.get(name) not in (None, False, [], {}, ""):
            instead = ": structured_outputs has taken its place" if name.startswith("guided_") else ""
            raise BadField(name, f"is not supported{instead}")


def refuse_other_adapters(values: Mapping[str, object], engine: Engine) -> None:
    """Refuse an adapter that is not loaded. Raises BadField naming it. A request that names none is answered with the
    engine's weights, of which the loaded adapter is a part."""
    given = values.get("lora_path")
    loaded = engine.model.adapter_name
    for name in given if isinstance(given, list) else [given]:
        if name is not None and name != "" and name != loaded:
            known = "none is loaded" if loaded is None else f"{loaded!r} is loaded, and an engine has one at a time"
            raise BadField("lora_path", f"names the adapter {name!r}: {known}")


def refuse_other_models(name: str | None, engine: Engine, base: str) -> None:
    """Refuse the base by its own name while an adapter answers every request, and an adapter of it that is not loaded.
    Raises BadField."""
    loaded = engine.model.adapter_name
    if name is not None and loaded is not None and name == base:
        why = f"names the base, but the adapter {loaded!r} is loaded and answers every request"
        raise BadField("model", f"{why}: ask for {loaded!r}, or unload it")
    if name is not None and name.startswith(f"{base}:") and name != f"{base}:{loaded}":
        raise BadField("model", f"names an adapter that is not loaded: {name.removeprefix(f'{base}:')[:200]!r}")


def sampling_params(given: object) -> SamplingParams:
    """Build the sampling parameters of one prompt. Raises BadField naming every key that is unknown or wrong."""
    if given is not None and not isinstance(given, dict):
        raise BadField("sampling_params", f"must be an object, not {type(given).__name__}")
    try:
        params = SamplingParams.from_dict(given or {})
    except ValueError as error:
        raise BadField("sampling_params", str(error).removeprefix("sampling parameters: ")) from None
    return params


def _num_samples(given: object) -> int:
    """Return the number of samples that sampling parameters ask for, at least 1; not checked yet."""
    n = given.get("n") if isinstance(given, dict) else None
    return n if isinstance(n, int) and n > 0 else 1


def _all_params(given: list[Any], limits: RequestLimits) -> list[SamplingParams]:
    """Build the sampling parameters of all prompts; equal ones are built and kept once. Raises BadField."""
    known: dict[bytes, SamplingParams] = {}
    last: object = None
    found: list[SamplingParams] = []
    for one in given:
        give_way()
        if one is not last or not found:
            if isinstance(one, dict):
                limits.given_params(one, "sampling_params")
            key = marshal.dumps(one, 2)  # tells 1 from true, which compare as equal
            if key not in known:
                known[key] = sampling_params(one)
            last = one
        found.append(known[key])
    return found


def text_of_token(engine: Engine) -> Callable[[int], str] | None:
    """Return a function from a token id to its text; None for an engine without a tokenizer."""
    if engine.tokenizer is None:
        return None
    decode: Callable[..., Any] = engine.tokenizer.decode  # typed as a list of texts, too, which it is for batches only
    return lambda token_id: decode([token_id])


def namespace(extra_key: str | None, cache_salt: str | None) -> str:
    """Join the two keys to the one under which prefixes are shared; other pairs have others. An empty key counts as
    not given; an extra key alone stays as it is, so that `pin_prefix` and its like find it."""
    if not cache_salt and not (extra_key or "").startswith("\0"):
        return extra_key or ""
    return "\0" + json.dumps([cache_salt or None, extra_key or None])


def _prompts(body: GenerateBody) -> tuple[list[str] | list[list[int]], str, bool]:
    """Return the prompts, the name of their field, and whether they are a batch. Raises BadField."""
    if (body.text is None) == (body.input_ids is None):
        raise BadField("text", "exactly one of text and input_ids is needed")
    if body.input_ids is None:
        assert body.text is not None
        prompts, field, is_batch = body.text, "text", isinstance(body.text, list)
    else:
        prompts, field = body.input_ids, "input_ids"
        is_batch = any(isinstance(entry, list) for entry in prompts)
        if is_batch and not all(isinstance(entry, list) for entry in prompts):
            raise BadField(field, "must be a list of token ids, or a list of such lists")
    if not prompts:
        raise BadField(field, "must not be empty")
    return cast("list[str] | list[list[int]]", prompts if is_batch else [prompts]), field, is_batch


def _listed(given: list[Any] | None, count: int, is_batch: bool, limits: RequestLimits) -> list[tuple[int, ...]]:
    """Return per prompt the token ids whose log-probabilities are wanted. Raises BadField for values of other types."""
    name, check = "token_ids_logprob", limits.listed
    if not any(isinstance(entry, list) for entry in given or []):
        return [_ids(name, given, check)] * count
    return [_ids(name, ids, check) for ids in _spread(name, given, count, is_batch)]


def drafts_of(given: list[Any] | None, count: int, is_batch: bool, limits: RequestLimits) -> list[tuple[int, ...]]:
    """Return per prompt the output that may come again: a batch needs one for each. Raises BadField."""
    name = "draft_token_ids"
    if given is None:
        return [()] * count
    if not is_batch:
        return [_ids(name, given, limits.draft)]
    if not all(isinstance(entry, list | None) for entry in given):
        raise BadField(name, "of several prompts must have a list of token ids, or null, for each of them")
    return [_ids(name, ids, limits.draft) for ids in _spread(name, given, count, is_batch)]


def _ids(name: str, ids: object, check: Callable[[Sequence[object], str], None]) -> tuple[int, ...]:
    if not isinstance(ids, list | None):
        raise BadField(name, "must be a list of token ids, or a list of such lists")
    check(ids or [], name)
    if bad := [id for id in ids or [] if isinstance(id, bool) or not isinstance(id, int)]:
        raise BadField(name, f"must be token ids, not {bad[:5]!r}")
    return tuple(ids or ())


def _spread(name: str, value: Any, count: int, is_batch: bool) -> list[Any]:
    """Return one value per prompt. Raises BadField for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if not is_batch:
        raise BadField(name, "is a list, but the prompt is none: give one value, or a list of prompts")
    if len(value) != count:
        raise BadField(name, f"has {len(value)} entries for {count} prompts")
    return value


def _rids(given: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
    """Return an id for each prompt; a single id for a batch gets a number. Raises BadField for a repeated id."""
    if not given:
        return fresh_ids(count)
    if isinstance(given, str):
        return [f"{given}_{index}" for index in range(count)] if is_batch else [given]
    rids = _spread("rid", given, count, is_batch)
    if len(set(rids)) < count:
        twice = sorted(rid for rid, num in Counter(rids).items() if num > 1)
        raise BadField("rid", f"Duplicate request ID detected within the batch: {', '.join(twice)}")
    return [rid or fresh for rid, fresh in zip(rids, fresh_ids(count), strict=True)]
