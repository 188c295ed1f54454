"""Tests of interruption on engines of several ranks: the tests of one rank, again on real ranks, and random traces.

Each mesh is started once. On its controller the functions of test_interruption.py and test_interruption_random.py run
unchanged; all ranks make the engines of `make_engine`, and the other ranks follow them.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

SHAPES = pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2-pp2"])
# Of a test whose parts are other tests of one rank: each kind of ranks alone, and in the exhaustive suite both at once.
SHAPES_ALONE = pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.exhaustive)], ids=["tp2", "pp2", "tp2-pp2"]
)
MODES = ("abort", "retract", "in_place")
# Of the longest test: each shape has every mode at every step, in one of two settings.
SETTINGS = (
    {"block_size": 16, "chunk": 7, "temperature": 1.0, "between": "nothing"},
    {"block_size": 64, "chunk": 16, "temperature": 0.0, "between": "continue and step"},
)
SHAPES_AND_SETTINGS = pytest.mark.parametrize(
    ("tp", "pp", "number"),
    [
        pytest.param(tp, pp, number, id=id, marks=[] if id in ("tp2-0", "pp2-1") else [pytest.mark.exhaustive])
        for number in range(len(SETTINGS))
        for tp, pp, id in ((2, 1, f"tp2-{number}"), (1, 2, f"pp2-{number}"), (2, 2, f"tp2-pp2-{number}"))
    ],
)
NUM_EVENTS = 1500
K_BLOCKS = 2  # of every engine here, so that one rank gives the bits of two


def load(name: str) -> ModuleType:
    """Load a test module of the folder above as a separate copy."""
    spec = importlib.util.spec_from_file_location(f"{name}_on_ranks", Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Replica:
    """The controller's maker of engines: all ranks make them, one after the other."""

    def __init__(self, model: PreTrainedModel, tp: int, pp: int) -> None:
        self._model, self._shape = model, {"tp": tp, "pp": pp, "k_blocks": K_BLOCKS, "state_check_steps": 7}
        self._engine: Engine | None = None

    def make(self, **config: Any) -> Engine:
        """Make an engine like the tests' `make_engine`, and close the engine before."""
        self._close()
        settings = {"kv_cache": "32 blocks", "max_num_seqs": 3, "max_num_batched_tokens": 256, "speculation": "off",
                    **config, **self._shape}  # fmt: skip
        dist.broadcast_object_list([settings], src=0)
        self._engine = Engine(self._model, EngineConfig(**settings))
        return self._engine

    def end(self) -> None:
        """Release the followers."""
        self._close()
        dist.broadcast_object_list([None], src=0)

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def follow(model: PreTrainedModel) -> None:
    """Make the controller's engines at another rank, and follow each."""
    box: list[dict[str, Any] | None] = [None]
    while True:
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return
        engine = Engine(model, EngineConfig(**box[0]))
        assert engine.follow() == "closed"
        engine.close()


def run_on_ranks(
    run_world: Callable[..., list[object]], model: PreTrainedModel, shape: tuple[int, int],
    cases: Callable[[Replica], object],
) -> object:  # fmt: skip
    """Run `cases` at the controller of a mesh and return its result."""

    def rank(rank: int) -> object:
        if rank > 0:
            return follow(model)
        replica = Replica(model, *shape)
        found = cases(replica)
        replica.end()
        return found

    return run_world(shape[0] * shape[1], rank, timeout_s=500.0)[0]


@pytest.mark.slow
@SHAPES_AND_SETTINGS
def test_any_pause_at_any_step_of_a_replica_changes_no_bit(make_model, run_world, tp, pp, number):
    settings = dict(SETTINGS[number])
    between = settings.pop("between")
    tests, model = load("test_interruption"), make_model("qwen3")
    alone = Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=3, max_num_batched_tokens=256, k_blocks=2))
    expected = [tests.outcome(answer) for answer in tests.play(alone, 1.0)[0]]

    def cases(replica: Replica) -> list[object]:
        tests.test_pausing_before_any_step_in_any_mode_changes_no_bit(replica.make, way="plain", **settings)
        tests.test_blocks_chunks_and_overlap_change_no_bit_without_a_pause(replica.make, "plain")
        tests.test_pausing_around_a_stop_token_changes_no_bit(replica.make, "plain")
        tests.test_any_mode_may_follow_any_other(replica.make, "plain", between)
        return [tests.outcome(answer) for answer in tests.play(replica.make(chunked_prefill_size=7), 1.0)[0]]

    assert run_on_ranks(run_world, model, (tp, pp), cases) == expected


