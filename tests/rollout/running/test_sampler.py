"""Tests of sampled tokens against exact probabilities, and of reported numbers against the trainer's formula."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from lockstep.kernels.sampling.logprobs import scaled_logprobs, selected_logprobs
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.running.batch import SampledRow
from lockstep.rollout.running.sampler import Sampler, known_temperature, prompt_logprobs, refuse_broken, top_logprobs
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

VOCAB = 24
NUM_DRAWS = 6_000
EOS = 5


def a_request(seed: int = 0, prompt=(1, 2, 3), output=(), top: int = 0, **params: object) -> Request:
    sequence = Sequence("r", prompt)
    sequence.token_ids += output
    options = RequestOptions(top_logprobs_num=top)
    return Request(sequence, SamplingParams(**params), options, 0, seed, 0.0, 0, None)


def some_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def rows(requests: list[Request]) -> list[SampledRow]:
    return [SampledRow(request) for request in requests]


def choose(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return [s.token_id for s in Sampler(frozenset({EOS})).sample(logits, rows(requests))]


def naive_probabilities(logits: list[float], temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0) -> list[float]:
    """Apply the filters one by one to plain numbers, each to the full distribution."""
    weights = [math.exp(x / temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept, before = set(), 0.0
    for rank, token in enumerate(order):
        in_top_k = top_k == -1 or rank < top_k
        if in_top_k and before <= top_p and p[token] >= min_p * p[order[0]]:
            kept.add(token)
        before += p[token]
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.99},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "plain")
def test_draws_follow_the_exact_distribution(settings):
    stats = pytest.importorskip("scipy.stats")
    logits = some_logits()
    expected = naive_probabilities(logits[0].tolist(), **settings)
    requests = [a_request(seed, **settings) for seed in range(NUM_DRAWS)]
    drawn = torch.bincount(torch.tensor(choose(logits.expand(NUM_DRAWS, -1), requests)), minlength=VOCAB).tolist()
    assert all(count == 0 for count, p in zip(drawn, expected, strict=True) if p == 0)
    common = [i for i in range(VOCAB) if expected[i] * NUM_DRAWS >= 5]
    rare = [i for i in range(VOCAB) if 0 < expected[i] * NUM_DRAWS < 5]
    observed = [drawn[i] for i in common] + [sum(drawn[i] for i in rare)] * bool(rare)
    wanted = [expected[i] * NUM_DRAWS for i in common] + [sum(expected[i] for i in rare) * NUM_DRAWS] * bool(rare)
    assert len(observed) > 1
    assert stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-3


def test_positions_of_one_request_are_as_good_as_seeds():
    stats = pytest.importorskip("scipy.stats")
    logits = some_logits()
    expected = naive_probabilities(logits[0].tolist(), top_k=5)
    requests = [a_request(3, output=[0] * position, top_k=5) for position in range(5000)]
    drawn = torch.bincount(torch.tensor(choose(logits.expand(5000, -1), requests)), minlength=VOCAB).tolist()
    kept = [i for i in range(VOCAB) if expected[i]]
    assert stats.chisquare([drawn[i] for i in kept], [expected[i] * 5000 for i in kept]).pvalue > 1e-3


def test_filters_combine_and_the_most_likely_token_always_stays():
    logits = some_logits()
    requests = [a_request(s, top_k=1) for s in range(50)] + [a_request(s, min_p=1.0) for s in range(50)]
    requests += [a_request(s, top_p=1e-9) for s in range(50)]
    assert set(choose(logits.expand(150, -1), requests)) == {int(logits.argmax())}


def test_top_k_beyond_the_vocabulary_keeps_everything():
    logits = some_logits().expand(300, -1)
    plain = choose(logits, [a_request(s, top_k=10_000) for s in range(300)])
    assert len(set(plain)) > 5


def test_equal_logits_are_all_kept_or_cut_to_k():
    chosen = choose(torch.zeros(4000, VOCAB), [a_request(s, top_k=3) for s in range(4000)])
    assert sorted(set(chosen)) == [0, 1, 2]


def test_same_request_gets_the_same_token_whatever_its_batch_mates():
    settings = [
        {},
        {"top_p": 0.7},
        {"temperature": 0.0},
        {"presence_penalty": 1.0},
        {"top_k": 3, "min_new_tokens": 9},
        {"logit_bias": {4: 2.0}},
    ]
    logits = some_logits(60)
    requests = [a_request(seed, top=seed % 3, output=[1, 2], **settings[seed % 6]) for seed in range(60)]
    together = Sampler(frozenset({EOS})).sample(logits, rows(requests))
    backwards = Sampler(frozenset({EOS})).sample(logits.flip(0), rows(requests[::-1]))[::-1]
    alone = [Sampler(frozenset({EOS})).sample(logits[i : i + 1], rows([r]))[0] for i, r in enumerate(requests)]
    assert together == backwards == alone


def test_different_seeds_and_positions_draw_differently():
    logits = some_logits().expand(200, -1)
    assert len(set(choose(logits, [a_request(seed) for seed in range(200)]))) > 5
    assert len(set(choose(logits, [a_request(0, output=[0] * n) for n in range(200)]))) > 5


def test_greedy_takes_the_largest_logit_and_reports_the_plain_log_softmax():
    logits = some_logits(5)
    sampled = Sampler(frozenset()).sample(
        logits, rows([a_request(temperature=0.0, top_p=0.5, top_k=2) for _ in range(5)])
    )
    assert [s.token_id for s in sampled] == logits.argmax(-1).tolist()
    assert [s.logprob for s in sampled] == scaled_logprobs(logits, 1.0).amax(-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 2},
        {"top_p": 0.3, "min_p": 0.1},
        {"presence_penalty": 2.0},
        {"logit_bias": {3: 50.0}},
        {"min_new_tokens": 8},
        {"repetition_penalty": 1.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reported_logprob_is_that_of_the_models_logits_at_the_temperature(settings, dtype):
    logits = some_logits(20).to(dtype)
    requests = [a_request(s, output=[1, 4], temperature=0.7, **settings) for s in range(20)]
    for row, sampled in enumerate(Sampler(frozenset({EOS})).sample(logits, rows(requests))):
        token_id = torch.tensor([sampled.token_id])
        assert sampled.logprob == selected_logprobs(logits[row : row + 1], token_id, 0.7).item()
        exact = torch.log_softmax(logits[row].double() / 0.7, -1)[token_id].item()
        assert sampled.logprob == pytest.approx(exact, abs=1e-5)


def naive_reshaped(logits: list[float], prompt, output, params: SamplingParams, eos=(EOS,)) -> list[float]:
    out = list(logits)
    for token in range(len(out)):
        if token in prompt or token in output:
            by = params.repetition_penalty
            out[token] = out[token] / by if out[token] > 0 else out[token] * by
        out[token] -= params.frequency_penalty * output.count(token)
        out[token] -= params.presence_penalty * (token in output)
        out[token] += (params.logit_bias or {}).get(token, 0.0)
        if len(output) < params.min_new_tokens and token in (*eos, *params.stop_token_ids):
            out[token] = -math.inf
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.8},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.4},
        {"logit_bias": {0: 4.0, 9: -7.5, 23: 3}},
        {"logit_bias": {0: 4, 9: -7}},
        {"min_new_tokens": 30, "stop_token_ids": [2, 7]},
        {
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
            "logit_bias": {1: 2.0},
            "min_new_tokens": 4,
        },
    ],
    ids=lambda s: ",".join(s),
)
def test_reshaped_choice_equals_the_naive_reference_as_the_output_grows(settings):
    """Sample greedily from reshaped logits, step by step, with one sampler that keeps its counts."""
    request = a_request(prompt=(1, 2, 3, 3), temperature=0.0, max_new_tokens=100, **settings)
    sampler = Sampler(frozenset({EOS}))
    steps = some_logits(40, seed=3)
    moved = 0
    for logits in steps:
        output = request.sequence.output_ids
        naive = naive_reshaped(logits.tolist(), (1, 2, 3, 3), output, request.params)
        expected = max(range(VOCAB), key=naive.__getitem__)
        moved += expected != int(logits.argmax())
        [sampled] = sampler.sample(logits[None], rows([request]))
        assert sampled.token_id == expected
        request.sequence.token_ids.append(expected)
    assert moved > 0


def test_counts_that_are_made_late_equal_those_kept_from_the_start():
    settings = {"frequency_penalty": 1.0, "temperature": 0.0}
    kept, sampler, logits = a_request(**settings), Sampler(frozenset()), some_logits(12, seed=4)
    for row in logits[:-1]:
        kept.sequence.token_ids.append(sampler.sample(row[None], rows([kept]))[0].token_id)
    fresh = a_request(output=kept.sequence.output_ids, **settings)
    assert choose(logits[-1:], [fresh]) == [sampler.sample(logits[-1:], rows([kept]))[0].token_id]


def test_banned_until_min_new_tokens_then_allowed():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 7], logits[0, 9] = 9.0, 8.0, 7.0
    settings = {"temperature": 0.0, "min_new_tokens": 2, "stop_token_ids": [7]}
    assert [choose(logits, [a_request(output=[0] * n, **settings)])[0] for n in range(4)] == [9, 9, EOS, EOS]


def test_stop_ids_and_eos_beyond_the_vocabulary_ban_nothing():
    request = a_request(temperature=0.0, min_new_tokens=3, stop_token_ids=[VOCAB, 10_000])
    assert Sampler(frozenset({VOCAB + 5})).sample(some_logits(), rows([request]))[0].token_id == int(
        some_logits().argmax()
    )


def test_banning_every_token_still_chooses_one():
    request = a_request(min_new_tokens=3, stop_token_ids=list(range(VOCAB)))
    assert 0 <= choose(some_logits(), [request])[0] < VOCAB


class ConvertedNumbers(TorchFunctionMode):
    """A mode that counts the numbers of Python that torch.tensor converts."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num += result.numel() if func is torch.tensor else 0
        return result


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": dict.fromkeys(range(500), 1.0)},
        {"min_new_tokens": 100, "stop_token_ids": list(range(499))},
    ],
    ids=["bias", "stops"],
)
def test_long_settings_are_converted_once_for_all_steps_and_samples(settings):
    first, sampler = a_request(**settings), Sampler(frozenset({EOS}))
    requests = [first, *(replace(first) for _ in range(7))]

    def num_converted() -> int:
        with ConvertedNumbers() as converted:
            sampler.sample(some_logits(len(requests), 500), rows(requests))
        return converted.num

    assert 499 <= num_converted() < 1200  # a bias has a number for each id
    assert num_converted() < 200
    sampler.forget(requests.pop(0))
    assert num_converted() < 200


