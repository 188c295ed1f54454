"""Receipts of answers: their fields, their chain, and the spans of their weights and KV."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from lockstep.kernels.sampling.draws import derive_seed
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.kept_kv import KeptKV, KVStart
from lockstep.rollout.loop import receipts
from lockstep.rollout.receipt import (
    batch_hash,
    breaks_in_chain,
    digest_of,
    guarantee,
    is_in_full,
    seal_is_whole,
    sealed,
    settings_of,
)
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

ASKED = RequestOptions(return_receipt=True)
PROMPT = [3, 17, 90, 4, 55]


@pytest.fixture
def make_engine(make_model, restore_threads):
    torch.set_num_threads(1)

    def make(family: str = "qwen3", **config: object) -> Engine:
        return Engine(make_model(family).train(), EngineConfig(kv_cache="64 blocks", max_num_seqs=8, **config))

    return make


def test_an_answer_has_a_receipt_only_where_it_is_asked_for(make_engine):
    engine = make_engine()
    params = SamplingParams(max_new_tokens=4)
    assert [c.receipt for c in engine.generate(PROMPT, params)] == [None]
    assert engine.generate(PROMPT, params, options=ASKED)[0].receipt is not None
    always = make_engine(receipts="digests")
    [given] = always.generate(PROMPT, params)
    assert not is_in_full(given.receipt) and seal_is_whole(given.receipt)
    assert given.receipt["output"] == digest_of(given.token_ids)
    refused = RequestOptions(return_receipt=False)
    assert always.generate(PROMPT, params, options=refused)[0].receipt is None
    assert always.metrics.num_receipts == 1 and always.metrics.receipt_seconds > 0


def test_a_receipt_states_the_number_of_threads_of_its_own_time(make_engine):
    """It stated that of the first receipt."""
    engine = make_engine(invariant=False, receipts="tokens")
    for num_threads in (1, 2, 1):
        torch.set_num_threads(num_threads)
        [answer] = engine.generate(PROMPT, SamplingParams(max_new_tokens=4))
        assert answer.receipt["guarantee"] == guarantee(engine.model)
        assert answer.receipt["guarantee"]["threads"] == num_threads


@pytest.mark.parametrize("wrong", ["tokens", 1, 0.5])
def test_another_kind_of_receipt_is_refused(wrong):
    with pytest.raises(ValueError, match="return_receipt must be true, false"):
        RequestOptions(return_receipt=wrong)
    with pytest.raises(ValueError, match="receipts must be one of off, tokens, digests"):
        EngineConfig(receipts=wrong if wrong != "tokens" else "on")


def test_a_receipt_says_what_the_answer_follows_from(make_engine):
    engine = make_engine()
    engine.weights.commit_weights("7", "d7")
    params = SamplingParams(max_new_tokens=6, temperature=0.7, top_p=0.9, n=2, sampling_seed=3, logit_bias={4: -0.1})
    answers = engine.generate(PROMPT, params, options=ASKED)
    for index, answer in enumerate(answers):
        receipt = answer.receipt
        assert json.loads(json.dumps(receipt)) == receipt
        assert (receipt["format"], receipt["index"], receipt["seed"]) == (1, index, derive_seed(3, index))
        assert (receipt["prompt"], receipt["output"]) == (PROMPT, list(answer.token_ids))
        bits = torch.tensor(receipt["logprobs"], dtype=torch.uint32)
        assert bits.view(torch.float32).tolist() == list(answer.logprobs)
        assert receipt["guarantee"] == guarantee(engine.model)
        assert receipt["spans"] == [{"version": "7", "digest": "d7", "start": 0, "end": 6, "kept_kv": []}]
        assert settings_of(receipt["settings"]) == replace(params, n=1, sampling_seed=None)
        assert receipt["finish"] == {"type": "length", "matched": None}
        assert seal_is_whole(receipt)
        assert not seal_is_whole({**receipt, "seed": 1})
        assert seal_is_whole(sealed({**receipt, "seed": 1}))


def test_receipts_chain_in_the_order_of_the_answers(make_engine):
    engine = make_engine()
    lengths = [SamplingParams(max_new_tokens=num) for num in (5, 2, 4)]
    made = [c.receipt for c in engine.generate([PROMPT] * 3, lengths, options=ASKED)]
    chain = sorted(made, key=lambda receipt: receipt["number"])
    assert [receipt["number"] for receipt in chain] == [0, 1, 2] and chain[0]["previous"] == ""
    assert breaks_in_chain(chain) == []
    other = [chain[0], sealed({**chain[1], "seed": 9}), chain[2]]
    [text] = breaks_in_chain(other[::-1])
    assert text == f"receipt 2 of engine {chain[0]['engine']} does not follow on receipt 1"
    forged = sealed({**chain[1], "previous": "f" * 64, "id": "another"})
    assert len(breaks_in_chain([chain[0], forged])) == 1
    assert breaks_in_chain([chain[0], forged, chain[1]]) == [
        f"2 different receipts are number 1 of engine {chain[0]['engine']}",
        f"receipt 1 of engine {chain[0]['engine']} does not follow on receipt 0",
    ]
    assert breaks_in_chain([*chain, chain[1]]) == [], "one of them twice"
    assert len(breaks_in_chain([sealed({**chain[0], "previous": "f" * 64})])) == 1
    assert (
        breaks_in_chain([chain[0], chain[2], *(c.receipt for c in make_engine().generate(PROMPT, options=ASKED))]) == []
    )
    assert batch_hash(chain) != batch_hash(other) and len(batch_hash(chain)) == 64


def run(engine: Engine, num_tokens: int) -> None:
    """Run steps until the only live sequence has so many output tokens."""
    while not any(r.sequence.num_output_tokens >= num_tokens for r in engine.parts.sequences.requests()):
        assert engine.step() == []


def finished(engine: Engine) -> dict:
    while True:
        if done := engine.step():
            return done[0].receipt


def spans(receipt: dict) -> list[tuple]:
    return [
        (s["version"], s["start"], s["end"], [(kept["digest"], kept["end"]) for kept in s["kept_kv"]])
        for s in receipt["spans"]
    ]


def test_kv_that_a_commit_keeps_is_in_the_receipt_with_its_weights_and_its_rows(make_engine):
    engine = make_engine(speculation="off")
    engine.weights.commit_weights("1", "d1")
    engine.add(PROMPT, SamplingParams(max_new_tokens=9), options=ASKED)
    run(engine, 3)
    engine.weights.commit_weights("2", "d2")
    run(engine, 5)
    engine.weights.commit_weights("3", "d3")
    assert spans(finished(engine)) == [
        ("1", 0, 3, []),
        ("2", 3, 5, [("d1", 7)]),
        ("3", 5, 9, [("d1", 7), ("d2", 9)]),
    ]


def test_kv_that_is_computed_again_is_not_in_it(make_engine):
    engine = make_engine(speculation="off")
    engine.weights.commit_weights("1", "d1")
    engine.add(PROMPT, SamplingParams(max_new_tokens=9), options=ASKED)
    run(engine, 3)
    engine.pause_generation("retract")
    engine.weights.commit_weights("2", "d2")
    engine.continue_generation()
    run(engine, 5)
    engine.weights.commit_weights("3", "d3")
    run(engine, 6)
    engine.pause_generation("retract")
    engine.continue_generation()
    assert spans(finished(engine)) == [
        ("1", 0, 3, []),
        ("2", 3, 5, []),
        ("3", 5, 6, [("d2", 9)]),
        ("3", 6, 9, []),
    ]


def test_a_begun_answer_keeps_the_origin_of_its_kv(make_engine):
    engine = make_engine(speculation="off")
    engine.weights.commit_weights("1", "d1")
    [rid] = engine.add(PROMPT, SamplingParams(max_new_tokens=9), options=ASKED)
    run(engine, 3)
    engine.weights.commit_weights("2", "d2")
    run(engine, 5)
    engine.abort_request(rid)
    [part] = engine.step()
    assert part.kv_starts == (KVStart(3, (KeptKV("1", "d1", 7),)),)
    [whole] = engine.generate([PROMPT], SamplingParams(max_new_tokens=9), options=replace(ASKED, begun=part))
    assert spans(whole.receipt) == [("1", 0, 3, []), ("2", 3, 5, [("d1", 7)]), ("2", 5, 9, [])]
    assert whole.kv_starts == (*part.kv_starts, KVStart(5, ()))


def test_tokens_over_kept_kv_are_streamed_as_those_of_several_weights(make_engine):
    engine = make_engine(speculation="off")
    engine.weights.commit_weights("1", "d1")
    chunks = engine.stream(PROMPT, SamplingParams(max_new_tokens=4))
    before = next(chunks)
    engine.weights.commit_weights("2", "d2")
    assert [chunk.weight_digest for chunk in (before, *chunks) if chunk.token_ids] == ["d1", None, None, None]


def test_a_prompt_half_read_under_older_weights_is_in_it(make_engine):
    engine = make_engine(chunked_prefill_size=16)
    engine.weights.commit_weights("1", "d1")
    engine.add(list(range(40)), SamplingParams(max_new_tokens=3), options=ASKED)
    engine.step()
    engine.weights.commit_weights("2", "d2")
    assert spans(finished(engine)) == [("2", 0, 3, [("d1", 16)])]


def test_a_verified_answer_has_one_span_and_the_same_weights_again_are_no_other_ones(make_engine):
    engine = make_engine(speculation="off")
    engine.weights.commit_weights("1", "d1")
    engine.add(PROMPT, SamplingParams(max_new_tokens=6), options=ASKED)
    run(engine, 3)
    engine.weights.commit_weights("2", "d2", in_flight="verify")
    assert spans(finished(engine)) == [("2", 0, 6, [])]
    engine.add(PROMPT, SamplingParams(max_new_tokens=6), options=ASKED)
    run(engine, 3)
    engine.weights.commit_weights("again", "d2")
    assert spans(finished(engine)) == [("2", 0, 3, []), ("again", 3, 6, [])]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_receipt_that_cannot_be_made_ends_its_own_request_alone(make_engine, monkeypatch, overlap):
    engine = make_engine(overlap=overlap)

    def broken(model: object) -> None:
        raise ValueError("Out of range float values are not JSON compliant")

    monkeypatch.setattr(receipts, "guarantee", broken)
    options = [ASKED, RequestOptions(), ASKED]
    answers = engine.generate([PROMPT] * 3, SamplingParams(max_new_tokens=4), options=options)
    assert [answer.finish_reason.type for answer in answers] == ["abort", "length", "abort"]
    assert "its receipt cannot be made: ValueError: Out of range" in answers[0].finish_reason.message
    assert [len(answer.token_ids) for answer in answers] == [4, 4, 4]
    assert all(answer.receipt is None for answer in answers)
    assert not engine.has_work
    monkeypatch.undo()
    [later] = engine.generate(PROMPT, SamplingParams(max_new_tokens=4), options=ASKED)
    assert later.receipt["number"] == 0
    engine.close()


@pytest.mark.parametrize("call", ["generate", "stream", "agenerate", "astream"])
def test_a_fault_while_a_receipt_is_made_is_raised_and_breaks_nothing(make_engine, monkeypatch, call):
    engine = make_engine()

    def broken(model: object) -> None:
        raise ZeroDivisionError("a fault")

    async def asked() -> object:
        if call == "agenerate":
            return await engine.agenerate([PROMPT, PROMPT], params, options=ASKED)
        return [chunk async for chunk in engine.astream(PROMPT, params, options=ASKED)]

    def ask() -> object:
        if call == "generate":
            return engine.generate([PROMPT, PROMPT], params, options=ASKED)
        return list(engine.stream(PROMPT, params, options=ASKED)) if call == "stream" else asyncio.run(asked())

    monkeypatch.setattr(receipts, "guarantee", broken)
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(ZeroDivisionError, match="a fault"):
        ask()
    monkeypatch.undo()
    assert len(engine.generate(PROMPT, params)[0].token_ids) == 4
    assert not engine.has_work
    engine.close()
