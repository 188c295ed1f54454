"""The cost of interrupting generation: the latency of each kind of pause, and of continuing after it.

A batch of random prompts decodes on a background engine. At random moments another thread pauses it, in turn in place,
by retraction and by abortion, and times the call, which returns when the pause holds; then the engine continues until
it decodes the whole batch again, without drafts. step_ms_p50 is the median over the decode steps right before the
pauses, so that other work on the machine affects both equally. resume_ms is the time to continue after a retraction and
a flush: from `continue_generation` until every known token has its KV again and the next step would decode the whole
batch. ideal_prefill_ms is the same for new requests of the same tokens, on an empty cache. Both are medians over the
repeats. With two threads or more, other load on the same cores distorts the times much: prefer --threads 1.

Bars: the p99 of every mode at most twice the median step; resuming at most 1.25 times the ideal prefill.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.loop.commands import PauseMode, PauseReport
from ...rollout.sampling_params import SamplingParams
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import Load, positive
from .parts.presets import DTYPES, PRESETS, load_model
from .parts.runs import clock, find_device

MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort")
_NUM_DECODE_STEPS = 16  # before a retraction
_POLL_SECONDS = 0.002
_PATIENCE = 120.0  # seconds; an engine that takes longer to decode again is broken


@dataclass(frozen=True)
class Resume:
    """One repeat of continuing after a retraction, and of prefilling the same tokens."""

    resume_seconds: float
    ideal_seconds: float
    num_tokens: int


@dataclass(frozen=True)
class _Count:
    """Counts of an engine's work until now."""

    batch: int  # running sequences; 0 unless all of the batch run
    num_rows: int
    num_steps: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    parser.add_argument("--batch", type=positive, default=32, help="sequences that decode")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=512, help="room for decoding between two abortions")
    parser.add_argument("--pauses", type=positive, default=40, help="number of pauses of each mode")
    parser.add_argument("--repeats", type=positive, default=3, help="how often to resume; the median counts")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=EngineConfig.overlap)
    parser.add_argument("--threads", type=positive, help="default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments of pauses")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for an option that does not fit the machine or the model."""
    if options.threads:
        torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    device = find_device(options.device)
    model = load_model(options.model, dtype=options.dtype, device=str(device))
    load = Load(options.batch, options.prompt_tokens, options.new_tokens)
    bench = PauseBench(make_engine(model, load, overlap=options.overlap), load, options.seed)
    with bench.engine.model.rollout_phase():
        resumes = [bench.resume(repeat) for repeat in budget.share(0.4).rounds(options.repeats)]
        steps, latencies = bench.pauses(options.pauses, budget)
    bench.engine.close()
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "batch": load.batch,
        "prompt_tokens": load.prompt_tokens,
        "pauses": len(steps) // len(MODES),
        "overlap": options.overlap,
    }
    return {**settings, **report(steps, latencies, resumes)}


def report(
    step_seconds: Sequence[float], latencies: dict[str, list[float]], resumes: Sequence[Resume]
) -> dict[str, object]:
    """Return milliseconds: medians and 99th percentiles, and their ratios to the measures of the bars."""
    step = statistics.median(step_seconds)
    numbers: dict[str, object] = {"step_ms_p50": _ms(step)}
    for mode, seconds in latencies.items():
        numbers[f"{mode}_ms_p50"] = _ms(percentile(seconds, 50))
        numbers[f"{mode}_ms_p99"] = _ms(percentile(seconds, 99))
    worst = max(percentile(seconds, 99) for seconds in latencies.values())
    return {
        **numbers,
        "worst_p99_over_step": round(worst / step, 3),
        "resume_ms": _ms(statistics.median(r.resume_seconds for r in resumes)),
        "ideal_prefill_ms": _ms(statistics.median(r.ideal_seconds for r in resumes)),
        "resume_over_ideal": round(statistics.median(r.resume_seconds / r.ideal_seconds for r in resumes), 3),
        "resumed_tokens": resumes[-1].num_tokens,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that this percentage of the values does not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def make_engine(model: torch.nn.Module, load: Load, *, overlap: bool) -> Engine:
    """Make an engine that holds the load at once, and its prefixes. Raises ValueError for a too short context."""
    length = load.prompt_tokens + load.new_tokens
    config = EngineConfig(
        kv_cache=load.batch * -(-(length + 1) // EngineConfig.block_size) + 64,
        max_num_seqs=load.batch,
        max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, load.batch),
        overlap=overlap,
        speculation="off",  # a decode step has one row of every sequence
    )
    engine = Engine(model, config)
    if length > engine.max_model_len:
        raise ValueError(f"{length} tokens (prompt and new) exceed the context of {engine.max_model_len}")
    return engine


class PauseBench:
    """An engine whose batch is kept full, driven step by step or by its own thread."""

    def __init__(self, engine: Engine, load: Load, seed: int) -> None:
        self.engine, self.load = engine, load
        self._random = random.Random(seed)

    def resume(self, repeat: int) -> Resume:
        """Retract the batch during decoding, flush, and continue; then prefill the same tokens as new requests."""
        engine = self.engine
        self._fill(self.load.prompts(engine.model.vocab_size, repeat))
        self._until_decoding()
        for _ in range(_NUM_DECODE_STEPS):
            engine.step()
        engine.pause_generation("retract")
        known = [list(request.sequence.token_ids) for request in engine.parts.sequences.requests()]
        self._flush()
        engine.continue_generation()
        resumed = self._until_decoding()
        engine.pause_generation("abort")
        self._flush()
        engine.continue_generation()
        self._fill(known)
        ideal = self._until_decoding()
        engine.abort_request(abort_all=True)
        self._flush()
        print(f"resume {repeat + 1}: {_ms(resumed)} ms, prefill {_ms(ideal)} ms", file=sys.stderr,
              flush=True)  # fmt: skip
        return Resume(resumed, ideal, sum(map(len, known)))

    def pauses(self, num_pauses: int, budget: Budget) -> tuple[list[float], dict[str, list[float]]]:
        """Measure the calls of `pause_generation` at random moments of decoding.

        Returns the seconds of the decode step before each call, and the seconds of each call by mode.
        """
        engine = self.engine
        steps: list[float] = []
        latencies: dict[str, list[float]] = {mode: [] for mode in MODES}
        prompts = self.load.prompts(engine.model.vocab_size, -1)
        engine.start()
        for number in budget.rounds(num_pauses):
            for mode in MODES:
                state: dict[str, Any] = engine.state()
                if state["num_running"] + state["num_waiting"] < self.load.batch:
                    engine.abort_request(abort_all=True)
                    self._fill(prompts)
                steps.append(self._await_decoding())
                threading.Event().wait(self._random.random() * 2 * steps[-1])
                started = time.perf_counter()
                found: PauseReport = engine.pause_generation(mode, timeout_s=_PATIENCE)
                latencies[mode].append(time.perf_counter() - started)
                assert found.num_aborted + found.num_retracted + found.num_running == self.load.batch, found
                engine.continue_generation()
            if number % 10 == 0:
                say(
                    f"pause {number + 1}/{num_pauses}: "
                    + ", ".join(f"{m} {_ms(s[-1])} ms" for m, s in latencies.items())
                )
        engine.abort_request(abort_all=True)
        engine.stop()
        return steps, latencies

    def _fill(self, prompts: Sequence[list[int]]) -> None:
        length = self.load.prompt_tokens + self.load.new_tokens
        for prompt in prompts:
            self.engine.add(prompt, SamplingParams(max_new_tokens=length - len(prompt), ignore_eos=True))

    def _until_decoding(self) -> float:
        """Run steps until one has decoded the whole batch; returns the seconds of those before it."""
        engine = self.engine
        started = before = clock(engine.model.device)
        seen = self._count()
        while True:
            engine.step()
            now, last = clock(engine.model.device), self._count()
            if _has_decoded(seen, last):
                return before - started
            before, seen = now, last

    def _await_decoding(self) -> float:
        """Wait until the background loop has decoded the whole batch; returns the seconds of that step."""
        deadline, pulse = time.monotonic() + _PATIENCE, threading.Event()
        seen = self._count()
        while not _has_decoded(seen, last := self._count()):
            assert time.monotonic() < deadline, self.engine.state()
            seen = last
            pulse.wait(_POLL_SECONDS)
        return (last.seconds - seen.seconds) / (last.num_steps - seen.num_steps)

    def _count(self) -> _Count:
        state: dict[str, Any] = self.engine.state()
        metrics, is_full = state["metrics"], state["num_running"] == self.load.batch and not state["num_waiting"]
        batch = self.load.batch if is_full else 0
        return _Count(batch, metrics["num_rows"], metrics["num_steps"], metrics["step_seconds"])

    def _flush(self) -> None:
        done = self.engine.flush_cache()
        assert done.success, done.error_msg


def _has_decoded(before: _Count, after: _Count) -> bool:
    num_rows, num_steps = after.num_rows - before.num_rows, after.num_steps - before.num_steps
    return before.batch == after.batch > 0 and num_steps > 0 and num_rows == num_steps * after.batch


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
