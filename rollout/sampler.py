"""Chooses the next token of each row. A row's choice depends on its own logits, settings, seed and position alone.

The reported log-probability is log_softmax(logits / temperature) over the full vocabulary of the *model's* logits:
penalties, logit_bias, a grammar and the top-k / top-p / min-p filters shape what is chosen, not what is reported, so
that the trainer, which knows nothing of them, computes the same number. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling import sample_from, scaled_logprobs, selected_logprobs, uniform_noise
from .completion import ListedLogprobs, TopLogprobs
from .errors import BrokenLogits
from .request import Request

# Beyond every logit, and still finite after division by the lowest temperature: a row never loses all its tokens.
_FAR = 1e30


@dataclass(frozen=True)
class Sampled:
    """The choice made for one row."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs
    listed_logprobs: ListedLogprobs = ()
    masked_prob: float | None = None  # with a grammar: among the tokens it allowed, at the temperature
    was_only_choice: bool = False  # it allowed no other


class Sampler:
    """Samples batches; keeps token counts for the requests whose penalties need them."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._counts: dict[Request, _Counts] = {}

    def sample(
        self, logits: Tensor, requests: Sequence[Request], allowed: Sequence[bytes | None] = ()
    ) -> list[Sampled]:
        """One token per row of logits [R, V] (any float dtype), requests in row order. Raises BrokenLogits.

        allowed: per row the tokens that may be chosen, one bit each; None: all. Empty: all in every row.
        """
        device = logits.device
        temperatures = torch.tensor([_temperature(r) for r in requests], dtype=torch.float32, device=device)
        logprobs = scaled_logprobs(logits, temperatures)
        shaped = [i for i, r in enumerate(requests) if self._reshapes(r)]
        wanted = logprobs  # the log of what is sampled from
        masked = [row for row, mask in enumerate(allowed) if mask is not None]
        if shaped or masked:
            wanted = logprobs.clone()
            for row in shaped:
                if allowed and allowed[row] is not None:
                    self._counts.pop(requests[row], None)  # a jump may have replaced tokens that were counted
                reshaped = self._reshape(logits[row].float(), requests[row])
                wanted[row] = torch.log_softmax(reshaped / temperatures[row], -1)
        num_choices = self._mask(wanted, masked, [allowed[row] for row in masked]) if masked else []
        token_ids = self._choose(wanted, requests)
        chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        if bool(chosen.isnan().any()):
            broken = [r.id for r, is_nan in zip(requests, chosen.isnan().tolist(), strict=True) if is_nan]
            count = f"{len(broken)} sequences, {broken[0]!r} first"
            raise BrokenLogits(f"the model's logits are NaN or infinite for {count}")
        tops = top_logprobs(logprobs, [r.options.top_logprobs_num for r in requests])
        listed = [listed_logprobs(logprobs[i : i + 1], r)[0] for i, r in enumerate(requests)]
        ids = token_ids.tolist()
        choices = [Sampled(*row) for row in zip(ids, chosen.tolist(), tops, listed, strict=True)]
        if masked:
            rows = torch.tensor(masked, device=device)
            probs = wanted[rows, token_ids[rows]].exp().tolist()
            for row, prob, num in zip(masked, probs, num_choices, strict=True):
                choices[row] = replace(choices[row], masked_prob=prob, was_only_choice=num == 1)
        return choices

    def forget(self, request: Request) -> None:
        """The request is answered."""
        self._counts.pop(request, None)

    @staticmethod
    def _mask(wanted: Tensor, rows: Sequence[int], allowed: Sequence[bytes | None]) -> list[int]:
        """Take what a grammar does not allow out of these rows of wanted [R, V]; returns how many tokens are left."""
        packed = np.stack([np.frombuffer(mask, np.uint8) for mask in allowed if mask is not None])
        unpacked = np.unpackbits(~packed, axis=-1, bitorder="little", count=wanted.shape[-1])
        banned = torch.from_numpy(unpacked.view(np.bool_)).to(wanted.device)
        for row, its_banned in zip(rows, banned, strict=True):
            wanted[row] = torch.log_softmax(wanted[row].masked_fill_(its_banned, -torch.inf), -1)
        return np.bitwise_count(packed).sum(-1).tolist()

    def _choose(self, wanted: Tensor, requests: Sequence[Request]) -> Tensor:
        device = wanted.device
        greedy = [r.params.is_greedy for r in requests]
        if all(greedy):
            return wanted.argmax(-1)
        seeds = torch.tensor([r.seed for r in requests], device=device)
        positions = torch.tensor([r.sequence.num_tokens for r in requests], device=device)
        noise = uniform_noise(seeds, positions)
        probabilities = wanted.exp()
        plain = [i for i, r in enumerate(requests) if not greedy[i] and not _filters(r)]
        filtered = [i for i, r in enumerate(requests) if not greedy[i] and _filters(r)]
        token_ids = wanted.argmax(-1) if any(greedy) else torch.empty(len(requests), dtype=torch.int64, device=device)
        if len(plain) == len(requests):
            return sample_from(probabilities, noise)
        if plain:
            rows = torch.tensor(plain, device=device)
            token_ids[rows] = sample_from(probabilities[rows], noise[rows])
        if filtered:
            rows = torch.tensor(filtered, device=device)
            token_ids[rows] = _sample_filtered(probabilities[rows], noise[rows], [requests[i] for i in filtered])
        return token_ids

    def _reshapes(self, request: Request) -> bool:
        params = request.params
        below_min = request.sequence.num_output_tokens < params.min_new_tokens
        return bool(params.needs_penalties or params.logit_bias or below_min)

    def _reshape(self, logits: Tensor, request: Request) -> Tensor:
        """Penalties, logit_bias and the ban on stopping early, on one row [V]."""
        params = request.params
        if params.needs_penalties:
            counts = self._counts.get(request)
            if counts is None:
                counts = self._counts[request] = _Counts(logits.shape[-1], logits.device)
            counts.catch_up(request)
            logits = counts.penalise(logits, request)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64, device=logits.device)
            logits = logits.index_add(0, ids, bias.clamp(-_FAR, _FAR).float())
        if request.sequence.num_output_tokens < params.min_new_tokens:
            stops = self._eos_token_ids | set(params.stop_token_ids)
            banned = [id for id in stops if id < len(logits)]  # a tokenizer may know more ids than the model has rows
            logits = logits.index_fill(0, torch.tensor(banned, dtype=torch.int64, device=logits.device), -2 * _FAR)
        return logits


class _Counts:
    """How often each token stands in a sequence, kept up as it grows. Work per step is the new tokens only."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._in_output = torch.zeros(vocab_size, device=device)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # in the prompt or the output
        self._num_counted = 0

    def catch_up(self, request: Request) -> None:
        sequence = request.sequence
        new = torch.tensor(sequence.token_ids[self._num_counted :], device=self._seen.device, dtype=torch.int64)
        self._seen[new] = True
        outputs = new[max(sequence.num_prompt_tokens - self._num_counted, 0) :]
        self._in_output.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.float32))
        self._num_counted = sequence.num_tokens

    def penalise(self, logits: Tensor, request: Request) -> Tensor:
        params = request.params
        repetition = params.repetition_penalty
        punished = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self._seen, punished, logits)
        logits = logits - self._in_output * params.frequency_penalty
        return logits - (self._in_output > 0).float() * params.presence_penalty