def test_requests_that_follow_an_answered_one_have_their_own_bias():
    sampler = Sampler(frozenset())
    for token in range(VOCAB):  # the id of settings may come again once they are gone
        request = a_request(logit_bias={token: 1e30})
        assert sampler.sample(some_logits(), rows([request]))[0].token_id == token
        sampler.forget(request)


def test_bias_larger_than_a_float_can_hold_still_chooses_that_token():
    for temperature in (0.0, 1e-5, 1.0):
        request = a_request(temperature=temperature, logit_bias={3: 1e300, 4: -1e300})
        assert choose(some_logits(), [request]) == [3]


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e6}, {"temperature": 2e-6}, {"repetition_penalty": 1e-6}], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_bans_hold_at_the_limits_of_settings(extreme, masked):
    allowed = [2, 7, EOS, 9]
    bans = {"logit_bias": {2: -math.inf, 9: -1e30}, "min_new_tokens": 50, "max_new_tokens": 60}
    requests = [a_request(seed, **bans, **extreme) for seed in range(40)]
    logits = some_logits(1).repeat(40, 1) * 100
    for request in requests:
        request.sequence.token_ids += range(VOCAB)
    masks = [packed(allowed)] * 40 if masked else []
    sampled = Sampler(frozenset({EOS})).sample(logits, rows(requests), masks)
    refuse_broken([r.id for r in requests], [s.logprob for s in sampled])
    drawn = {one.token_id for one in sampled}
    assert drawn == {7} if masked else drawn.isdisjoint({2, 9, EOS})


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_are_refused_and_never_leave_the_vocabulary(settings, broken):
    logits = some_logits(3)
    logits[1, 7] = broken
    requests = [a_request(s, **settings) for s in range(3)]
    sampled = Sampler(frozenset({EOS})).sample(logits, rows(requests))
    assert all(0 <= s.token_id < VOCAB for s in sampled)
    with pytest.raises(BrokenLogits, match="NaN or infinite for 1 sequences, 'r' first"):
        refuse_broken([r.id for r in requests], [s.logprob for s in sampled])


