"""Pins and the tree of the cache, as callers of an engine see them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.rollout.engine import Engine
from lockstep.tests.rollout.engine.callers import LONG, PROMPTS, WORDS, assert_idle, sampled


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
