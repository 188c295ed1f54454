"""A constrained sample follows from its own sequence and settings: the same bits alone and in any crowd."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random

import pytest
import torch
import transformers

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.loop.assemble import make_runner
from lockstep.rollout.loop.grammar_time import GrammarTime
from lockstep.rollout.loop.parts import MakeRunner
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.covering import covering

BLOCK = 16
LONG = "a property with a long name, and the number of it is"
SCHEMAS = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6},
                                      "città": {"enum": ["Paris", "Parma", "Rome"]}},
     "required": ["name", "città"], "additionalProperties": False},
    {"type": "object", "properties": {f"{LONG} {n}": {"enum": ["the value", "the name", 12]} for n in range(3)},
     "required": [f"{LONG} {n}" for n in range(3)], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["value one", "value two", "ключ"]}, "minItems": 3, "maxItems": 6},
)  # fmt: skip
NUM_KINDS = 9


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@functools.cache
def small_model(family: str) -> transformers.PreTrainedModel:
    common = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
              "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}  # fmt: skip
    torch.manual_seed(3)
    if family == "qwen3":
        config = transformers.Qwen3Config(**common, head_dim=32)
    else:
        layers = ["conv", "full_attention"]
        config = transformers.Lfm2Config(**common, layer_types=layers, block_auto_adjust_ff_dim=False)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def make_engine(tokenizer, make_runner: MakeRunner = make_runner, family: str = "qwen3", **settings: object) -> Engine:
    config = {"kv_cache": "96 blocks", "block_size": BLOCK, "pin_budget": 1.0, **settings}
    return Engine(small_model(family), EngineConfig(**config), tokenizer=tokenizer, make_runner=make_runner)


def prompt_of(kind: int) -> str:
    return f"person {kind % 3}, " + "with a name and a value " * (kind % 4)


def params_of(kind: int, mode: str) -> SamplingParams:
    stop = {"stop": "Par"} if kind == 6 else {}
    length = 21 if kind == 4 else 90
    return SamplingParams(json_schema=SCHEMAS[kind % 3], jump_forward=mode, max_new_tokens=length, sampling_seed=kind,
                          temperature=1.2, **stop)  # fmt: skip


def record(answer) -> tuple:
    return (answer.token_ids, answer.logprobs, answer.forced, answer.masked_probs, answer.text, answer.finish_reason,
            answer.num_jump_forward_tokens, answer.weight_versions)  # fmt: skip


@functools.cache
def alone(tokenizer, mode: str, family: str) -> dict[int, tuple]:
    """Return each kind's record in an engine with much room and nobody else."""
    engine = make_engine(tokenizer, family=family)
    records = {kind: record(engine.generate(prompt_of(kind), params_of(kind, mode))[0]) for kind in range(NUM_KINDS)}
    engine.close()
    return records


def in_a_crowd(engine: Engine, mode: str, seed: int) -> dict[int, object]:
    """Run all kinds in one engine, with pins and random pauses of both modes; returns the answers."""
    draw, answers, todo = random.Random(seed), {}, list(range(NUM_KINDS))
    draw.shuffle(todo)
    with engine.model.rollout_phase():
        while engine.has_work or todo or len(answers) < NUM_KINDS:  # a pause may end the last one
            for kind in [todo.pop() for _ in range(min(len(todo), draw.randint(0, 4)))]:
                engine.add(prompt_of(kind), params_of(kind, mode), rid=f"kind {kind}")
            answers |= {int(answer.id.split()[1]): answer for answer in engine.step()}
            if draw.random() < 0.1:
                engine.pin_prefix(prompt_of(draw.randrange(NUM_KINDS)))
            if draw.random() < 0.15:
                engine.pause_generation(draw.choice(["retract", "in_place"]))
                if draw.random() < 0.3:
                    engine.flush_cache()
                engine.continue_generation()
            engine.parts.ledger.check()
    engine.parts.ledger.check_idle()
    return answers


@covering(
    2,
    mode=["text", "exact"], rows=[5, 24, 2048], pool=["16 blocks", "96 blocks"], chunk=[None, 3],
    way=["plain", "overlap", "2 stages"],
)  # fmt: skip
def test_neighbours_change_no_bit_of_a_constrained_sample(bpe_tokenizer, in_stages, mode, rows, pool, chunk, way):
    expected = alone(bpe_tokenizer, mode, "qwen3")
    engine = make_engine(
        bpe_tokenizer, in_stages(2 if way == "2 stages" else 1), kv_cache=pool, overlap=way == "overlap",
        max_num_seqs=5, max_num_batched_tokens=rows, chunked_prefill_size=chunk, admission_ratio=0.0,
    )  # fmt: skip
    answers = in_a_crowd(engine, mode, seed=rows + len(way))
    assert {kind: record(answer) for kind, answer in answers.items()} == expected
    engine.close()


