"""The cost of work at delivery for a decode step, with overlap and without, and the cost of the trace.

A batch decodes with a tokenizer whose decoding takes --work-ms in all for each step, as a slow consumer would. With
overlap that work is done while the model runs the next step. Variants take turns within each repeat; a figure is the
median over the decode steps of all repeats. Bars: with overlap 5 ms of work make a step under 2 ms longer; the trace
costs under 2 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.sampling_params import SamplingParams
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive
from .parts.presets import load_model

_PROMPT_TOKENS = 64
_NUM_SKIPPED = 10  # the first steps, which prefill, and the last, which may have fewer sequences


class SlowTokenizer:
    """A tokenizer that decodes every token to no text and takes a given time."""

    eos_token_id = None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def decode(self, token_ids: list[int], **_: bool) -> str:
        if self._seconds:
            time.sleep(self._seconds)  # stands for the work that is measured
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", help="a preset, or a folder")
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--new-tokens", type=positive, default=80)
    parser.add_argument("--work-ms", type=float, default=5.0, help="work of all deliveries of a step together")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=1)
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report."""
    torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    model = load_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder) / "trace.json")
        variants = {
            "plain_ms": (False, 0.0, None),
            "plain_work_ms": (False, options.work_ms, None),
            "overlap_ms": (True, 0.0, None),
            "overlap_work_ms": (True, options.work_ms, None),
            "traced_ms": (False, 0.0, trace),
        }
        steps: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in budget.rounds(options.repeats):
            for name, variant in variants.items():
                seconds = _decode_steps(model, options.batch, options.new_tokens, *variant)
                steps[name] += seconds
                say(f"repeat {repeat + 1}/{options.repeats} {name}: {statistics.median(seconds) * 1e3:.2f}")
    report: dict[str, float] = {name: round(statistics.median(times) * 1e3, 3) for name, times in steps.items()}
    return {
        "model": options.model,
        "batch": options.batch,
        "work_ms": options.work_ms,
        **report,
        "plain_growth_ms": round(report["plain_work_ms"] - report["plain_ms"], 3),
        "overlap_growth_ms": round(report["overlap_work_ms"] - report["overlap_ms"], 3),
        "trace_cost": round(report["traced_ms"] / report["plain_ms"] - 1, 4),
    }


def engine_config(batch: int, *, overlap: bool, trace: str | None) -> EngineConfig:
    """Return the settings of an engine whose decode steps have one row of every sequence."""
    return EngineConfig(
        kv_cache="1024 blocks", max_num_seqs=batch, overlap=overlap, trace=trace, speculation="off"
    )  # fmt: skip


def _decode_steps(
    model: torch.nn.Module, batch: int, num_new: int, overlap: bool, work_ms: float, trace: str | None
) -> list[float]:
    """Measure the seconds of each decode step of one load."""
    tokenizer = SlowTokenizer(work_ms / 1e3 / batch)
    config = engine_config(batch, overlap=overlap, trace=trace)
    # The engine reads only `decode` and `eos_token_id` of it.
    engine = Engine(model, config, tokenizer=cast(PreTrainedTokenizerBase, tokenizer))
    generator = torch.Generator().manual_seed(0)
    for index in range(batch):
        prompt = torch.randint(0, engine.model.vocab_size, (_PROMPT_TOKENS,), generator=generator).tolist()
        engine.add(prompt, SamplingParams(max_new_tokens=num_new, ignore_eos=True, sampling_seed=index))
    seconds = []
    with engine.model.rollout_phase():
        while engine.has_work:
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
    engine.close()
    return seconds[_NUM_SKIPPED:-_NUM_SKIPPED]
