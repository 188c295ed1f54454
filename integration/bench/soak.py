"""A test that memory stays flat: many decode steps of a very small model, with a changing set of requests.

At every moment up to --batch requests run. The prompts of new ones partly hit prefixes of earlier ones, partly evict
them; they end at different lengths, and some are aborted before. Resident memory is read every few steps,
the first tenth of the steps warms up, and the remaining steps are cut into tenths: the bar is that the highest reading
of the last tenth is within 1 % of the highest of the first. Exits with 1 where it is not.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.sampling_params import SamplingParams
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive

_BAR = 0.01
_LEAST_STEPS = 200
_READ_EVERY = 10  # steps
_STATM = Path("/proc/self/statm")
_VOCABULARY = 512
_NUM_STEMS = 12  # prefixes that prompts share
_ABORT_CHANCE = 0.03  # in each step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=50_000)
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=EngineConfig.overlap)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=1)
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report; `passed` tells whether the bar is met. Raises ValueError where the system does
    not report a process's memory.
    """
    if not _STATM.exists():
        raise ValueError("bench soak reads /proc/self/statm, which this system does not have")
    if options.steps < _LEAST_STEPS:
        raise ValueError(f"--steps {options.steps}: a tenth of less than {_LEAST_STEPS} holds too few readings")
    torch.set_num_threads(options.threads)
    engine = Engine(_model(), EngineConfig(kv_cache=160, max_num_seqs=options.batch, overlap=options.overlap))
    budget, num_steps = Budget(options.max_seconds), 0
    churn = Churn(engine, options.batch, options.seed)
    readings: list[int] = []
    started = time.perf_counter()
    with engine.model.rollout_phase():
        for step in range(options.steps):
            if step % _READ_EVERY == 0 and step >= _LEAST_STEPS and budget.left < 0:
                say(f"no time for more than {step} of {options.steps} steps")
                break
            churn.step()
            num_steps = step + 1
            if step % _READ_EVERY == 0:
                readings.append(resident_bytes())
            if step % max(options.steps // 10, 1) == 0:
                say(f"step {step}: {readings[-1] / 2**20:.1f} MiB")
    seconds = time.perf_counter() - started
    cached = engine.metrics.num_cached_tokens
    engine.close()
    return {
        "steps": num_steps,
        "overlap": options.overlap,
        "seconds": round(seconds, 1),
        "num_ended": churn.num_ended,
        "num_aborted": churn.num_aborted,
        "num_cached_tokens": cached,
        **verdict(readings),
    }


def verdict(readings: list[int]) -> dict[str, object]:
    """Compute the tenths of the readings in bytes, after a tenth of warm-up, and whether the last equals the first."""
    counted = readings[len(readings) // 10 :]
    tenth = len(counted) // 10
    starts = [index * tenth for index in range(10)]
    peaks = [max(counted[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    growth = peaks[-1] / peaks[0] - 1
    return {
        "peak_mib_by_tenth": ", ".join(f"{peak / 2**20:.1f}" for peak in peaks),
        "growth": round(growth, 5),
        "bar": _BAR,
        "passed": growth <= _BAR,
    }


class Churn:
    """A driver of an engine with requests that end in every way, a pure function of the seed."""

    def __init__(self, engine: Engine, batch: int, seed: int) -> None:
        self.engine, self.batch = engine, batch
        self.num_ended = self.num_aborted = self._num_sent = 0
        self._random = random.Random(seed)
        self._stems = [self._tokens(self._random.randint(20, 90)) for _ in range(_NUM_STEMS)]
        self._open: set[str] = set()

    def step(self) -> None:
        """Run one step of the engine; adds and aborts requests."""
        while len(self._open) < self.batch:
            self._send()
        if self._random.random() < _ABORT_CHANCE:
            self.engine.abort_request(self._random.choice(sorted(self._open)))
        for completion in self.engine.step():
            self._open.discard(completion.id)
            is_aborted = completion.finish_reason is not None and completion.finish_reason.type == "abort"
            self.num_aborted += is_aborted
            self.num_ended += not is_aborted

    def _send(self) -> None:
        if self._random.random() < 0.01:  # a new prefix replaces a shared one
            self._stems[self._random.randrange(_NUM_STEMS)] = self._tokens(self._random.randint(20, 90))
        prompt = self._random.choice(self._stems) + self._tokens(self._random.randint(1, 20))
        params = SamplingParams(
            max_new_tokens=self._random.randint(1, 60), ignore_eos=True, temperature=self._random.choice((0.0, 1.0)),
            top_p=self._random.choice((0.9, 1.0)), repetition_penalty=self._random.choice((1.0, 1.1)),
            sampling_seed=self._num_sent,
        )  # fmt: skip
        self._num_sent += 1
        self._open |= set(self.engine.add(prompt, params))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(_VOCABULARY) for _ in range(count)]


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=_VOCABULARY, tie_word_embeddings=True, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)