@covering(1, mode=["text", "exact"], rows=[5, 64], overlap=[False, True])
def test_neighbours_change_no_bit_where_states_are_taken_back(bpe_tokenizer, mode, rows, overlap):
    expected = alone(bpe_tokenizer, mode, "lfm2")
    engine = make_engine(
        bpe_tokenizer, family="lfm2", kv_cache="20 blocks", overlap=overlap, max_num_seqs=5,
        max_num_batched_tokens=rows, admission_ratio=0.0, state_snapshots=4,
    )  # fmt: skip
    answers = in_a_crowd(engine, mode, seed=rows)
    assert {kind: record(answer) for kind, answer in answers.items()} == expected
    engine.close()


NODE = {"type": "object", "properties": {"name": {"enum": ["a", "node"]}, "next": {"$ref": "#/$defs/node"}},
        "required": ["name"], "additionalProperties": False}  # fmt: skip
TREE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}


@covering(1, mode=["text", "exact", "off"], way=["plain", "overlap", "2 stages"])
def test_a_sequence_for_whose_grammar_a_step_has_no_time_waits(bpe_tokenizer, in_stages, monkeypatch, mode, way):
    params = [
        SamplingParams(json_schema=TREE, jump_forward=mode, max_new_tokens=24, sampling_seed=seed, temperature=1.2)
        for seed in range(4)
    ]
    lone = make_engine(bpe_tokenizer)
    expected = [record(lone.generate(prompt_of(1), one)[0]) for one in params]
    lone.close()
    engine = make_engine(bpe_tokenizer, in_stages(2 if way == "2 stages" else 1), overlap=way == "overlap")
    monkeypatch.setattr(GrammarTime, "is_spent", property(lambda self: bool(self._seconds)))  # after one sequence
    monkeypatch.setattr(GrammarTime, "end_step", lambda self, *_: self._seconds.clear() or [])
    answers = engine.generate([prompt_of(1)] * 4, params)
    assert [record(answer) for answer in answers] == expected
    metrics = engine.state()["metrics"]
    assert metrics["num_sequence_forwards"] == metrics["num_steps"]  # one at a time
    engine.parts.ledger.check_idle()
    engine.close()


@pytest.mark.parametrize("mode", ["text", "exact"])
def test_a_jump_larger_than_a_step_runs_in_several_with_the_bits_of_one(bpe_tokenizer, mode):
    found = []
    for rows in (2048, 3):
        engine = make_engine(bpe_tokenizer, max_num_seqs=2, max_num_batched_tokens=rows)
        [answer] = engine.generate(prompt_of(1), params_of(1, mode))
        metrics = engine.state()["metrics"]
        found.append((record(answer), metrics["num_jumps"], metrics["num_jump_forward_tokens"]))
        num_prompt_steps = (len(answer.prompt_ids) - 1) // rows
        assert metrics["num_steps"] == num_prompt_steps + len(answer.token_ids) - metrics["num_forwards_saved"]
        assert metrics["num_rows"] <= rows * metrics["num_steps"]
        engine.close()
    assert found[0] == found[1]


@covering(1, mode=["text", "exact"], way=["plain", "overlap", "2 stages"])
def test_a_jump_without_a_block_for_its_first_row_waits_and_begins_again(bpe_tokenizer, in_stages, mode, way):
    """Blocks that a rollback gives up may be kept by pins and other sequences; here the pool says so at random."""
    expected, draw = alone(bpe_tokenizer, mode, "qwen3"), random.Random(3)
    engine = make_engine(bpe_tokenizer, in_stages(2 if way == "2 stages" else 1), overlap=way == "overlap",
                         max_num_seqs=5, max_num_batched_tokens=24, kv_cache="20 blocks")  # fmt: skip
    grow = engine.parts.scheduler.grow_up_to
    engine.parts.scheduler.grow_up_to = lambda request, num: grow(request, num) if draw.random() < 0.6 else 0
    answers = in_a_crowd(engine, mode, seed=1)
    assert {kind: record(answer) for kind, answer in answers.items()} == expected
    assert sum(answer.num_retractions for answer in answers.values()) > 3
    engine.close()


