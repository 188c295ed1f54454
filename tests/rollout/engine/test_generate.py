"""Answers of `generate`: samples, the prefix cache, text, stops, lengths, log-probabilities."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.engine.callers import LONG, PROMPTS, assert_idle, sampled, trainer_logprobs

# -- prompts and samples -----------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts_with_samples_side_by_side(make_engine):
    engine = make_engine()
    params = [sampled(max_new_tokens=9), sampled(max_new_tokens=2, n=2), sampled(max_new_tokens=5)]
    completions = engine.generate(PROMPTS, params)
    assert [list(c.prompt_ids) for c in completions] == [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[2]]
    assert [c.index for c in completions] == [0, 0, 1, 0]
    assert [c.num_completion_tokens for c in completions] == [9, 2, 2, 5]
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions)
    assert_idle(engine)


def test_one_list_of_ids_is_one_prompt_and_no_prompts_are_no_answers(make_engine):
    engine = make_engine()
    assert len(engine.generate([1, 2, 3], sampled())) == 1
    assert engine.generate([], sampled()) == []


def test_parameters_may_be_a_mapping(make_engine):
    [completion] = make_engine().generate([1, 2], {"max_new_tokens": 3, "temperature": 0})
    assert completion.finish_reason.length == completion.num_completion_tokens == 3


def test_samples_of_one_prompt_differ_and_the_whole_request_repeats(make_engine):
    engine = make_engine()
    first = [c.token_ids for c in engine.generate(PROMPTS[0], sampled(n=4))]
    assert len(set(first)) == 4
    assert [c.token_ids for c in engine.generate(PROMPTS[0], sampled(n=4))] == first


def test_requests_without_a_seed_differ_but_two_engines_agree(make_engine):
    runs = [
        [c.token_ids for c in make_engine(seed=3).generate([[1, 2]] * 3, SamplingParams(max_new_tokens=8))]
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) == 3
    other = [c.token_ids for c in make_engine(seed=4).generate([[1, 2]] * 3, SamplingParams(max_new_tokens=8))]
    assert other != runs[0]


def test_samples_share_the_kv_of_their_prompt(make_engine):
    engine = make_engine()
    completions = engine.generate(LONG, sampled(n=4))
    assert [c.num_cached_tokens for c in completions] == [0, 64, 64, 64]
    assert engine.metrics.num_rows == 70 + 3 * 6 + 4 * 7
    assert engine.metrics.num_cached_tokens == 3 * 64


def test_prompt_that_ends_at_a_block_boundary_computes_its_last_block_again(make_engine):
    engine = make_engine()
    engine.generate(LONG[:64], sampled())
    [again] = engine.generate(LONG[:64], sampled())
    assert again.num_cached_tokens == 48


def test_generated_tokens_are_cached_for_the_next_turn(make_engine):
    engine = make_engine()
    [first] = engine.generate(LONG, sampled(max_new_tokens=30))
    [second] = engine.generate([*first.prompt_ids, *first.token_ids, 9], sampled())
    assert second.num_cached_tokens == 96


def test_cached_tokens_are_whole_blocks_whatever_the_chunks(make_engine):
    engine = make_engine(chunked_prefill_size=7, max_num_batched_tokens=16)
    engine.generate(LONG, sampled())
    for num_tokens, num_cached in ((70, 64), (65, 64), (64, 48), (33, 32), (16, 0), (15, 0)):
        [again] = engine.generate(LONG[:num_tokens], sampled(max_new_tokens=1))
        assert again.num_cached_tokens == num_cached
    state = engine.state()
    assert (state["num_hit_tokens"], engine.metrics.num_cached_tokens) == (208, 208)
    assert state["num_looked_up_tokens"] == 70 + 70 + 65 + 64 + 33 + 16 + 15


def test_a_retracted_request_counts_the_hits_of_its_first_start_and_the_totals_count_both(make_engine):
    engine = make_engine(chunked_prefill_size=16)
    engine.generate(LONG[:40], sampled(max_new_tokens=1))
    [id] = engine.add(LONG, sampled(max_new_tokens=20))
    for _ in range(8):  # 32 tokens are cached; 3 chunks, then 6 tokens
        engine.step()
    engine.pause_generation("retract")
    known = engine.parts.sequences.request(id).sequence.num_tokens
    assert known == 70 + 6
    engine.continue_generation()
    answers = []
    while engine.has_work:
        answers += engine.step()
    [answer] = answers
    assert (answer.num_retractions, answer.num_cached_tokens) == (1, 32)
    state = engine.state()
    assert state["num_hit_tokens"] == 32 + 64  # the KV of 75 tokens was there: 4 full blocks
    assert state["num_looked_up_tokens"] == 40 + 70 + known
    assert engine.metrics.num_cached_tokens == 32


@pytest.mark.parametrize("chunk", [16, 24, 256])
def test_samples_of_a_group_count_what_the_first_of_them_computed(make_engine, chunk):
    engine = make_engine(chunked_prefill_size=chunk)
    answers = engine.generate(LONG, sampled(n=4))
    assert [answer.num_cached_tokens for answer in answers] == [0, 64, 64, 64]
    answers = engine.generate(LONG, sampled(n=4))
    assert [answer.num_cached_tokens for answer in answers] == [64] * 4
    assert engine.state()["num_hit_tokens"] == engine.metrics.num_cached_tokens == 7 * 64
    assert engine.state()["num_looked_up_tokens"] == 8 * 70
    assert [node.num_hits for node in engine.cache_tree(depth=4).nodes] == [7] * 4


def test_extra_key_and_disabled_cache_share_nothing(make_engine):
    engine = make_engine()
    engine.generate(LONG, sampled())
    assert engine.generate(LONG, sampled(), options=RequestOptions(extra_key="x"))[0].num_cached_tokens == 0
    engine = make_engine(prefix_cache=False)
    assert [c.num_cached_tokens for c in engine.generate([LONG, LONG], sampled())] == [0, 0]


# -- text, stops, lengths --------------------------------------------------------------------------


def test_text_in_text_out(talker, tokenizer):
    [completion] = talker.generate("the sum of two", sampled(max_new_tokens=20, ignore_eos=True))
    assert list(completion.prompt_ids) == tokenizer("the sum of two")["input_ids"]
    assert completion.text == tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)


def test_stop_string_that_straddles_tokens_ends_the_text_before_it(talker, tokenizer):
    params = {"max_new_tokens": 40, "ignore_eos": True}
    [whole] = talker.generate("the sum", sampled(**params))
    pieces = [tokenizer.decode([t]) for t in whole.token_ids]
    at = next(
        i
        for i in range(8, 39)
        if pieces[i] and pieces[i + 1] and (pieces[i][-1] + pieces[i + 1][0]) not in "".join(pieces[: i + 1])
    )
    stop = pieces[at][-1] + pieces[at + 1][0]
    [stopped] = talker.generate("the sum", sampled(stop=[stop, "never this"], **params))
    assert stopped.token_ids == whole.token_ids[: at + 2]
    assert (stopped.finish_reason.type, stopped.finish_reason.matched) == ("stop", stop)
    assert stopped.text == "".join(pieces[: at + 1])[:-1]
    [kept] = talker.generate("the sum", sampled(stop=stop, no_stop_trim=True, **params))
    assert kept.text == "".join(pieces[: at + 2])


def test_stop_token_stands_in_the_ids_and_not_in_the_text(talker, tokenizer):
    [whole] = talker.generate("the sum", sampled(ignore_eos=True))
    stop_id = whole.token_ids[3]
    end = whole.token_ids.index(stop_id) + 1
    [stopped] = talker.generate("the sum", sampled(ignore_eos=True, stop_token_ids=[stop_id]))
    assert stopped.token_ids == whole.token_ids[:end]
    assert (stopped.finish_reason.type, stopped.finish_reason.matched) == ("stop", stop_id)
    assert stopped.text == tokenizer.decode(list(whole.token_ids[: end - 1]))


def test_eos_of_the_tokenizer_stops_unless_ignored(talker, tokenizer):
    eos = tokenizer.eos_token_id
    bias = {"logit_bias": {eos: 100.0}}
    [stopped] = talker.generate("the", sampled(**bias))
    assert (stopped.token_ids, stopped.finish_reason.matched, stopped.text) == ((eos,), eos, "")
    [ignored] = talker.generate("the", sampled(ignore_eos=True, **bias))
    assert (ignored.token_ids, ignored.finish_reason.type) == ((eos,) * 8, "length")
    [late] = talker.generate("the", sampled(min_new_tokens=5, **bias))
    assert eos not in late.token_ids[:-1] and late.token_ids[-1] == eos and len(late.token_ids) == 6


def test_eos_ids_of_the_generation_config_count_too(make_model):
    model = make_model("qwen3")
    model.generation_config.eos_token_id = [7, 9]
    engine = Engine(model, EngineConfig(kv_cache="8 blocks"))
    [completion] = engine.generate([1, 2], sampled(logit_bias={9: 100.0}))
    assert (completion.finish_reason.type, completion.finish_reason.matched) == ("stop", 9)


@pytest.mark.parametrize("num_new", [0, 1, 5])
def test_max_new_tokens_is_exact_zero_included(make_engine, num_new):
    engine = make_engine()
    completions = engine.generate(PROMPTS, sampled(max_new_tokens=num_new))
    for completion in completions:
        assert completion.num_completion_tokens == len(completion.logprobs) == num_new
        assert (completion.finish_reason.type, completion.finish_reason.length) == ("length", num_new)
    assert_idle(engine)


def test_context_ends_a_sequence_and_a_prompt_that_fills_it_is_ignored(make_engine):
    engine = make_engine(max_model_len=20)
    room, full = engine.generate([[1] * 15, [1] * 20], sampled(max_new_tokens=50))
    assert (room.num_completion_tokens, room.finish_reason.type) == (5, "length")
    assert (full.num_completion_tokens, full.finish_reason.type) == (0, "ignored")
    assert "20" in full.finish_reason.message
    [scored] = engine.generate([1] * 20, sampled(max_new_tokens=0), options=RequestOptions(logprob_start_len=0))
    assert len(scored.prompt_logprobs) == 20 and scored.finish_reason.type == "length"


# -- log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 16, 17, 40, 69, 70])
@pytest.mark.parametrize("prefix_hit", [False, True], ids=["cold", "hit"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_prompt_logprobs_are_the_trainers_from_where_they_are_wanted(make_engine, start, prefix_hit, chunk):
    engine = make_engine(chunked_prefill_size=chunk)
    if prefix_hit:
        engine.generate(LONG, sampled(max_new_tokens=1))
    options = RequestOptions(logprob_start_len=start)
    [completion] = engine.generate(LONG, sampled(max_new_tokens=2, temperature=0.7), options=options)
    expected = [None, *trainer_logprobs(engine, LONG, 0.7)][start:]
    assert list(completion.prompt_logprobs) == expected
    assert completion.num_cached_tokens == (max(start - 1, 0) // 16 * 16 if prefix_hit else 0)


def test_prompt_logprobs_are_those_of_transformers(make_engine, make_model):
    reference = make_model("qwen3", attn_implementation="eager")
    with torch.no_grad():
        logits = reference(torch.tensor([LONG])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(LONG[1:])[:, None])[:, 0]
    options = RequestOptions(logprob_start_len=0)
    [completion] = make_engine().generate(LONG, sampled(max_new_tokens=0), options=options)
    torch.testing.assert_close(torch.tensor(completion.prompt_logprobs[1:]), expected, atol=2e-5, rtol=1e-4)


def test_prompt_logprobs_are_absent_unless_wanted(make_engine):
    [completion] = make_engine().generate([1, 2], sampled())
    assert completion.prompt_logprobs is None and completion.top_logprobs is None


def test_prompt_alternatives_stand_beside_the_prompt_logprobs(make_engine):
    options = RequestOptions(logprob_start_len=2, top_logprobs_num=3)
    [completion] = make_engine(chunked_prefill_size=5).generate(LONG[:20], sampled(), options=options)
    assert len(completion.prompt_top_logprobs) == len(completion.prompt_logprobs) == 18
    assert all(len(top) == 3 and top[0][0] >= top[1][0] >= top[2][0] for top in completion.prompt_top_logprobs)
    start = RequestOptions(logprob_start_len=0, top_logprobs_num=1)
    [completion] = make_engine().generate(LONG[:20], sampled(), options=start)
    assert completion.prompt_top_logprobs[0] is None and len(completion.prompt_top_logprobs) == 20


def test_alternatives_of_output_tokens_hold_the_greedy_choice(make_engine):
    options = RequestOptions(top_logprobs_num=4)
    [completion] = make_engine().generate([1, 2], sampled(temperature=0.0), options=options)
    for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
        assert len(top) == 4 and top[0] == (logprob, token)
