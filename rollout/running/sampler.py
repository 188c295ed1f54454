"""Choose the next token of each row. A row's choice depends only on its own logits, settings, seed and position.

The reported log-probability is log_softmax(logits / temperature) over the full vocabulary of the *model's* logits:
penalties, logit_bias, a grammar and the top-k / top-p / min-p filters change the choice, but not the reported number,
so that the trainer, which does not know them, computes the same number. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens
from ...kernels.sampling.logprobs import scaled_logprobs, selected_logprobs
from ...kernels.sampling.reference import kept_tokens
from ...kernels.sampling.wanted import wanted_logits
from ..completion import ListedLogprobs, TopLogprobs
from ..errors import BrokenLogits
from ..sampling_params import LEAST_BIAS, SamplingParams
from ..sequences.request import Request
from .batch import SampledRow

# Larger than every logit, and still finite after division by the lowest temperature: a row always keeps a token.
_FAR = -LEAST_BIAS


class Sampled(NamedTuple):
    """The choice made for one row."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs
    listed_logprobs: ListedLogprobs = ()
    masked_prob: float | None = None  # with a grammar: the probability among its allowed tokens, at the temperature
    was_only_choice: bool = False  # the grammar allowed no other token
    kept_ids: tuple[int, ...] = ()  # the tokens that the filters kept, in the order of their ids, if asked for


@dataclass(frozen=True)
class _Plan:
    """The sampling settings of a batch, row by row. Reused while the batch has the same requests."""

    requests: list[Request]  # one a row: several times the same for a draft
    settings: RowSettings
    reshaped: list[int]  # rows whose logits are changed at every step
    reshaped_at_first: list[int]  # other rows, whose logits are changed until they have min_new_tokens
    with_top: list[int]  # rows that report their most likely tokens
    with_listed: list[int]  # rows that report the tokens that the request names
    with_kept: list[int]  # rows that report the tokens that their filters keep

    @classmethod
    def of(cls, requests: list[Request], device: torch.device) -> _Plan:
        params = [r.params for r in requests]
        top_k = [1 if p.is_greedy else p.top_k if p.top_k > 0 else KEEP_ALL for p in params]
        always = [i for i, p in enumerate(params) if p.needs_penalties or p.logit_bias]
        return cls(
            requests,
            RowSettings(
                temperatures=torch.tensor([_temperature(r) for r in requests], dtype=torch.float32, device=device),
                seeds=torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device),
                top_k=torch.tensor([min(k, KEEP_ALL) for k in top_k], dtype=torch.int64, device=device),
                top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
                min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            ),
            reshaped=always,
            reshaped_at_first=[i for i, p in enumerate(params) if p.min_new_tokens > 0 and i not in set(always)],
            with_top=[i for i, r in enumerate(requests) if r.options.top_logprobs_num],
            with_listed=[i for i, r in enumerate(requests) if r.options.token_ids_logprob],
            with_kept=[i for i, r in enumerate(requests) if r.options.max_kept_ids and r.params.has_filters],
        )


@dataclass(frozen=True, eq=False)
class _Changes:
    """The changes of logits that settings name, as tensors. A list of the whole vocabulary takes longer to convert than
    a step takes, so each is converted once."""

    params: SamplingParams
    biased: Tensor  # int64: the tokens of logit_bias
    bias: Tensor  # float32: of each of them
    stops: Tensor  # int64: tokens that end the output, which are banned until it has min_new_tokens

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int], logits: Tensor) -> _Changes:
        device, bias = logits.device, params.logit_bias or {}
        stops = eos_token_ids | params.stop_ids if params.min_new_tokens > 0 else ()
        banned = [id for id in stops if id < logits.shape[-1]]  # a tokenizer may know more ids than the model has rows
        values = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
        return cls(params, _on(device, list(bias)), values.clamp(-_FAR, _FAR).float(), _on(device, banned))