@pytest.mark.slow
def test_what_has_no_room_ends_as_alone(bpe_tokenizer):
    """The pool is too small for one of the sequences: it ends with "length" after the same tokens, whoever runs."""
    for mode in ("text", "exact"):
        params = {kind: params_of(kind, mode) for kind in (0, 1, 4, 7)}
        found = []
        for together in (False, True):
            engine = make_engine(bpe_tokenizer, kv_cache="5 blocks", admission_ratio=0.0, max_num_batched_tokens=12,
                                 max_num_seqs=4)  # fmt: skip
            prompts = [prompt_of(kind) for kind in params]
            if together:
                answers = engine.generate(prompts, list(params.values()))
            else:
                answers = [engine.generate(*one)[0] for one in zip(prompts, params.values(), strict=True)]
            found.append([record(answer) for answer in answers])
            assert any(answer.finish_reason.message for answer in answers)
            engine.parts.ledger.check()
            engine.close()
        assert found[0] == found[1]


@covering(1, mode=["text", "exact"], overlap=[False, True])
def test_a_step_that_fails_at_any_place_changes_no_bit(bpe_tokenizer, mode, overlap):
    """The tokens after a jump that is undone are those of the first time, also where it only joined tokens."""
    kinds = (1, 2, 5)
    expected = alone(bpe_tokenizer, mode, "qwen3")
    engine = make_engine(bpe_tokenizer, overlap=overlap)
    run, calls, failing = engine.parts.runner._run, iter(()), 0

    def fail_at_one(output, batch):
        if next(calls) == failing:
            raise RuntimeError("the device is on fire")
        return run(output, batch)

    engine.parts.runner._run = fail_at_one
    with engine.model.rollout_phase():
        for failing in range(0, 40, 3):  # noqa: B007 fail_at_one reads it
            calls, answers = itertools.count(), {}
            for kind in kinds:
                engine.add(prompt_of(kind), params_of(kind, mode), rid=str(kind))
            while len(answers) < len(kinds):
                with contextlib.suppress(RuntimeError):  # of the step that fails
                    answers |= {int(answer.id): answer for answer in engine.step()}
            found = {kind: record(answer) for kind, answer in answers.items()}
            assert found == {kind: expected[kind] for kind in kinds}
    engine.close()


def test_weights_that_change_inside_a_jump_are_named_by_each_of_its_tokens(bpe_tokenizer):
    engine = make_engine(bpe_tokenizer, max_num_seqs=2, max_num_batched_tokens=2)
    request = None
    with engine.model.rollout_phase():
        engine.add(prompt_of(1), params_of(1, "exact"), rid="a")
        while request is None or len(request.record.scored) < 5:
            assert not engine.step()
            request = engine.parts.sequences.request("a")
        num_before = len(request.record.logprobs) + len(request.record.scored)
        assert len(engine.live_sequences()) == 1
        engine.pause_generation("in_place")
        engine.parts.sequences.weight_version = "later"
        engine.continue_generation()
        answers = []
        while not answers:
            answers = engine.step()
    [answer] = answers
    assert [(span.version, span.start, span.end) for span in answer.weight_versions] == [
        ("default", 0, num_before), ("later", num_before, len(answer.token_ids))
    ]  # fmt: skip
    engine.close()


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_an_end_inside_a_jump_leaves_the_tokens_before_it(bpe_tokenizer, pause):
    expected = alone(bpe_tokenizer, "text", "qwen3")[1]
    engine = make_engine(bpe_tokenizer, max_num_seqs=2, max_num_batched_tokens=2)
    with engine.model.rollout_phase():
        engine.add(prompt_of(1), params_of(1, "text"), rid="a")
        engine.step()
        request = engine.parts.sequences.request("a")
        while not (request.record.scored and request.record.logprobs):
            assert not engine.step()
        assert request.sequence.jump_start is not None
        engine.pause_generation(pause)
        assert request.sequence.jump_start is None
        assert request.sequence.num_output_tokens == len(request.record.logprobs)
        engine.continue_generation()
        answers = engine.step()
        while engine.has_work:
            answers += engine.step()
    [answer] = answers
    if pause == "abort":
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.forced) > 0
        assert engine.metrics.num_output_tokens == len(answer.token_ids)
    else:
        assert record(answer) == expected
    engine.parts.ledger.check_idle()
    engine.close()
