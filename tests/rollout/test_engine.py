"""The engine as its callers see it: generate, stream, step by hand, abort, commit, release."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import MemoryReleased, NotIdle, PhaseError, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import RequestOptions

PROMPTS = [[3, 17, 90, 4, 55], list(range(40, 75)), [250]]
LONG = [(7 * i) % 250 for i in range(70)]
WORDS = ["the answer is seven and the sum of two and three is five", "add the numbers, then stop: 12 + 30 = 42."] * 3


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)  # these matrices are small: a second thread would only wait for the first


@pytest.fixture
def make_engine(make_model):
    def make(family: str = "qwen3", *, tokenizer=None, model: dict | None = None, **config: object) -> Engine:
        settings = {"kv_cache": "64 blocks", "max_num_seqs": 8, "max_num_batched_tokens": 256, **config}
        module = make_model(family, **(model or {}))
        return Engine(module.train(), EngineConfig(**settings), tokenizer=tokenizer)

    return make


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=90, special_tokens=["<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>")


@pytest.fixture
def talker(make_engine, tokenizer) -> Engine:
    """Make an engine with a tokenizer."""
    return make_engine(tokenizer=tokenizer, model={"vocab_size": len(tokenizer)})


def sampled(**params: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 8, "sampling_seed": 5, **params})


def trainer_logprobs(engine: Engine, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probabilities of tokens 1, 2, ... by the trainer's forward."""
    ids = torch.tensor([token_ids])
    with engine.model.training_numerics():
        logits = engine.model.module(ids, use_cache=False).logits[0, :-1]
    return selected_logprobs(logits, ids[0, 1:], temperature).tolist()


def assert_idle(engine: Engine) -> None:
    state = engine.state()
    assert (state["num_running"], state["num_waiting"], state["num_held_blocks"]) == (0, 0, 0)
    assert not engine.has_work
    engine.check_integrity()


# -- generate --------------------------------------------------------------------------------------


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


# -- pins and the cache tree -----------------------------------------------------------------------


def flood(engine: Engine, num_prompts: int = 20) -> None:
    """Evict every cached block that may be evicted."""
    engine.generate(
        [[(31 * i + j * 7 + 1) % 250 for j in range(64)] for i in range(num_prompts)], sampled(max_new_tokens=2)
    )


def cached_of(engine: Engine, prompt: list[int]) -> int:
    return engine.generate(prompt, sampled(max_new_tokens=1))[0].num_cached_tokens


def test_a_pinned_prompt_is_still_there_after_a_flood_and_an_unpinned_one_is_not(make_engine):
    engine = make_engine(kv_cache="16 blocks")
    engine.generate(LONG, sampled())
    report = engine.pin_prefix(LONG, "me")
    assert (report.num_pinned, report.num_unknown, report.num_refused) == (4, 0, 0)
    flood(engine)
    assert cached_of(engine, LONG) == 64
    assert engine.unpin_blocks(report.hashes, "other").num_unknown == 4
    assert engine.unpin_blocks(report.hashes, "me").num_unpinned == 4
    flood(engine)
    assert cached_of(engine, LONG) == 0
    assert_idle(engine)


def test_pinned_kv_answers_with_the_very_bits_of_computed_kv(make_engine):
    engine = make_engine(kv_cache="16 blocks")
    [first] = engine.generate(LONG, sampled())
    engine.pin_prefix(LONG)
    flood(engine)
    [again] = engine.generate(LONG, sampled())
    assert (again.num_cached_tokens, again.token_ids, again.logprobs) == (64, first.token_ids, first.logprobs)


def test_a_text_is_pinned_by_the_tokens_it_stands_for(talker, tokenizer):
    text = " ".join(WORDS)
    num_blocks = len(tokenizer(text)["input_ids"]) // 16
    assert talker.pin_prefix(text).num_unknown == num_blocks > 3
    talker.generate(text, sampled(max_new_tokens=1))
    report = talker.pin_prefix(text)
    assert report.num_pinned == num_blocks
    assert [node.hash for node in talker.cache_tree(prompt=text).nodes[:num_blocks]] == list(report.hashes)
    assert talker.pin_prefix(text, extra_key="x").num_pinned == 0