def _temperature(request: Request) -> float:
    """What logits are divided by: greedy rows report the plain log_softmax."""
    return 1.0 if request.params.is_greedy else float(request.params.temperature)


def _filters(request: Request) -> bool:
    params = request.params
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _sample_filtered(probabilities: Tensor, noise: Tensor, requests: Sequence[Request]) -> Tensor:
    """Sample among the tokens that top-k, top-p and min-p all keep, each judged on the unfiltered probabilities."""
    device, vocab_size = probabilities.device, probabilities.shape[-1]
    top_k = [min(r.params.top_k, vocab_size) if r.params.top_k > 0 else vocab_size for r in requests]
    column = {
        "k": torch.tensor(top_k, device=device),
        "p": torch.tensor([r.params.top_p for r in requests], dtype=torch.float64, device=device),
        "m": torch.tensor([r.params.min_p for r in requests], dtype=torch.float32, device=device),
    }
    limits = {name: values.unsqueeze(-1) for name, values in column.items()}
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.double().cumsum(-1) - ranked
    keep = torch.arange(vocab_size, device=device) < limits["k"]
    keep &= (mass_before <= limits["p"]) | (limits["p"] >= 1.0)
    keep &= ranked >= ranked[:, :1] * limits["m"]
    choice = sample_from(ranked * keep, noise)
    return order.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def top_logprobs(logprobs: Tensor, num_wanted: Sequence[int]) -> list[TopLogprobs]:
    """For each row of [R, V] its `num_wanted[row]` most likely tokens with their log-probabilities."""
    most = min(max(num_wanted, default=0), logprobs.shape[-1])
    if most == 0:
        return [()] * len(num_wanted)
    values, ids = logprobs.topk(most, dim=-1)
    rows = zip(values.tolist(), ids.tolist(), num_wanted, strict=True)
    return [tuple(zip(row_values[:num], row_ids[:num], strict=True)) for row_values, row_ids, num in rows]


def listed_logprobs(logprobs: Tensor, request: Request) -> tuple[ListedLogprobs, ...]:
    """For each row of [R, V] the log-probabilities of the tokens that the request names."""
    ids = request.options.token_ids_logprob
    if not ids:
        return ((),) * len(logprobs)
    columns = logprobs[:, torch.tensor(ids, device=logprobs.device)].tolist()
    return tuple(tuple(zip(row, ids, strict=True)) for row in columns)


def prompt_listed_logprobs(logits: Tensor, request: Request) -> tuple[ListedLogprobs, ...]:
    """The same of rows of logits [R, V] before prompt tokens; nothing where none are named."""
    if not request.options.token_ids_logprob:
        return ()
    return listed_logprobs(scaled_logprobs(logits, _temperature(request)), request)


def prompt_logprobs(
    logits: Tensor, token_ids: Tensor, request: Request
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """Log-probabilities of known tokens: logits [R, V] of the rows before them, token_ids int64 [R]."""
    temperature = _temperature(request)
    num_top = request.options.top_logprobs_num
    if num_top == 0:
        return tuple(selected_logprobs(logits, token_ids, temperature).tolist()), ()
    logprobs = scaled_logprobs(logits, temperature)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return tuple(chosen.tolist()), tuple(top_logprobs(logprobs, [num_top] * len(token_ids)))
