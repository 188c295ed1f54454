"""Tests of recorded decode steps of several ranks: every rank replays, with the bits of plain steps on one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.kernels.collectives.exchange import SOURCE
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
MakeModel = Callable[..., PreTrainedModel]
RunWorld = Callable[..., list[object]]
COMMON = {"k_blocks": 2, "kv_cache": "96 blocks", "max_num_seqs": 8, "speculation": "off", "rank_timeout_s": 60.0}
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(5)]
SETTINGS = {
    "drawn from parts": [SamplingParams(max_new_tokens=24 + 4 * i, sampling_seed=i, ignore_eos=True) for i in range(5)],
    "filtered": [SamplingParams(max_new_tokens=30, sampling_seed=i, ignore_eos=True, top_p=0.8) for i in range(5)],
    "with the host": [SamplingParams(max_new_tokens=30, ignore_eos=True, frequency_penalty=0.5) for _ in range(5)],
}


def answers(engine: Engine, settings: list[SamplingParams]) -> list[tuple[object, ...]]:
    found = engine.generate(PROMPTS if engine.is_controller else None, settings)
    return [(c.token_ids, c.logprobs) for c in found]


def replays(engine: Engine) -> dict[str, int]:
    """Return the number of trusted records of each kind."""
    records = engine.parts.runner.stage._graphs._records
    kinds = [kind for (_, kind), step in records.items() if step.is_trusted]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3", (2, 1)),
        *(pytest.param(f, s, marks=pytest.mark.slow if s == slow else pytest.mark.exhaustive)
          for f, slow in (("qwen3", (2, 2)), ("qwen3_moe", (2, 1)), ("gpt_oss", (2, 2)), ("gemma3", (1, 2)))
          for s in ((2, 1), (1, 2), (2, 2)) if (f, s) != ("qwen3", (2, 1))),
        *(pytest.param(f, (2, 1), marks=pytest.mark.slow) for f in ("qwen3_next", "kimi_linear")),
    ],
)  # fmt: skip
def test_recorded_ranks_give_the_bits_of_one_unrecorded_rank(
    make_model: MakeModel, run_world: RunWorld, family: str, shape: tuple[int, int]
) -> None:
    tp, pp = shape
    wide = {"vocab_size": 1024} if family == "qwen3" else {}  # whose parts can be drawn from
    model = make_model(family, torch.bfloat16, **wide)
    plain = Engine(model, EngineConfig(**COMMON, cuda_graph_batch_sizes=()))
    expected = {name: answers(plain, settings) for name, settings in SETTINGS.items()}

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(tp=tp, pp=pp, **COMMON))
        found = {name: answers(engine, settings) for name, settings in SETTINGS.items()}
        kinds = replays(engine)
        engine.close()
        return found, kinds

    for index, (found, kinds) in enumerate(run_world(tp * pp, rank)):
        assert found == expected, index
        is_last = index >= tp * (pp - 1)
        wanted = {"output"}
        if is_last:
            wanted |= {"draw parts"} if wide and tp > 1 else set()
            wanted |= {"draw"} if index == tp * (pp - 1) else set()
        assert set(kinds) == wanted, index