def test_only_the_part_of_a_prompt_that_is_cached_is_pinned(make_engine):
    engine = make_engine()
    engine.generate(LONG[:40], sampled(max_new_tokens=1))
    report = engine.pin_prefix(LONG)
    assert (report.num_pinned, report.num_unknown) == (2, 2)


def test_hashes_from_the_tree_can_be_pinned_and_protect_their_ancestors(make_engine):
    engine = make_engine(kv_cache="16 blocks")
    engine.generate(LONG, sampled())
    leaf = engine.cache_tree(depth=4).nodes[-1]
    assert engine.pin_blocks([leaf.hash, leaf.hash, 5], "r").num_pinned == 2
    nodes = engine.cache_tree(depth=4).nodes
    assert all(node.is_protected for node in nodes)
    assert [node.num_pins for node in nodes] == [0, 0, 0, 2] and nodes[3].owners == {"r": 2}
    state = engine.state()
    assert (state["num_pins"], state["num_pinned_blocks"]) == (1, 4)
    assert state["num_free_blocks"] + state["num_cached_blocks"] + 4 == 16
    engine.check_integrity()


@pytest.mark.parametrize("bad", [2**63, "abc", None, 1.5])
def test_a_bad_hash_reaches_the_caller_as_a_value_error(make_engine, bad):
    engine = make_engine()
    for verb in (engine.pin_blocks, engine.unpin_blocks):
        with pytest.raises(ValueError, match="signed 64-bit"):
            verb([bad])
    assert engine.generate(PROMPTS[0], sampled())  # and nothing is the worse for it


def test_pins_end_with_a_flush_and_with_new_weights_and_both_say_how_many(make_engine):
    engine = make_engine()
    engine.generate(LONG, sampled())
    engine.pin_prefix(LONG)
    report = engine.flush_cache()
    assert report.success and report.num_unpinned == 4 and engine.state()["num_free_blocks"] == 64
    engine.generate(LONG, sampled())
    engine.pin_prefix(LONG)
    assert engine.weights.commit_weights("v2", None).num_unpinned == 4
    assert cached_of(engine, LONG) == 0 and engine.state()["num_pins"] == 0