class Sampler:
    """A sampler of batches. It keeps token counts for requests with penalties, and tensors of their settings."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._counts: dict[Request, _Counts] = {}
        self._changes: dict[Request, _Changes] = {}
        # By the id of their settings, which they keep: the samples of a prompt have the same.
        self._shared: WeakValueDictionary[int, _Changes] = WeakValueDictionary()
        self._plan: _Plan | None = None  # of the newest batch
        self._host_plan: _Plan | None = None  # of the newest batch that is drawn without the host

    def sample(self, logits: Tensor, rows: Sequence[SampledRow], allowed: Sequence[bytes | None] = ()) -> list[Sampled]:
        """Sample one token per row of logits [R, V] (any float dtype); broken logits give a NaN log-probability.

        allowed: per row the tokens that may be chosen, one bit each; None: all. Empty: all in every row.
        """
        device = logits.device
        plan = self._plan_of([row.request for row in rows], device)
        positions = torch.tensor([row.num_tokens for row in rows], dtype=torch.int64, device=device)
        masked = [row for row, mask in enumerate(allowed) if mask is not None]
        packed = np.stack([np.frombuffer(mask, np.uint8) for mask in allowed if mask is not None]) if masked else None
        masks = None if packed is None else (_on(device, masked), torch.from_numpy(packed).to(device))
        reshaped = self._reshaped(logits, plan, rows)
        drawn = draw_tokens(logits, plan.settings, positions, reshaped, masks)
        tops, listed = _alternatives(logits, plan)
        values = zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), tops, listed)  # noqa: B905 the last two: endless
        choices = [Sampled(*row) for row in values]
        if packed is not None:
            chances, num_choices = drawn.chances.tolist(), np.bitwise_count(packed).sum(-1).tolist()
            for row, num in zip(masked, num_choices, strict=True):
                choices[row] = choices[row]._replace(masked_prob=chances[row], was_only_choice=num == 1)
        if plan.with_kept:
            for row, ids in zip(plan.with_kept, _kept_ids(wanted_logits(logits, reshaped, masks), plan), strict=True):
                choices[row] = choices[row]._replace(kept_ids=ids)
        return choices

    def forget(self, request: Request) -> None:
        """Drop the state of an answered request."""
        self._counts.pop(request, None)
        self._changes.pop(request, None)
        plan, host_plan = self._plan, self._host_plan
        if plan is not None and request in plan.requests:
            self._plan = None
        if host_plan is not None and request in host_plan.requests:
            self._host_plan = None

    def settings_of(self, requests: Sequence[Request]) -> RowSettings | None:
        """Return the rows' settings on the host if `draw_tokens` alone can sample them, else None.

        The same object while the batch is the same. None if logits are reshaped, or if more is reported than the token.
        Does not look for grammars: the caller must.
        """
        plan, wanted = self._host_plan, list(requests)
        if plan is None or plan.requests != wanted:
            plan = self._host_plan = _Plan.of(wanted, torch.device("cpu"))
        if plan.reshaped or plan.with_top or plan.with_listed or plan.with_kept:
            return None
        if plan.reshaped_at_first:
            waiting = (plan.requests[row] for row in plan.reshaped_at_first)
            if any(r.sequence.num_output_tokens < r.params.min_new_tokens for r in waiting):
                return None
        return plan.settings

    def _plan_of(self, wanted: list[Request], device: torch.device) -> _Plan:
        plan = self._plan
        if plan is None or plan.requests != wanted:
            plan = self._plan = _Plan.of(wanted, device)
        return plan

    def _reshaped(self, logits: Tensor, plan: _Plan, rows: Sequence[SampledRow]) -> tuple[Tensor, Tensor] | None:
        """Return the rows whose logits are changed before the draw, and the changed logits; None without such rows."""
        changed = [*plan.reshaped, *(row for row in plan.reshaped_at_first if _is_too_short(rows[row]))]
        if not changed:
            return None
        values = torch.stack([self._reshape(logits[row].float(), rows[row]) for row in changed])
        return _on(logits.device, changed), values

    def _reshape(self, logits: Tensor, row: SampledRow) -> Tensor:
        """Apply penalties, logit_bias and the ban on early stops to one row [V]."""
        request, params = row.request, row.request.params
        if params.needs_penalties:
            counts, num_cuts = self._counts.get(request), request.sequence.num_cuts
            if counts is None or counts.num_cuts != num_cuts:  # a jump has replaced tokens, which may have been counted
                counts = self._counts[request] = _Counts(logits.shape[-1], logits.device, num_cuts)
            counts.catch_up(request)
            logits = counts.penalise(logits, params, row.drafted)
        if params.logit_bias:
            changes = self._changes_of(request, logits)
            logits = logits.index_add(0, changes.biased, changes.bias)
        if _is_too_short(row):
            logits = logits.index_fill(0, self._changes_of(request, logits).stops, -2 * _FAR)
        return logits

    def _changes_of(self, request: Request, logits: Tensor) -> _Changes:
        """Return the changes that a request's settings make to a row [V] of logits. Makes them once."""
        if (changes := self._changes.get(request)) is not None:
            return changes
        params = request.params
        if (changes := self._shared.get(id(params))) is None:
            changes = self._shared[id(params)] = _Changes.of(params, self._eos_token_ids, logits)
        self._changes[request] = changes
        return changes