def test_alternatives_and_named_tokens_have_the_bits_of_the_reported_logprob():
    logits = some_logits(6)
    for dtype in (torch.float32, torch.bfloat16):
        requests = [a_request(s, top=VOCAB * (s % 2), temperature=0.7) for s in range(6)]
        for request in requests[::3]:
            request.options = RequestOptions(top_logprobs_num=VOCAB, token_ids_logprob=tuple(range(VOCAB)))
        for sampled, request in zip(
            Sampler(frozenset()).sample(logits.to(dtype), rows(requests)), requests, strict=True
        ):
            top = {id: value for value, id in sampled.top_logprobs}
            named = {id: value for value, id in sampled.listed_logprobs}
            assert len(top) == request.options.top_logprobs_num and len(named) in (0, VOCAB)
            assert all(found[sampled.token_id] == sampled.logprob for found in (top, named) if found)


def test_settings_follow_the_batch_as_requests_come_go_and_change_places():
    sampler, logits = Sampler(frozenset({EOS})), some_logits(4)
    first = [a_request(s, temperature=0.5 + s, top_k=[-1, 3][s % 2]) for s in range(4)]
    second = [first[3], a_request(9, temperature=0.0), first[0]]
    for requests in (first, first, second, first[:1], first):
        for request in requests:
            request.sequence.token_ids.append(1)
        together = sampler.sample(logits[: len(requests)], rows(requests))
        alone = [Sampler(frozenset({EOS})).sample(logits[i : i + 1], rows([r]))[0] for i, r in enumerate(requests)]
        assert together == alone
        sampler.forget(requests[-1])


