"""Requests for samples, as requests to the engine, and its completions as answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....rollout.completion import Completion, TopLogprobs
from ....rollout.request_options import RequestOptions
from ....rollout.sampling_params import SamplingParams
from ..training.data import BadInput
from ..wire.bodies import SampleBody, TensorBody, csr_places_of, numbers_of, tokens_of
from ..wire.messages import SampleAnswer, Sampled, dense_of, float_tensor, top_entries

_MAX_ENTRIES = 4 << 20  # log-probabilities of alternatives in one answer


@dataclass(frozen=True)
class Targets:
    """Token ids whose log-probabilities a client asks for, at each position of the prompt behind the first."""

    ids: np.ndarray  # int64 [N - 1, K], -1 for none
    rows: np.ndarray | None = None  # of its CSR form, where it came so
    columns: np.ndarray | None = None


@dataclass(frozen=True)
class SampleRequest:
    """A checked request for samples of one prompt."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions
    prompt_top: int = 0  # alternatives at each position of the prompt
    sample_top: int = 0  # alternatives at each sampled token
    targets: Targets | None = None

    @classmethod
    def of(cls, body: SampleBody, max_model_len: int) -> SampleRequest:
        """Check a request. Raises ValueError naming a wrong or unsupported field."""
        _refuse_unsupported(body)
        prompt = tuple(tokens_of(body.prompt, "prompt"))
        if not 1 <= len(prompt) < max_model_len:
            raise BadInput(f"prompt has {len(prompt)} tokens; it must have 1 to {max_model_len - 1}")
        targets = None if body.target_prompt_logprobs is None else _targets(body.target_prompt_logprobs, len(prompt))
        listed = () if targets is None else tuple(int(one) for one in np.unique(targets.ids[targets.ids >= 0]))
        top = max(body.topk_prompt_logprobs, body.topk_sample_logprobs)
        params = _params(body, max_model_len - len(prompt))
        num_rows = len(prompt) + params.n * params.max_new_tokens
        if (top + len(listed)) * num_rows > _MAX_ENTRIES:
            raise BadInput(
                f"{top} alternatives and {len(listed)} named tokens at {num_rows} positions are more than "
                f"{_MAX_ENTRIES} log-probabilities"
            )
        options = RequestOptions(
            logprob_start_len=_first_scored(body, len(prompt), targets), top_logprobs_num=top,
            token_ids_logprob=listed, prompt_temperature=1.0,
        )  # fmt: skip
        return cls(prompt, params, options, body.topk_prompt_logprobs, body.topk_sample_logprobs, targets)

    def answer(self, completions: Sequence[Completion]) -> SampleAnswer:
        """Make the answer of the completions of all samples, in their order."""
        first, start, num_prompt = completions[0], self.options.logprob_start_len, len(self.prompt_ids)
        logprobs = top = None
        if start >= 0:
            logprobs = np.full(num_prompt, np.nan, np.float32)
            scored = [np.nan if one is None else one for one in first.prompt_logprobs or ()]
            logprobs[num_prompt - len(scored) :] = scored
        if self.prompt_top:
            rows = first.prompt_top_logprobs or ()
            none: list[TopLogprobs | None] = [None] * (num_prompt - len(rows))
            top = top_entries([*none, *rows], self.prompt_top)
        return SampleAnswer(
            [_sampled(one, self.sample_top) for one in completions], logprobs, top, first.num_cached_tokens,
            None if self.targets is None else _scored(self.targets, first),
        )  # fmt: skip


def _refuse_unsupported(body: SampleBody) -> None:
    if body.prompt_alt_tokens_k:
        raise BadInput("prompt_alt_tokens_k is not supported")
    if body.record_stability_info:
        raise BadInput("record_stability_info is not supported: the loss stable_reinforce is not, either")
    if body.base_model is not None or body.model_path is not None:
        raise BadInput("base_model and model_path are of create_sampling_session; asample takes sampling_session_id")


def _params(body: SampleBody, room: int) -> SamplingParams:
    """Return the engine's settings. room: how many tokens fit behind the prompt."""
    given = body.sampling_params
    num = room if given.max_tokens is None else given.max_tokens
    if num < 1 or num > room:
        raise BadInput(f"sampling_params: max_tokens must be from 1 to {room} behind this prompt, not {num}")
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    texts = [one for one in stop or () if isinstance(one, str)]
    ids = [one for one in stop or () if not isinstance(one, str)]
    return SamplingParams(
        max_new_tokens=num, stop=tuple(texts), stop_token_ids=tuple(ids), temperature=given.temperature,
        top_p=given.top_p, top_k=given.top_k, n=body.num_samples, sampling_seed=given.seed,
        ignore_eos=stop == [], no_stop_trim=True, skip_special_tokens=False,
    )  # fmt: skip


def _first_scored(body: SampleBody, num_prompt: int, targets: Targets | None) -> int:
    """Return the first position of the prompt whose log-probabilities are wanted, or -1."""
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < num_prompt):
        raise BadInput(
            f"prompt_logprobs_last_n needs prompt_logprobs, and must be from 1 to {num_prompt - 1}, not {last}"
        )
    wanted = []
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        wanted.append(0 if last is None else num_prompt - last)
    if targets is not None:
        wanted.append(int(np.argmax((targets.ids >= 0).any(axis=1))) + 1)
    return min(wanted, default=-1)


def _targets(tensor: TensorBody, num_prompt: int) -> Targets:
    shape = tensor.shape
    if tensor.dtype != "int64" or shape is None or len(shape) != 2 or shape[0] != num_prompt - 1 or shape[1] < 1:
        raise BadInput(
            f"target_prompt_logprobs must be int64 [{num_prompt - 1}, K], not {tensor.dtype} {shape!s:.100}: one row "
            "for each token of the prompt behind the first"
        )
    values = numbers_of(tensor, "target_prompt_logprobs")
    if (places := csr_places_of(tensor, "target_prompt_logprobs")) is None:
        if values.size != shape[0] * shape[1]:
            raise BadInput(f"target_prompt_logprobs has {values.size} numbers, and the shape {shape}")
        found = Targets(values.reshape(shape))
    else:
        found = Targets(dense_of(values, *places, shape, -1), *places)
    if not (found.ids >= 0).any():
        raise BadInput("target_prompt_logprobs names no token")
    return found


def _scored(targets: Targets, completion: Completion) -> bytes:
    """Return the log-probabilities of the named tokens, as an encoded tensor of the layout in which they were named."""
    scored = completion.prompt_listed_logprobs or ()
    first = len(targets.ids) + 1 - len(scored)  # the position of the first of them
    found = np.zeros(targets.ids.shape, np.float32)
    for position, row in enumerate(scored, first):
        of_token = {token_id: logprob for logprob, token_id in row or ()}
        if position:
            found[position - 1] = [of_token.get(int(one), 0.0) for one in targets.ids[position - 1]]
    if targets.rows is None or targets.columns is None:
        return float_tensor(found)
    places = np.repeat(np.arange(len(found)), np.diff(targets.rows)), targets.columns
    return float_tensor(found[places], targets.rows, targets.columns, found.shape)


def _sampled(completion: Completion, num_top: int) -> Sampled:
    reason = completion.finish_reason
    if reason is None or reason.type not in ("stop", "length") or reason.message:
        raise BadInput(
            f"a sample did not end by itself: {reason.message or reason.type if reason else 'it still runs'}"
        )
    top = top_entries(list(completion.top_logprobs or ()), num_top) if num_top else None
    return Sampled(reason.type == "stop", completion.token_ids, completion.logprobs, top)
