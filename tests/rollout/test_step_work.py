"""The Python work of a decode step, which must be the same for long and short contexts."""

from __future__ import annotations

import gc
import sys
from collections import Counter

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.block_tables import BlockTables
from lockstep.tests.rollout.sequences.watched import Watched

NUM_STEPS = 20  # more than a block


def decode(model, num_prompt_tokens: int, **config: object) -> tuple[Counter, int]:
    """Run NUM_STEPS decode steps of three sequences; returns the calls by function name, and the number of tokens read
    together.

    The module does not run: its own calls are not part of the step.
    """
    engine = Engine(model, EngineConfig(kv_cache="128 blocks", max_num_seqs=4, speculation="off", **config))
    vocab_size = engine.model.vocab_size
    engine.model.forward = lambda token_ids, positions, rows, *_, **__: torch.zeros(
        len(positions if rows is None else rows), vocab_size
    )
    for seed in range(3):
        prompt = [(seed + 3 * i) % 250 for i in range(num_prompt_tokens)]
        engine.add(prompt, SamplingParams(max_new_tokens=NUM_STEPS + 10, sampling_seed=seed, ignore_eos=True))
    calls: Counter = Counter()

    def count(frame, event, argument) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_qualname if event == "call" else argument.__name__] += 1

    with engine.model.rollout_phase():
        for _ in range(4):
            engine.step()
        parts, watched = engine.parts, []
        for sequences in (parts.sequences._sequences, parts.runner.workers._sequences):
            for sequence in sequences.values():
                sequence.token_ids = Watched(sequence.token_ids)
                watched.append(sequence.token_ids)
        for request, prefix in parts.ledger.paths._prefixes.items():
            prefix._token_ids = request.sequence.token_ids
        assert len(watched) == 6
        gc.disable()  # others' callbacks on a collection are not the step's
        sys.setprofile(count)
        try:
            for _ in range(NUM_STEPS):
                engine.step()
        finally:
            sys.setprofile(None)
            gc.enable()
        most = max(ids.most for ids in watched)
        assert all(len(ids) == num_prompt_tokens + 4 + NUM_STEPS for ids in watched)
        engine.abort_request(abort_all=True)
    return calls, most


@pytest.mark.parametrize("sizes", [(), (4,)], ids=["plain", "recorded"])
def test_a_decode_step_calls_no_more_and_looks_at_no_more_tokens_in_a_long_context(make_model, sizes):
    model = make_model("qwen3", num_hidden_layers=1)
    decode(model, 40, cuda_graph_batch_sizes=sizes)  # imports and caches
    short, most_short = decode(model, 40, cuda_graph_batch_sizes=sizes)
    long, most_long = decode(model, 40 + 16 * 24, cuda_graph_batch_sizes=sizes)
    # A table outgrows its array at another time: BlockTables moves it then, once in many blocks.
    for name in ("zeros", "BlockTables._widen"):
        short.pop(name, None), long.pop(name, None)
    assert long == short
    assert most_long == most_short <= 16  # the block that has become full


def test_block_tables_grow_in_place_and_are_cut_and_reused():
    tables = BlockTables()
    for index in range(40):
        tables.add(str(index))
        tables.append(str(index), range(index, 2 * index))
    assert all(tables.blocks(str(index)) == list(range(index, 2 * index)) for index in range(40))
    gathered = tables.gather(["3", "39", "0"])
    assert gathered.shape == (3, 39) and gathered[0, :3].tolist() == [3, 4, 5] and gathered[1, 38] == 77
    gathered[:] = -1
    assert tables.blocks("3") == [3, 4, 5]
    ahead = tables.gather_ahead([("3", (7,)), ("39", ()), ("0", (8, 9))])
    assert ahead[0, :4].tolist() == [3, 4, 5, 7] and ahead[1, :39].tolist() == tables.blocks("39")
    assert ahead[2, :2].tolist() == [8, 9] and tables.blocks("0") == []
    tables.cut("39", 2)
    tables.cut("3", 5)
    assert tables.blocks("39") == [39, 40] and tables.blocks("3") == [3, 4, 5]
    tables.drop("39")
    assert "39" not in tables
    tables.add("again")
    assert tables.blocks("again") == []