def test_pins_outlive_a_pause_that_retracts_and_the_request_that_filled_them(make_engine):
    engine = make_engine(kv_cache="16 blocks")
    engine.add(LONG, sampled(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    hashes = engine.pin_prefix(LONG).hashes
    engine.pause_generation("retract")
    assert engine.state()["num_pinned_blocks"] == 4
    engine.continue_generation()
    while engine.has_work:
        engine.step()
    flood(engine)
    assert cached_of(engine, LONG) == 64
    assert engine.unpin_blocks(hashes).num_unpinned == 4
    assert_idle(engine)


def test_pins_that_leave_no_room_are_lifted_for_the_request_and_counted(make_engine, caplog):
    engine = make_engine(kv_cache="8 blocks", pin_budget=1.0)
    engine.generate(LONG, sampled(max_new_tokens=1))
    engine.pin_prefix(LONG, "me")
    heard = []
    engine.kv_events.attach(heard.append)
    [answer] = engine.generate([9] * 100, sampled(max_new_tokens=4))  # 7 blocks
    assert answer.num_completion_tokens == 4
    assert engine.state()["num_auto_unpinned"] == 3 and engine.state()["num_pins"] == 1
    lifted = [event for batch in heard if batch.topic == "pins" for event in batch.events]
    assert [(event.kind, event.owner, len(event.block_hashes)) for event in lifted] == [("auto_unpinned", "me", 3)]
    assert "pins on 3 blocks were lifted, 1 stand" in caplog.text


@pytest.mark.parametrize(("budget", "num_pinned"), [(0.0, 0), (0.05, 3), (1.0, 4)])
def test_the_budget_is_a_share_of_the_pool(make_engine, budget, num_pinned):
    engine = make_engine(pin_budget=budget)
    engine.generate(LONG, sampled())
    report = engine.pin_prefix(LONG)
    assert (report.num_pinned, report.num_refused) == (num_pinned, 4 - num_pinned)
    assert num_pinned == 4 or f"budget of {num_pinned} protected blocks" in report.reason


def test_evicting_descendants_reports_what_went_and_what_stayed(make_engine):
    engine = make_engine()
    engine.generate(LONG, sampled(max_new_tokens=40))  # 6 full blocks
    other = engine.generate([*LONG[:32], *[5] * 40], sampled(max_new_tokens=1))
    assert other[0].num_cached_tokens == 32
    stem = engine.cache_tree(depth=2).nodes[1].hash
    engine.pin_prefix([*LONG[:32], *[5] * 16])
    report = engine.evict_descendants(stem)
    assert (report.is_known, report.num_evicted, report.num_held, report.num_pinned) == (True, 5, 0, 1)
    assert [node.depth for node in engine.cache_tree().nodes] == [0, 1, 2]
    assert engine.evict_descendants(12345).is_known is False
    assert_idle(engine)


def test_the_tree_says_where_a_prompt_leaves_the_cache(make_engine):
    engine = make_engine()
    engine.generate(LONG, sampled(max_new_tokens=1))
    found = engine.cache_tree(prompt=[*LONG[:37], 1, *LONG[38:]]).divergence
    assert (found.num_blocks, found.num_matched, found.num_common_tokens) == (4, 2, 37)
    assert found.nearest == engine.cache_tree().nodes[2].hash
    with pytest.raises(ValueError, match="no cached block has the hash 3"):
        engine.cache_tree(under=3)


def test_the_same_op_id_pins_once(make_engine):
    engine = make_engine()
    engine.generate(LONG, sampled())
    hashes = engine.pin_prefix(LONG, op_id="one").hashes
    assert engine.pin_prefix(LONG, op_id="one").hashes == hashes
    assert engine.unpin_blocks([*hashes, *hashes]).num_unpinned == 4


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_pinning_from_other_threads_while_requests_run_loses_no_pin(make_engine, overlap):
    engine = make_engine(kv_cache="20 blocks", overlap=overlap)
    engine.generate(LONG, sampled(max_new_tokens=1))

    def pin_and_unpin(owner: str) -> None:
        for _ in range(40):
            report = engine.pin_prefix(LONG, owner)
            assert engine.unpin_blocks(report.hashes, owner).num_unpinned == report.num_pinned

    with engine.model.rollout_phase(), ThreadPoolExecutor() as threads:
        engine.start()
        pinning = [threads.submit(pin_and_unpin, owner) for owner in "abc"]
        answers = engine.generate([LONG[: 20 + 3 * i] for i in range(16)], sampled(max_new_tokens=6))
        for future in pinning:
            future.result()
        engine.stop()
    assert len(answers) == 16
    assert (engine.state()["num_pins"], engine.state()["num_pinned_blocks"]) == (0, 0)
    assert_idle(engine)


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


# -- streams and async twins -----------------------------------------------------------------------


@pytest.mark.parametrize("interval", [None, 3])
def test_streamed_chunks_add_up_to_what_generate_returns(talker, interval):
    params = sampled(n=2, max_new_tokens=25, stop=["zz", "su"], min_new_tokens=12, stream_interval=interval)
    whole = talker.generate("the sum", params)
    chunks = list(talker.stream("the sum", params))
    for index in range(2):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert sum((chunk.token_ids for chunk in mine), ()) == whole[index].token_ids
        assert sum((chunk.logprobs for chunk in mine), ()) == whole[index].logprobs
        assert "".join(chunk.text for chunk in mine) == whole[index].text
        assert [chunk.completion is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].completion.token_ids == whole[index].token_ids
        assert all(len(chunk.token_ids) >= (interval or 1) for chunk in mine[:-1])
        assert len(mine) > 2
    assert_idle(talker)


def test_abandoned_stream_aborts_and_gives_its_blocks_back(make_engine):
    engine = make_engine()
    stream = engine.stream(LONG, sampled(max_new_tokens=400))
    next(stream)
    assert engine.state()["num_held_blocks"] > 0
    stream.close()
    assert_idle(engine)
    assert engine.metrics.num_aborted == 1


def test_module_is_the_trainers_between_two_chunks(make_engine):
    engine = make_engine()
    for _ in engine.stream([1, 2], sampled()):
        assert not engine.model.in_rollout_phase
        assert engine.model.module.training


def test_async_twins_answer_like_the_others_and_share_their_steps(make_engine):
    engine = make_engine(max_num_seqs=32)
    prompts = [[i, i + 1] for i in range(24)]
    alone = [c.token_ids for c in engine.generate(prompts, sampled())]
    before = engine.state()["num_forwards"]

    async def all_at_once() -> list:
        return await asyncio.gather(*(engine.agenerate(prompt, sampled()) for prompt in prompts))

    assert [c.token_ids for [c] in asyncio.run(all_at_once())] == alone
    assert engine.state()["num_forwards"] - before < 24  # one after the other takes 192
    assert_idle(engine)


def test_short_async_call_is_answered_though_many_long_ones_run(make_engine):
    engine = make_engine(max_num_seqs=80, kv_cache="200 blocks")

    async def steps_of(prompt: list[int], num_new: int) -> int:
        before = engine.state()["num_forwards"]
        await engine.agenerate(prompt, sampled(max_new_tokens=num_new))
        return engine.state()["num_forwards"] - before

    async def all_at_once() -> int:
        longs = [asyncio.create_task(steps_of([i], 60)) for i in range(60)]
        while engine.state()["num_running"] < 60:
            await asyncio.sleep(0)
        num_steps = await steps_of([99], 2)
        await asyncio.gather(*longs)
        return num_steps

    assert asyncio.run(all_at_once()) <= 8


def test_failing_step_reaches_every_coroutine_that_waits(make_engine):
    engine = make_engine()
    engine.weights.refuse_sampling("torn")

    async def all_at_once() -> list:
        return await asyncio.gather(*(engine.agenerate([i], sampled()) for i in range(5)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(all_at_once())] == [SamplingRefused] * 5
    assert_idle(engine)


def test_async_stream_gives_the_same_chunks(talker):
    async def collect() -> list:
        return [chunk async for chunk in talker.astream("the sum", sampled())]

    plain = list(talker.stream("the sum", sampled()))
    assert [(c.token_ids, c.text) for c in asyncio.run(collect())] == [(c.token_ids, c.text) for c in plain]


def test_cancelled_coroutine_aborts_its_request(make_engine):
    engine = make_engine()

    async def cancel_midway() -> None:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=400)))
        while engine.state()["num_running"] == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_midway())
    assert_idle(engine)