class _Counts:
    """Counts of each token in one sequence while it grows. An update costs the new tokens only."""

    def __init__(self, vocab_size: int, device: torch.device, num_cuts: int) -> None:
        """Count nothing yet. num_cuts: of the sequence, which has other tokens if it is another number."""
        self.num_cuts = num_cuts
        self._in_output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # in the prompt or the output
        self._num_counted = 0

    def catch_up(self, request: Request) -> None:
        sequence = request.sequence
        new = torch.tensor(sequence.token_ids[self._num_counted :], device=self._seen.device, dtype=torch.int64)
        self._seen[new] = True
        outputs = new[max(sequence.num_prompt_tokens - self._num_counted, 0) :]
        self._in_output.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.float32))
        self._num_counted = sequence.num_tokens

    def penalise(self, logits: Tensor, params: SamplingParams, drafted: tuple[int, ...]) -> Tensor:
        """Apply the penalties of the counted tokens and of drafted ones, which count for this row only."""
        seen, in_output = self._seen, self._in_output
        if drafted:
            new = torch.tensor(drafted, dtype=torch.int64, device=seen.device)
            seen = seen.index_fill(0, new, True)
            in_output = in_output.index_add(0, new, torch.ones_like(new, dtype=torch.float32))
        repetition = params.repetition_penalty
        punished = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, punished, logits)
        logits = logits - in_output * params.frequency_penalty
        return logits - (in_output > 0).float() * params.presence_penalty


def _is_too_short(row: SampledRow) -> bool:
    """Return whether the row's request may not stop yet."""
    request = row.request
    return row.num_tokens - request.sequence.num_prompt_tokens < request.params.min_new_tokens


def refuse_broken(ids: Sequence[str], logprobs: Sequence[float | None]) -> None:
    """Raise BrokenLogits, naming sequences, if the log-probability of a token is NaN."""
    if any(value != value for value in logprobs):
        broken = list(dict.fromkeys(id for id, value in zip(ids, logprobs, strict=True) if value != value))
        count = f"{len(broken)} sequences, {broken[0]!r} first"
        raise BrokenLogits(f"the model's logits are NaN or infinite for {count}", broken)


def _temperature(request: Request) -> float:
    """Return the divisor of the logits. It is 1 for greedy rows: they report the plain log_softmax."""
    return 1.0 if request.params.is_greedy else float(request.params.temperature)


def known_temperature(request: Request, *, of_prompt: bool) -> float:
    """Return the divisor of the logits behind known tokens: a prompt's, or those that a jump has inserted."""
    divisor = request.options.prompt_temperature if of_prompt else None
    return _temperature(request) if divisor is None else float(divisor)


