"""Weights and KV of an engine: versions of tokens, commits, refusals, released memory, and its end."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.errors import MemoryReleased, NotIdle, SamplingRefused
from lockstep.rollout.request_options import RequestOptions
from lockstep.tests.rollout.engine.callers import LONG, assert_idle, sampled, trainer_logprobs


def test_tokens_say_which_weights_made_them_across_a_commit(make_engine):
    engine = make_engine()
    engine.weights.commit_weights("v1", "d1")
    [id] = engine.add(LONG, sampled(max_new_tokens=5))
    engine.step()
    engine.step()
    engine.weights.commit_weights("v2", "d2")
    while engine.has_work:
        answers = engine.step()
    [completion] = answers
    assert (completion.weight_version, completion.weight_digest, completion.id) == ("v2", "d2", id)
    assert [(s.version, s.digest, s.start, s.end) for s in completion.weight_versions] == [
        ("v1", "d1", 0, 2),
        ("v2", "d2", 2, 5),
    ]


def test_completion_without_tokens_still_names_its_weights(make_engine):
    engine = make_engine()
    engine.weights.commit_weights("v1", None)
    engine.weights.set_weight_digest("later")
    [completion] = engine.generate([1], sampled(max_new_tokens=0))
    assert (completion.weight_version, completion.weight_digest) == ("v1", "later")
    assert [(s.version, s.start, s.end) for s in completion.weight_versions] == [("v1", 0, 0)]


def test_kv_of_older_weights_is_never_reused(make_engine):
    engine = make_engine()
    engine.generate([LONG, LONG[::-1]], sampled())
    [stays] = engine.add(LONG, sampled(max_new_tokens=60))  # runs across the commit
    for _ in range(3):
        engine.step()
    with torch.no_grad():
        engine.model.module.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    report = engine.weights.commit_weights("v2", None)
    assert report.num_blocks_dropped == 4  # the blocks without a holder; the others are never found again
    assert engine.epoch == 1
    [fresh] = engine.generate(LONG, sampled(), options=RequestOptions(extra_key=""))
    assert fresh.num_cached_tokens == 0
    whole = trainer_logprobs(engine, [*fresh.prompt_ids, *fresh.token_ids])
    assert list(fresh.logprobs) == whole[len(LONG) - 1 :]
    while engine.has_work:
        engine.step()
    [after] = engine.generate(LONG, sampled())
    assert after.num_cached_tokens == 64
    assert (after.token_ids, after.logprobs) == (fresh.token_ids, fresh.logprobs)
    assert stays
    assert_idle(engine)


def test_engine_shares_the_trainers_storage(make_engine):
    engine = make_engine()
    parameters = dict(engine.model.module.named_parameters())
    resident = dict(engine.weights.resident_tensors())
    assert resident.keys() == parameters.keys()
    assert all(resident[name].data_ptr() == parameters[name].data_ptr() for name in resident)


def test_refused_sampling_says_why_until_the_next_commit(make_engine):
    engine = make_engine()
    engine.weights.refuse_sampling("the optimizer is stepping")
    with pytest.raises(SamplingRefused, match="the optimizer is stepping"):
        engine.generate([1, 2], sampled())
    assert_idle(engine)
    engine.add([1, 2], sampled(), rid="waits")
    with pytest.raises(SamplingRefused):
        engine.step()
    engine.weights.commit_weights("v2", None)
    assert engine.step() == [] and engine.abort_request("waits").aborted == ("waits",)


def test_released_kv_comes_back_and_what_waited_runs(make_engine):
    engine = make_engine()
    [before] = engine.generate(LONG, sampled())
    num_bytes = engine.state()["kv_bytes"]
    assert engine.weights.release_kv() == num_bytes > 0
    assert engine.state()["kv_bytes"] == 0
    with pytest.raises(MemoryReleased):
        engine.generate(LONG, sampled())
    engine.add(LONG, sampled())
    assert engine.weights.resume_kv() == engine.weights.resume_kv() == num_bytes
    completions = []
    while engine.has_work:
        completions += engine.step()
    assert (completions[0].token_ids, completions[0].logprobs) == (before.token_ids, before.logprobs)
    assert completions[0].num_cached_tokens == 0


def test_flush_and_release_wait_for_an_idle_engine(make_engine):
    engine = make_engine()
    engine.add(LONG, sampled())
    engine.step()
    report = engine.flush_cache()
    assert not report.success and report.flushed_items == 0 and "1 running, 0 waiting" in report.error_msg
    with pytest.raises(NotIdle, match="1 running, 0 waiting"):
        engine.weights.release_kv()
    engine.abort_request(abort_all=True)
    assert engine.flush_cache().flushed_items == 4
    assert engine.state()["num_free_blocks"] == 64


def test_closed_engine_gives_everything_back(make_engine):
    engine = make_engine()
    engine.add([1, 2], sampled())
    engine.step()
    engine.close()
    assert engine.state()["kv_bytes"] == 0
    assert_idle(engine)


@pytest.mark.parametrize("way", ["retract", "verify"])
@pytest.mark.parametrize("start", [0, 3])
def test_prompt_logprobs_are_of_one_version_where_the_kv_is_computed_again(make_engine, way, start):
    prompt = list(range(1, 41))
    options = RequestOptions(logprob_start_len=start, top_logprobs_num=2, takes_back=False)
    engine = make_engine(chunked_prefill_size=10)
    engine.add(prompt, sampled(max_new_tokens=2), rid="r", options=options)
    for _ in range(2):
        engine.step()
    if way == "retract":
        engine.pause_generation("retract")
    with torch.no_grad():
        for weight in engine.model.module.parameters():
            weight.mul_(1.5)
    engine.weights.commit_weights("new", None, in_flight="verify" if way == "verify" else None)
    if way == "retract":
        engine.continue_generation()
    answers = []
    while engine.has_work:
        answers += engine.step()
    [expected] = engine.generate([prompt], sampled(max_new_tokens=2), options=options)
    assert {span.version for span in answers[0].weight_versions} == {"new"}
    assert answers[0].prompt_logprobs == expected.prompt_logprobs
    assert answers[0].prompt_top_logprobs == expected.prompt_top_logprobs