def test_coroutine_cancelled_while_it_queues_leaves_nothing_behind(make_engine):
    engine = make_engine()
    cancelled = threading.Event()

    async def cancel_at_once() -> None:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=400)))
        await asyncio.sleep(0)  # it begins to queue, on a thread that has to wait for the lock
        task.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    caller = threading.Thread(target=asyncio.run, args=(cancel_at_once(),))
    with engine.driver.lock:
        caller.start()
        assert cancelled.wait(timeout=30)
    caller.join(timeout=30)
    assert not caller.is_alive()
    assert_idle(engine)


def test_two_threads_that_generate_at_once_get_what_one_gets(make_engine):
    engine = make_engine()
    expected = [c.token_ids for c in engine.generate(PROMPTS, sampled(max_new_tokens=20))]
    answers: dict[int, list] = {}

    def work(index: int) -> None:
        answers[index] = engine.generate(PROMPTS[index], sampled(max_new_tokens=20 - 6 * index))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [answers[i][0].token_ids for i in range(3)] == [expected[i][: 20 - 6 * i] for i in range(3)]
    assert not engine.model.in_rollout_phase
    assert engine.model.module.training
    assert_idle(engine)


def test_overlapping_phases_of_two_threads_end_with_the_last(make_engine):
    model = make_engine().model
    first, second = model.rollout_phase(), model.rollout_phase()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.in_rollout_phase and not model.module.training
    assert model.module.config._attn_implementation.startswith("lockstep")
    second.__exit__(None, None, None)
    assert not model.in_rollout_phase and model.module.training
    assert not model.module.config._attn_implementation.startswith("lockstep")