def packed(ids: list[int], vocab: int = VOCAB) -> bytes:
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"logit_bias": {4: 100.0}}], ids=str)
def test_a_grammars_mask_shapes_the_choice_and_not_what_is_reported(settings):
    logits = some_logits(40)
    ids = [1, 7, 11, 23]
    requests = [a_request(s, **settings) for s in range(40)]
    allowed = [packed(ids) if s % 2 else packed([9]) if s % 4 else None for s in range(40)]
    chosen = Sampler(frozenset()).sample(logits, rows(requests), allowed)
    plain = Sampler(frozenset()).sample(logits, rows(requests))
    for row, (sampled, mask, free) in enumerate(zip(chosen, allowed, plain, strict=True)):
        temperature = settings.get("temperature", 1.0) or 1.0
        id = torch.tensor([sampled.token_id])
        assert sampled.logprob == selected_logprobs(logits[row : row + 1], id, temperature).item()
        if mask is None:
            assert sampled == free and sampled.masked_prob is None
            continue
        kept = ids if row % 2 else [9]
        exact = torch.softmax(logits[row, kept].double(), -1)
        assert sampled.token_id in kept and sampled.was_only_choice == (len(kept) == 1)
        assert sampled.masked_prob == pytest.approx(exact[kept.index(sampled.token_id)].item(), rel=1e-5)


def test_tokens_that_a_mask_does_not_reach_are_not_chosen():
    logits = torch.zeros(50, 100)
    logits[:, 64:] = 20.0
    requests = [a_request(s) for s in range(50)]
    sampled = Sampler(frozenset()).sample(logits, rows(requests), [packed(list(range(30)), 32)] * 50)
    assert max(s.token_id for s in sampled) < 30


