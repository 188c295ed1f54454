"""The gain of a pipeline of two stages from sequence pipelining, and the cost of its controller.

Two processes with one thread each hold half of the layers each. A prompt of --chunks chunks is run with sequence
pipelining and without, by turns: chunk k + 1 is in the first stage while chunk k is in the second, or it waits until
chunk k has left it. sequential_s and pipelined_s are medians, ratio the median of each pair's ratio; with stages of
equal length n chunks can reach (n + 1) / 2n. single_s is an engine of one rank and one thread.

Then --batch sequences decode --new-tokens each, without drafts: control_bytes_per_step is the number of bytes that the
controller sends, control_us_per_step its time for writing, sending and reading messages, control_share that time over a
step of a single rank. One sequence alone has nothing to overlap: overhead_us_per_step is how much longer its step takes
than a single rank's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ....rollout.sampling_params import SamplingParams
from ..parts.budget import say
from ..parts.load import positive
from ..parts.presets import DTYPES, PRESETS, load_model
from .local_ranks import local_ranks

_MODES = ("sequential", "pipelined")


@dataclass(frozen=True)
class PipelineLoad:
    """The settings that both processes need."""

    model: str
    dtype: str
    chunks: int
    chunk_tokens: int
    batch: int
    new_tokens: int
    repeats: int

    def engine_config(self, *, pp: int, sequence_pipelining: bool = True) -> EngineConfig:
        num_blocks = -(-self.chunks * self.chunk_tokens // 16) + self.batch * -(-(self.new_tokens + 32) // 16)
        rows = max(self.chunk_tokens, self.batch)
        return EngineConfig(
            pp=pp, sequence_pipelining=sequence_pipelining, kv_cache=num_blocks, prefix_cache=False,
            chunked_prefill_size=self.chunk_tokens, max_num_batched_tokens=rows, max_num_seqs=self.batch,
            speculation="off",  # a call would draw from the history of the one before, which has the same tokens
        )  # fmt: skip

    def prompt(self) -> list[int]:
        return [i % 1000 for i in range(self.chunks * self.chunk_tokens)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", metavar="NAME", help=f"{', '.join(PRESETS)}, or a model folder")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--chunks", type=positive, default=4)
    parser.add_argument("--chunk-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--batch", type=positive, default=8, help="sequences that decode")
    parser.add_argument("--new-tokens", type=positive, default=16, metavar="N", help="new tokens of each sequence")
    parser.add_argument("--repeats", type=positive, default=5)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for a model that is not there."""
    load = PipelineLoad(
        options.model, options.dtype, options.chunks, options.chunk_tokens, options.batch, options.new_tokens,
        options.repeats,
    )  # fmt: skip
    load_model(load.model, dtype=load.dtype)  # raises for a wrong name before the second process starts
    with local_ranks(2, _follow, load):
        return _lead(load)


def _follow(load: PipelineLoad) -> None:
    """Run the second stage."""
    engines = _engines(load)
    for mode in _turns(load):
        engines[mode].generate(None)
    for engine in engines.values():
        engine.close()


def _turns(load: PipelineLoad) -> list[str]:
    """List the calls of both ranks in order: a round to warm up, prompts by turns, then the calls that decode."""
    return [*_MODES, *_MODES * load.repeats, *["pipelined"] * 2 * (load.repeats + 1)]


def _engines(load: PipelineLoad) -> dict[str, Engine]:
    """Make one engine for each mode. They have groups of their own, and are used one at a time."""
    model = load_model(load.model, dtype=load.dtype)
    return {mode: Engine(model, load.engine_config(pp=2, sequence_pipelining=mode == "pipelined")) for mode in _MODES}


def _lead(load: PipelineLoad) -> dict[str, object]:
    engines = _engines(load)
    single = Engine(load_model(load.model, dtype=load.dtype), load.engine_config(pp=1))
    prompts: dict[str, list[float]] = {name: [] for name in (*_MODES, "single")}
    for turn in range(load.repeats + 1):
        for name, engine in {**engines, "single": single}.items():
            seconds = _prompt_seconds(engine, load)
            prompts[name] += [seconds] * (turn > 0)
            say(f"prompt {turn}/{load.repeats} {name}: {seconds:.2f} s")
    pipeline = engines["pipelined"]
    decodes = [_decode(engine, load, batch) for batch in (load.batch, 1) for engine in (pipeline, single)
               for _ in range(load.repeats + 1)]  # fmt: skip
    of_batch, single_batch, of_one, single_one = (
        decodes[first + 1 : first + load.repeats + 1] for first in range(0, len(decodes), load.repeats + 1)
    )
    for engine in (*engines.values(), single):
        engine.close()
    return report(load, prompts, of_batch, single_batch, of_one, single_one)


@dataclass(frozen=True)
class DecodeRun:
    """Figures per step of one call in which sequences decode."""

    seconds: float
    control_seconds: float
    control_bytes: float


def _prompt_seconds(engine: Engine, load: PipelineLoad) -> float:
    started = time.perf_counter()
    engine.generate([load.prompt()], SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - started


def _decode(engine: Engine, load: PipelineLoad, batch: int) -> DecodeRun:
    params = SamplingParams(max_new_tokens=load.new_tokens, temperature=0.0, ignore_eos=True)
    metrics = engine.metrics
    before = metrics.num_steps, metrics.control_seconds, metrics.control_bytes
    started = time.perf_counter()
    engine.generate([[number, 1, 2, 3] for number in range(batch)], params)
    seconds = time.perf_counter() - started
    num_steps, control_seconds, control_bytes = (
        now - then
        for now, then in zip((metrics.num_steps, metrics.control_seconds, metrics.control_bytes), before, strict=True)
    )
    say(f"batch {batch}: {seconds / num_steps * 1e3:.1f} ms a step")
    return DecodeRun(seconds / num_steps, control_seconds / num_steps, control_bytes / num_steps)


def report(
    load: PipelineLoad, prompts: dict[str, list[float]], of_batch: list[DecodeRun], single_batch: list[DecodeRun],
    of_one: list[DecodeRun], single_one: list[DecodeRun],
) -> dict[str, object]:  # fmt: skip
    """Return the figures in the printed form."""

    def median(values: list[float], digits: int = 4) -> float:
        return round(statistics.median(values), digits)

    ratios = [fast / slow for fast, slow in zip(prompts["pipelined"], prompts["sequential"], strict=True)]
    step_s = {name: statistics.median(d.seconds for d in decodes) for name, decodes in
              (("batch", single_batch), ("one", single_one), ("one of two stages", of_one))}  # fmt: skip
    control_s = statistics.median(d.control_seconds for d in of_batch)
    return {
        "model": load.model,
        "dtype": load.dtype,
        "prompt_tokens": load.chunks * load.chunk_tokens,
        "chunks": load.chunks,
        "repeats": load.repeats,
        "sequential_s": median(prompts["sequential"]),
        "pipelined_s": median(prompts["pipelined"]),
        "ratio": median(ratios),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "ideal_ratio": round((load.chunks + 1) / (2 * load.chunks), 4),
        "single_s": median(prompts["single"]),
        "batch": load.batch,
        "control_bytes_per_step": median([d.control_bytes for d in of_batch], 1),
        "control_us_per_step": round(control_s * 1e6, 1),
        "control_share": round(control_s / step_s["batch"], 4),
        "single_step_ms": round(step_s["one"] * 1e3, 3),
        "two_stage_step_ms": round(step_s["one of two stages"] * 1e3, 3),
        "overhead_us_per_step": round((step_s["one of two stages"] - step_s["one"]) * 1e6, 1),
    }