@pytest.mark.slow
@SHAPES_ALONE
def test_aborts_flushes_and_a_full_pool_of_a_replica_lose_nothing(make_model, run_world, tp, pp):
    tests, model = load("test_interruption"), make_model("qwen3")

    def cases(replica: Replica) -> int:
        make = replica.make
        for mode in MODES:
            tests.test_the_same_pause_twice_does_nothing_the_second_time(make, mode)
            tests.test_idle_engine_can_be_paused_and_continued(make, mode, "plain")
            tests.test_request_that_arrives_while_paused_queues_and_can_be_aborted(make, mode, "plain")
        for mode in ("retract", "in_place"):
            tests.test_paused_requests_can_be_aborted_one_by_one(make, mode)
        for mode in ("retract", "abort"):
            tests.test_flush_empties_the_pool_however_many_wait(make, mode, "plain")
        for test in (
            tests.test_pausing_right_before_a_finish_lets_it_finish_once,
            tests.test_in_place_then_abort_finishes_promptly_without_another_forward,
            tests.test_flush_under_an_in_place_pause_is_refused_while_sequences_hold_blocks,
            tests.test_pool_for_8_of_64_requests_answers_what_an_ample_one_does,
            tests.test_retractions_are_counted_per_request_and_change_nothing,
        ):
            test(make, "plain")
        if pp == 1:  # it counts tokens by forwards
            tests.test_in_place_then_abort_answers_a_caller_that_waits_on_another_thread(make)
        tests.test_abort_takes_exact_ids_and_reports_unknown_ones(make)
        tests.test_flush_works_under_an_in_place_pause_when_all_wait(make)
        tests.test_flush_without_a_pause_is_refused_while_sequences_run(make)
        return 1

    assert run_on_ranks(run_world, model, (tp, pp), cases) == 1


@pytest.mark.slow
@SHAPES
def test_random_events_at_a_replica_lose_nothing(make_model, run_world, tp, pp):
    traces = load("random_traces")
    # As the module's own, with a layer for each of two stages and a head for each of two ranks.
    model = make_model(
        "qwen3", num_hidden_layers=2, vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip

    @functools.cache
    def undisturbed(kind: int) -> object:
        alone = Engine(model, EngineConfig(kv_cache=traces.NUM_BLOCKS, k_blocks=K_BLOCKS))
        [whole] = alone.generate(traces.prompt_of(kind), traces.params_of(kind, 40))
        return whole

    def cases(replica: Replica) -> tuple[dict[str, int], dict[str, int]]:
        engine = replica.make(
            kv_cache=traces.NUM_BLOCKS, max_num_seqs=traces.NUM_PLACES, max_num_batched_tokens=40,
            chunked_prefill_size=11, pin_budget=1.0, admission_ratio=0.0,
        )  # fmt: skip
        traces.undisturbed = undisturbed
        trace, dice = traces.Trace(engine), random.Random(10 * tp + pp)
        names = dice.choices(list(traces.WEIGHTS), list(traces.WEIGHTS.values()), k=NUM_EVENTS)
        for index, name in enumerate(names):
            trace.event(name, dice.randrange(10_000))
            if index == NUM_EVENTS // 2:
                trace.check_replay()
        trace.drain()
        trace.check_replay()
        return dict(trace.counts), dict(trace.answers)

    counts, answers = run_on_ranks(run_world, model, (tp, pp), cases)
    assert counts["preempted"] > counts["retracted"] > 0, "blocks never ran out"
    assert set(answers) == {"length", "abort", "ignored"} and min(answers.values()) > 3, answers