def test_alternatives_are_the_most_likely_tokens_with_the_reported_logprobs():
    logits = some_logits(3)
    logprobs = torch.log_softmax(logits / 0.7, -1)
    requests = [a_request(top=n, temperature=0.7, logit_bias={0: 9.0}) for n in (0, 2, 1000)]
    sampled = Sampler(frozenset()).sample(logits, rows(requests))
    assert [len(s.top_logprobs) for s in sampled] == [0, 2, VOCAB]
    for row in (1, 2):
        values, ids = zip(*sampled[row].top_logprobs, strict=True)
        assert list(ids) == logprobs[row].argsort(descending=True)[: len(ids)].tolist()
        torch.testing.assert_close(torch.tensor(values), logprobs[row][list(ids)])
        assert values == tuple(sorted(values, reverse=True))


def test_prompt_logprobs_are_those_of_the_trainers_formula():
    logits, ids = some_logits(4), torch.tensor([3, 0, 23, 7])
    expected = selected_logprobs(logits, ids, 0.7).tolist()
    plain, no_top = prompt_logprobs(logits, ids, a_request(temperature=0.7), 0.7)
    with_top, top = prompt_logprobs(logits, ids, a_request(temperature=0.7, top=2), 0.7)
    assert list(plain) == list(with_top) == expected
    assert no_top == () and [len(t) for t in top] == [2] * 4


def test_a_request_may_score_its_prompt_at_another_temperature_and_its_jumps_never():
    request = a_request(temperature=0.7)
    assert known_temperature(request, of_prompt=True) == known_temperature(request, of_prompt=False) == 0.7
    request.options = replace(request.options, prompt_temperature=1)
    assert known_temperature(request, of_prompt=True) == 1 and known_temperature(request, of_prompt=False) == 0.7
    for wrong in (0, 9e-7, -1.0, float("inf"), float("nan"), True, "1", 1e39, 10**400):  # the last ones ended the loop
        with pytest.raises(ValueError, match="prompt_temperature must be a positive number"):
            RequestOptions(prompt_temperature=wrong)


def test_equally_likely_tokens_come_in_the_order_of_their_ids_whatever_other_rows_want():
    logprobs = torch.full((2, 1000), -7.0)
    logprobs[:, torch.tensor([900, 17, 500, 3])] = -1.0
    logprobs[:, 40] = -0.5
    for others in range(1000):
        mine, _ = top_logprobs(logprobs, [3, others])
        assert mine == ((-0.5, 40), (-1.0, 3), (-1.0, 17)), others
    _, both = top_logprobs(logprobs, [0, 7])
    assert [token for _, token in both] == [40, 3, 17, 500, 900, 0, 1]


class Read(list):
    """Token ids that count how many of them were read."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_counts_of_a_request_with_a_grammar_go_on_and_are_made_anew_where_a_jump_has_replaced_tokens():
    """Each step draws the tokens of a sampler that counts all tokens anew, and reads the new ones only."""
    sampler, logits, mask = Sampler(frozenset({EOS})), some_logits(), np.full(3, 0xFF, np.uint8).tobytes()
    request = a_request(prompt=range(20), seed=7, frequency_penalty=1.5, repetition_penalty=1.3)
    sequence = request.sequence

    def sample() -> int:
        """Draw a token, append it, and return the number of tokens that were read."""
        [expected] = Sampler(frozenset({EOS})).sample(logits, rows([request]), [mask])
        sequence.token_ids = Read(sequence.token_ids)
        [found] = sampler.sample(logits, rows([request]), [mask])
        assert found == expected
        num_read = sequence.token_ids.num_read
        sequence.token_ids.append(found.token_id)
        return num_read

    assert [sample() for _ in range(6)] == [20, 1, 1, 1, 1, 1]
    sequence.begin_jump(0, [3, 3, 4])
    assert sample() == 4, "a jump that only appends"
    sequence.settle_jump()
    sequence.begin_jump(2, [9, 9])
    assert sample() == 30, "tokens that were counted are gone"
    sequence.undo_jump()
    assert sample() == sequence.num_tokens - 1
    assert sample() == 1
    request.cut_output(1)
    assert [sample(), sample()] == [21, 1]