# -- driving the loop by hand ----------------------------------------------------------------------


def test_added_requests_are_answered_by_the_step_that_ends_them(make_engine):
    engine = make_engine()
    [long], [short] = engine.add([1, 2], sampled(max_new_tokens=5)), engine.add([3], sampled(max_new_tokens=2), rid="s")
    answers = [[c.id for c in engine.step()] for _ in range(5)]
    assert answers == [[], ["s"], [], [], [long]] and short == "s"
    assert engine.step() == []


def test_joining_a_running_batch_changes_nobodys_tokens(make_engine):
    engine = make_engine()
    alone, other = engine.generate([LONG, PROMPTS[0]], sampled(max_new_tokens=12))
    engine.flush_cache()
    engine.add(LONG, sampled(max_new_tokens=12), rid="a")
    for _ in range(4):
        engine.step()
    engine.add(PROMPTS[0], sampled(max_new_tokens=12), rid="b")
    answers = {}
    while engine.has_work:
        answers |= {c.id: c for c in engine.step()}
    assert (answers["a"].token_ids, answers["a"].logprobs) == (alone.token_ids, alone.logprobs)
    assert (answers["b"].token_ids, answers["b"].logprobs) == (other.token_ids, other.logprobs)


def test_n_samples_get_ids_of_their_own(make_engine):
    engine = make_engine()
    assert engine.add([1], sampled(n=3), rid="x") == ["x-0", "x-1", "x-2"]
    engine.abort_request(abort_all=True)
    assert_idle(engine)


def test_abort_answers_with_what_was_generated(make_engine):
    engine = make_engine()
    [whole] = engine.generate([1, 2], sampled())
    ids = [*engine.add([1, 2], sampled(), rid="runs"), *engine.add([1] * 9, sampled(), rid="stays")]
    for _ in range(3):
        engine.step()
    engine.add([5], sampled(), rid="waits")
    assert engine.abort_request("unknown").unknown == ("unknown",)
    assert engine.abort_request("waits").aborted == ("waits",)
    stream = engine.stream([1, 2], sampled())
    chunk = next(stream)
    assert engine.abort_request(chunk.id, message="enough").aborted == (chunk.id,)
    last = list(stream)[-1].completion
    assert (last.finish_reason.type, last.finish_reason.message) == ("abort", "enough")
    assert last.token_ids == whole.token_ids[: len(last.token_ids)] and len(last.token_ids) == 1
    assert engine.abort_request(abort_all=True).aborted == tuple(ids)
    assert_idle(engine)


# -- weights and KV --------------------------------------------------------------------------------


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


# -- phases ----------------------------------------------------------------------------------------


