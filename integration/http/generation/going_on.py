"""Requests that go on at another server: the fields by which a router moves them, and the seam in their streams.

A router asks for `progress`: each event of a stream then has comments before it with the tokens that the event holds,
whichever wire it is of. Where the server ends in the middle, the router sends the request to another one, with these
tokens in `begun`. That server makes the same stream, and leaves out what the client has:

    first server    | head | a b | c |              progress: head, a b, c
    second server     begun: head, a b c            draws a b c again ("proven") or takes them over ("trusted")
                                      | d e | end   d e are the first tokens that its stream holds
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from ....kernels.sampling.draws import derive_seed
from ....rollout.completion import Completion
from ....rollout.engine import Engine
from ....rollout.receipt import differences, guarantee
from ....rollout.request_options import Begun, Renewal, RequestOptions
from ....rollout.sampling_params import SamplingParams
from ....rollout.sequences.request import fresh_ids
from ..edge.bodies import Body, fields_of
from ..edge.errors import BadField, HttpError
from .asked import Asked

FIELD = "begun"
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Num = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class BegunSequence(Body):
    """Fields of one sequence of `begun`."""

    token_ids: list[Num]
    logprobs: list[float | None] = Field(description="one per token; null: minus infinity")
    num_chars: Num = Field(description="of the text that the client has")
    cached_tokens: Num = Field(0, description="that the first events reported")
    has_ended: bool = Field(False, description="the client has its end")
    spans: list[tuple[str, str | None, Num]] = Field(
        default_factory=list, description="weight version, digest and first token of each run of tokens"
    )


class BegunBody(Body):
    """Fields of `begun`: an answer that another server has begun."""

    sequences: list[BegunSequence | None] = Field(
        description="one per sample of each prompt; null: the client has nothing of it"
    )
    check: Literal["proven", "trusted"] = Field(
        "proven", description="whether every token is drawn again, or taken over unseen"
    )
    weight_digest: str = Field(description="of the weights that go on")
    guarantee: dict[str, Any] = Field(description="`guarantee` in GET /server_info of that server")
    head: dict[str, Any] = Field(description="what that server's first comment gave as `head`")
    has_usage: bool = Field(False, description="the client has the event with the usage of all samples")
    num_events: Num = Field(0, description="that the client has, for streams that number them")


class MovingBody(Body):
    """Fields of every call that completes prompts, for routers."""

    default_seed: Seed | None = Field(
        None, description="of a request without a seed: each prompt's noise follows from it and the prompt's number"
    )
    progress: bool = Field(False, description="streams have comments with the tokens of each event")
    begun: BegunBody | None = Field(None, description="an answer that another server has begun, to go on with")


@dataclass(frozen=True)
class Moving:
    """The fields of one request by which a router seeds, follows and moves it."""

    default_seed: int | None = None
    wants_progress: bool = False
    begun: BegunBody | None = None
    rids: list[str] = field(default_factory=list)  # of the prompts, filled by `asked`
    names: list[str] = field(default_factory=list)  # of all samples, likewise
    doubts: list[str] = field(default_factory=list)  # reasons why another server may draw other tokens first, likewise

    def asked(self, asked: Asked, engine: Engine) -> Asked:
        """Return the engine's part of the request with the seeds and the beginnings of its answers. A request that goes
        on has one prompt per sample. Raises BadField, and HttpError 409 where this engine would not go on with the
        same bits."""
        if self.default_seed is not None:
            params = [self._seeded(one, number) for number, one in enumerate(asked.params)]
            asked = replace(asked, params=params)
        asked = replace(asked, names_weights=self.wants_progress)
        rids = self.begun.head.get("rids") if self.begun is not None else asked.rids
        if (
            not isinstance(rids, Sequence)
            or len(rids) != len(asked.prompts)
            or not all(isinstance(rid, str) for rid in rids)
        ):
            raise BadField(f"{FIELD}.head.rids", f"must have an id for each of the {len(asked.prompts)} prompts")
        self.rids[:] = rids
        self.names[:] = [name for rid, params in zip(rids, asked.params, strict=True) for name in _names(rid, params)]
        self.doubts[:] = _doubts(asked.params, engine)
        if self.begun is None:
            return asked
        refuse_others(self.begun, engine)
        return replace(_gone_on(asked, self.begun, rids), names_weights=self.wants_progress)

    def head_of(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the values of the answer's head that the first server gave under these names; {} for a new request.
        Raises BadField."""
        if self.begun is None:
            return {}
        head = self.begun.head
        kinds = {"id": str, "created": int}
        for name in names:
            if type(head.get(name)) is not kinds[name]:
                raise BadField(f"{FIELD}.head.{name}", f"must be of the type {kinds[name].__name__}")
        return {name: head[name] for name in names}

    def _seeded(self, params: SamplingParams, number: int) -> SamplingParams:
        assert self.default_seed is not None
        if params.sampling_seed is not None:
            return params
        return replace(params, sampling_seed=derive_seed(self.default_seed, number))