def _on(device: torch.device, rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _alternatives(logits: Tensor, plan: _Plan) -> tuple[Iterable[TopLogprobs], Iterable[ListedLogprobs]]:
    """Return each row's most likely tokens and its named tokens, if its request asks for them."""
    wanted = sorted({*plan.with_top, *plan.with_listed})
    if not wanted:
        return repeat(()), repeat(())
    rows = _on(logits.device, wanted)
    logprobs = scaled_logprobs(logits[rows], plan.settings.temperatures[rows])
    requests = [plan.requests[row] for row in wanted]
    tops: list[TopLogprobs] = [()] * len(logits)
    listed: list[ListedLogprobs] = [()] * len(logits)
    for row, top in zip(wanted, top_logprobs(logprobs, [r.options.top_logprobs_num for r in requests]), strict=True):
        tops[row] = top
    for place, (row, request) in enumerate(zip(wanted, requests, strict=True)):
        listed[row] = listed_logprobs(logprobs[place : place + 1], request)[0]
    return tops, listed


def _kept_ids(logits: Tensor, plan: _Plan) -> list[tuple[int, ...]]:
    """Return the ids of the tokens that the filters keep in each row of `plan.with_kept`, by the definition of a draw.
    logits [R, V]: those that are drawn from."""
    rows, settings = _on(logits.device, plan.with_kept), plan.settings
    filters = (settings.top_k[rows], settings.top_p[rows], settings.min_p[rows])
    logits = logits[rows]
    able = logits > -torch.inf  # not masked
    kept = kept_tokens(logits, settings.temperatures[rows], *filters)
    return [tuple(row.nonzero().squeeze(-1).tolist()) for row in (able if kept is None else able & kept)]


def top_logprobs(logprobs: Tensor, num_wanted: Sequence[int]) -> list[TopLogprobs]:
    """Return for each row of [R, V] its `num_wanted[row]` most likely tokens with their log-probabilities.

    Of equally likely ones the lower id comes first, so that a row's do not depend on how many other rows want.
    """
    most = min(max(num_wanted, default=0), logprobs.shape[-1])
    if most == 0:
        return [()] * len(num_wanted)
    lowest = logprobs.topk(most, dim=-1).values[:, -1:]
    found: list[TopLogprobs] = []
    for row, able, num in zip(logprobs, logprobs >= lowest, num_wanted, strict=True):
        ids = able.nonzero().squeeze(-1)  # ascending; more than wanted where some are equally likely
        values, order = row[ids].sort(descending=True, stable=True)
        found.append(tuple(zip(values[:num].tolist(), ids[order[:num]].tolist(), strict=True)))
    return found


def listed_logprobs(logprobs: Tensor, request: Request) -> tuple[ListedLogprobs, ...]:
    """Return for each row of [R, V] the log-probabilities of the tokens that the request names."""
    ids = request.options.token_ids_logprob
    if not ids:
        return ((),) * len(logprobs)
    columns = logprobs[:, torch.tensor(ids, device=logprobs.device)].tolist()
    return tuple(tuple(zip(row, ids, strict=True)) for row in columns)


def prompt_listed_logprobs(logits: Tensor, request: Request, temperature: float) -> tuple[ListedLogprobs, ...]:
    """Return `listed_logprobs` from logits [R, V] of the rows before known tokens; () if no token is named."""
    if not request.options.token_ids_logprob:
        return ()
    return listed_logprobs(scaled_logprobs(logits, temperature), request)


def prompt_logprobs(
    logits: Tensor, token_ids: Tensor, request: Request, temperature: float
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """Return the log-probabilities of known tokens. logits [R, V]: of the rows before them; token_ids int64 [R];
    temperature: see `known_temperature`."""
    num_top = request.options.top_logprobs_num
    if num_top == 0:
        return tuple(selected_logprobs(logits, token_ids, temperature).tolist()), ()
    logprobs = scaled_logprobs(logits, temperature)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return tuple(chosen.tolist()), tuple(top_logprobs(logprobs, [num_top] * len(token_ids)))