def marks(module: torch.nn.Module) -> list[tuple]:
    """Return every property of a module that a rollout might change."""
    return (
        [
            (
                name,
                m.training,
                "forward" in vars(m),
                *map(len, (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)),
            )
            for name, m in module.named_modules()
        ]
        + [(name, p.requires_grad, p.data_ptr(), p.grad is None) for name, p in module.named_parameters()]
        + [(module.config._attn_implementation, module.config._experts_implementation, torch.is_grad_enabled())]
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_generating_leaves_the_module_as_it_was(make_model, family):
    model = make_model(family, attn_implementation="eager").train()
    model.model.layers[0].mlp.eval()  # a mixed state, as with a frozen part
    model.model.embed_tokens.weight.requires_grad_(False)
    calls = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    before = marks(model)
    engine = Engine(model, EngineConfig(kv_cache="16 blocks"))
    assert marks(model) == before
    calls.clear()
    engine.generate([1, 2, 3], sampled(max_new_tokens=3))
    assert marks(model) == before and len(calls) == 3
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


class Broken(Exception):
    pass


def test_module_is_restored_after_a_failing_forward_and_the_others_go_on(make_engine):
    engine = make_engine()
    expected = [c.token_ids for c in engine.generate(PROMPTS, sampled())]
    module, before = engine.model.module, marks(engine.model.module)
    ids = [engine.add(prompt, sampled())[0] for prompt in PROMPTS]
    for _ in range(3):
        engine.step()

    def fail(*_: object) -> None:
        raise Broken

    hook = module.model.layers[1].register_forward_hook(fail)
    with pytest.raises(Broken):
        engine.step()
    with pytest.raises(Broken):
        engine.generate([9, 9], sampled())
    hook.remove()
    assert marks(module) == before and not engine.model.in_rollout_phase
    engine.check_integrity()
    answers = {}
    while engine.has_work:
        answers |= {c.id: c.token_ids for c in engine.step()}
    assert [answers[id] for id in ids] == expected
    assert_idle(engine)


def test_phases_nest_and_the_outermost_restores(make_engine):
    model = make_engine().model
    before = marks(model.module)

    def fail_inside() -> None:
        with model.rollout_phase(), model.rollout_phase():
            assert model.in_rollout_phase and not model.module.training
            with model.training_numerics():
                pass
            assert model.module.config._attn_implementation.startswith("lockstep")
            raise Broken

    with pytest.raises(Broken):
        fail_inside()
    assert marks(model.module) == before


def test_module_outside_its_phase_refuses_to_run_for_the_engine(make_engine):
    model = make_engine().model
    rows = torch.tensor([0])
    with pytest.raises(PhaseError, match="trainer's"):
        model.forward(rows, rows, rows, None)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 256], r"from 0 to 255, not \[256\]"),
        ([-1], r"not \[-1\]"),
        ([1, 2.5], r"not \[2.5\]"),
        ([1, True], r"not \[True\]"),
        ([[]], "empty"),
        ("text", "needs a tokenizer"),
        ([None], "NoneType"),
        ([[1], None], "NoneType"),
        ([[1], 5], "int"),
    ],
    ids=str,
)
def test_bad_prompt_is_named_and_nothing_is_queued(make_engine, prompt, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, sampled())
    assert_idle(engine)
    assert len(engine.mailboxes) == 0


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"unknown": 1}, None, "unknown"),
        ({"temperature": -1}, None, "temperature"),
        ({"stop": "x"}, None, "tokenizer"),
        ({"logit_bias": {"3": 1, "256": 1}}, None, r"logit_bias names tokens \[256\]"),
        ([{}, {}], None, "1 prompts, but 2 sampling_params"),
        ({}, RequestOptions(logprob_start_len=4), "logprob_start_len 4 is beyond the 3 prompt tokens"),
    ],
)
def test_bad_setting_is_named_and_nothing_is_queued(make_engine, params, options, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate([1, 2, 3], params, options=options)
    assert_idle(engine)


def test_one_bad_prompt_among_many_queues_none(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="999"):
        engine.generate([[1, 2], [3], [999]], sampled())
    assert_idle(engine)


def test_options_name_every_offender():
    with pytest.raises(ValueError, match=r"logprob_start_len.*top_logprobs_num"):
        RequestOptions(logprob_start_len=-2, top_logprobs_num=-1)


def test_duplicate_live_id_is_refused_and_free_again_afterwards(make_engine):
    engine = make_engine()
    engine.add([1], sampled(), rid="same")
    with pytest.raises(ValueError, match="duplicate request ID detected: same"):
        engine.add([2], sampled(), rid="same")
    engine.abort_request("same")
    assert engine.add([2], sampled(), rid="same") == ["same"]


def test_context_longer_than_the_models_is_cut_to_it(make_engine):
    assert make_engine(max_model_len=10_000).max_model_len == 512
