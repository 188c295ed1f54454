"""Tests of the tokens that filters keep, as an answer reports them: a trainer leaves out the same ones."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import Begun, RequestOptions
from lockstep.rollout.running.batch import SampledRow
from lockstep.rollout.running.sampler import Sampler
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence

VOCAB = 24
KEPT = RequestOptions(max_kept_ids=10_000)
FILTERS = [
    {"top_p": 0.7},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "temperature": 1.6},
    {"temperature": 0.0},
    {"top_k": 100},
]


def a_request(seed: int, **params: object) -> Request:
    return Request(Sequence("r", (1, 2, 3)), SamplingParams(**params), KEPT, 0, seed, 0.0, 0, None)


def kept_by_plain_numbers(
    logits: list[float], temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    if temperature == 0:
        return [logits.index(max(logits))]
    weights = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if (top_k == -1 or rank < top_k) and before <= top_p and weights[token] >= min_p * weights[order[0]]:
            kept.append(token)
        before += weights[token]
    return sorted(kept)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_draw_reports_what_its_filters_keep_and_is_the_draw_among_these_alone(params):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    requests = [a_request(seed, **params) for seed in range(6)]
    choices = Sampler(frozenset()).sample(logits, [SampledRow(request) for request in requests])
    for row, (request, choice) in enumerate(zip(requests, choices, strict=True)):
        assert list(choice.kept_ids) == kept_by_plain_numbers(logits[row].tolist(), **params)
        alone = torch.full((1, VOCAB), -1e30)
        alone[0, list(choice.kept_ids)] = logits[row, list(choice.kept_ids)]
        same = a_request(request.seed, temperature=params.get("temperature", 1.0))
        [among_these] = Sampler(frozenset()).sample(alone, [SampledRow(same)])
        assert among_these.token_id == choice.token_id and choice.token_id in choice.kept_ids


def test_masked_tokens_are_not_kept_and_without_a_filter_nothing_is_reported():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    allowed = (0b101010).to_bytes(VOCAB // 8, "little")
    requests = [a_request(0, top_k=20), a_request(1)]
    rows = [SampledRow(request) for request in requests]
    filtered, free = Sampler(frozenset()).sample(logits, rows, [allowed, None])
    assert filtered.kept_ids == (1, 3, 5) and free.kept_ids == ()


def per_token(completion: Completion) -> list[list[int]]:
    kept = completion.kept_ids
    assert kept is not None
    starts = [0, *kept.ends][:-1]
    assert len(kept.ends) == len(completion.token_ids) and kept.ends[-1] == len(kept.ids)
    return [kept.ids[start:end].tolist() for start, end in zip(starts, kept.ends, strict=True)]


@pytest.mark.parametrize("stages", [1, 2])
def test_drafts_retraction_and_stages_change_no_kept_id(model, in_stages, stages):
    params = SamplingParams(max_new_tokens=24, temperature=20.0, top_p=0.6, ignore_eos=True, sampling_seed=7)
    engine = Engine(model, EngineConfig(kv_cache="32 blocks"), make_runner=in_stages(stages))
    options = RequestOptions(max_kept_ids=100_000, speculation=False)
    [plain] = engine.generate([[7, 8, 9]], params, options=options)
    wanted = per_token(plain)
    assert all(token in kept for token, kept in zip(plain.token_ids, wanted, strict=True))
    assert len({len(kept) for kept in wanted}) > 1, "one size says little"
    [drafted] = engine.generate(
        [[7, 8, 9]], params, options=RequestOptions(max_kept_ids=100_000, draft_token_ids=plain.token_ids)
    )
    assert (drafted.token_ids, per_token(drafted)) == (plain.token_ids, wanted)
    engine.add([7, 8, 9], params, options=options)
    while engine.live_sequences()[0].num_output_tokens < 5:
        engine.step()
    engine.pause_generation("retract")
    engine.continue_generation()
    while not (answers := engine.step()):
        assert engine.has_work
    assert (answers[0].num_retractions, per_token(answers[0])) == (1, wanted)


def test_an_answer_that_would_report_too_many_ends_and_says_so(model):
    engine = Engine(model, EngineConfig(kv_cache="32 blocks"))
    params = SamplingParams(max_new_tokens=24, top_p=0.9, ignore_eos=True, sampling_seed=7)
    [whole] = engine.generate([[7, 8, 9]], params, options=RequestOptions(max_kept_ids=100_000))
    sizes = list(map(len, per_token(whole)))
    limit = sum(sizes[:10])
    [cut] = engine.generate([[7, 8, 9]], params, options=RequestOptions(max_kept_ids=limit))
    assert cut.finish_reason is not None and cut.finish_reason.type == "abort"
    assert f"more than {limit} tokens" in str(cut.finish_reason.message) and "max_kept_ids" in str(
        cut.finish_reason.message
    )
    assert cut.token_ids == whole.token_ids[:11]
    [free] = engine.generate([[7, 8, 9]], SamplingParams(max_new_tokens=2), options=KEPT)
    assert free.kept_ids is None
    with pytest.raises(ValueError, match="max_kept_ids must be a whole number from 0 on, not -1"):
        RequestOptions(max_kept_ids=-1)


def test_an_answer_that_goes_on_reports_none(model):
    engine = Engine(model, EngineConfig(kv_cache="32 blocks"))
    begun = Begun((4,), (-1.0,), (("default", None, 0),), 3)
    with pytest.raises(ValueError, match="no alternatives"):
        engine.add(
            [7, 8], SamplingParams(max_new_tokens=4, top_p=0.5), options=RequestOptions(max_kept_ids=9, begun=begun)
        )