def read_moving(values: Mapping[str, object]) -> Moving:
    """Read the fields of a request. Raises BadField naming the wrong one."""
    if not any(name in values for name in MovingBody.model_fields):
        return Moving()
    given = {name: values[name] for name in MovingBody.model_fields if name in values}
    body = fields_of(MovingBody, given)
    if body.begun is not None and values.get("session_params"):
        raise BadField(FIELD, "is of no session: a session lives at one server")
    for number, one in enumerate(body.begun.sequences if body.begun is not None else ()):
        at = f"{FIELD}.sequences.{number}"
        if one is None:
            continue
        if len(one.logprobs) != len(one.token_ids):
            raise BadField(f"{at}.logprobs", f"has {len(one.logprobs)} entries for {len(one.token_ids)} tokens")
        starts = [start for _, _, start in one.spans]
        if one.token_ids and (starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= len(one.token_ids)):
            raise BadField(f"{at}.spans", f"must begin at 0 and ascend below {len(one.token_ids)}, not {starts[:9]}")
    return Moving(body.default_seed, body.progress, body.begun)


def refuse_others(begun: BegunBody, engine: Engine) -> None:
    """Refuse an answer that this engine would not go on with the same bits. Raises HttpError 409."""
    digest, here = engine.weight_digest, guarantee(engine.model)
    why = []
    if digest != begun.weight_digest:
        why.append(f"its weights have the digest {begun.weight_digest}, and these {digest}")
    why += differences(begun.guarantee, here)
    if not here["invariant"]:
        why.append("numbers depend on the batch here")
    again = [one for one in begun.sequences if one is not None and (one.has_ended or begun.check == "proven")]
    if others := {digest for one in again for _, digest, _ in one.spans} - {begun.weight_digest}:
        why.append(f"some of its tokens are of other weights ({', '.join(map(str, sorted(map(str, others))))})")
    if why:
        raise HttpError(409, f"the begun answer cannot go on here: {'; '.join(why)}", code="cannot_go_on")


def _doubts(each: Sequence[SamplingParams], engine: Engine) -> list[str]:
    """Return the reason why a server that draws tokens of these settings again may not have those that a client has;
    empty: it will have them."""
    modes = {params.jump_forward or engine.config.jump_forward for params in each if params.is_constrained}
    return ["its jump_forward is text, by which jumps replace tokens"] if "text" in modes else []


def _names(rid: str, params: SamplingParams) -> list[str]:
    """Return the ids of a prompt's samples as the engine makes them."""
    return [rid] if params.n == 1 else [f"{rid}-{index}" for index in range(params.n)]


def _gone_on(asked: Asked, begun: BegunBody, rids: Sequence[str]) -> Asked:
    """Return the request with one prompt per sample, each with what its answer has already."""
    num = sum(params.n for params in asked.params)
    if len(begun.sequences) != num:
        raise BadField(f"{FIELD}.sequences", f"has {len(begun.sequences)} entries for {num} samples")
    parts: list[tuple[Sequence[int], SamplingParams, RequestOptions]] = []
    for prompt, params, options, rid in zip(asked.prompts, asked.params, asked.options, rids, strict=True):
        if params.sampling_seed is None:
            raise BadField(FIELD, "needs the seed of the request")
        for index in range(params.n):
            one = begun.sequences[len(parts)]
            seed = derive_seed(params.sampling_seed, index)
            more = _beginning(one, begun, params, options, seed, index)
            parts.append((prompt, replace(params, n=1), replace(options, base_id=options.base_id or rid, **more)))
    prompts, each, options_each = zip(*parts, strict=True)
    # Other ids: the first server's may still live here. An abort finds them by their base_id.
    return Asked(prompts, each, options_each, fresh_ids(num), grammar_field=asked.grammar_field)


def _beginning(
    one: BegunSequence | None, begun: BegunBody, params: SamplingParams, options: RequestOptions, seed: int, index: int
) -> dict[str, Any]:
    """Return the options by which a sample begins with its tokens. Trusted are those of which nothing but the tokens is
    asked for; an answer that has ended is drawn again, because only its end says how."""
    token_ids = () if one is None else tuple(one.token_ids)
    needs_rows = params.is_constrained or options.top_logprobs_num or options.token_ids_logprob or options.max_kept_ids
    if one is None or begun.check == "proven" or one.has_ended or needs_rows or not token_ids:
        return {"renewal": Renewal(token_ids, seed, index)}
    spans = tuple((version, digest, start) for version, digest, start in one.spans)
    return {"begun": Begun(token_ids, tuple(map(_number, one.logprobs)), spans, seed, index)}


def _number(logprob: float | None) -> float:
    return -math.inf if logprob is None else logprob


def named(completion: Completion, name: str, begun: BegunSequence | None) -> Completion:
    """Return a completion that went on here as its first server would have made it."""
    drafts = tuple(counts for counts in completion.drafts if counts.source != "earlier")
    cached = completion.num_cached_tokens if begun is None else begun.cached_tokens
    return replace(completion, id=name, num_kept_tokens=0, drafts=drafts, num_cached_tokens=cached)


def progress_line(values: Mapping[str, object]) -> bytes:
    """Make a comment of a stream, which readers of events ignore."""
    return f": progress {json.dumps(values, separators=(',', ':'))}\n".encode()
