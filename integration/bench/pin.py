"""The benefit of pinning a conversation: the time to the first token of its next turn, after other traffic.

Depth sweep. For each depth D, with and without a pin, on a fresh engine: warm turns 0..D of one conversation
(generating one token), pin the blocks whose hashes the KV events reported (pinned arm only), flood the cache with
distinct prompts, ceil(3 x capacity / tokens that each leaves in the cache) of them (only their blocks matter, so the
model computes nothing for them), wait until all are answered, then
stream turns 0..D+1 and take the time to the first chunk. The number of cached tokens comes from that same request: a
second probe would find the blocks of the first one. Both arms take turns; numbers are medians over the repetitions.

The conversation is the one of the seed benchmark, scaled: prompt lengths times 768 / 5120, the ratio of the models'
widths. The uncached part of its prompts (7 % at depth 0, 35, 19, 11 and 7 % at the others) is kept in proportion, times
0.57, so that 96 % of the deepest prompt is cached; there its size follows from the text's chat template, here from the
length of the new turn. Other load on the same cores distorts single times: prefer --threads 1.

Bars: nothing cached in the baseline; 93 to 97 % cached at the deepest; speedup there at least 11.1, the seed's figure;
and the pinned times from depth 2 on within a factor of 1.5.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.kv.events import BlockStored, EventBatch
from ...rollout.sampling_params import SamplingParams
from .parts.budget import Budget, add_budget_argument
from .parts.decode_load import without_forward
from .parts.load import positive
from .parts.presets import DTYPES, PRESETS, load_model

# depth: prompt tokens of the seed's conversation, and how many of them its pinned arm had to compute
_SEED = {0: (3158, 221), 2: (4810, 1683), 6: (7347, 1396), 10: (10826, 1191), 16: (15002, 1050)}
_SCALE = 768 / 5120
_NEW_TURN_SCALE = 0.57
_FLOOD_TOKENS = 160  # per prompt: whole blocks, all of which stay in the cache
_FLOOD_ROUNDS = 3  # the flood is this many times the capacity
_MAX_NUM_SEQS = 8


@dataclass(frozen=True)
class Conversation:
    """Turns of random tokens: the same for the same seed, up to any depth."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: dict[int, int]  # by depth: turns 0..D+1
    num_warm_tokens: dict[int, int]  # by depth: turns 0..D

    def measured(self, depth: int) -> list[int]:
        """Return turns 0..depth+1."""
        return list(self.token_ids[: self.num_prompt_tokens[depth]])

    def warmed(self, depth: int) -> list[int]:
        """Return turns 0..depth."""
        return list(self.token_ids[: self.num_warm_tokens[depth]])


@dataclass(frozen=True)
class PinProbe:
    """One measurement of one arm at one depth."""

    ttft_s: float
    num_cached_tokens: int
    num_pinned: int
    first_token: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    parser.add_argument("--depths", type=int, nargs="+", choices=tuple(_SEED), default=list(_SEED))
    parser.add_argument("--capacity", type=positive, default=6400, help="tokens of the KV pool")
    parser.add_argument("--scale", type=float, default=_SCALE, help="factor on the seed's prompt lengths")
    parser.add_argument("--repetitions", type=positive, default=5, help="the median counts")
    parser.add_argument("--threads", type=positive, help="default: torch's own choice")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--plot", metavar="FILE", help="write a chart (needs matplotlib)")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for options that do not fit each other or the machine."""
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed")
    if options.threads:
        torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    model = load_model(options.model, dtype=options.dtype)
    capacity = options.capacity // EngineConfig.block_size * EngineConfig.block_size
    depths = sorted(set(options.depths))
    talk = conversation(model.config.vocab_size, options.scale)
    if (longest := talk.num_prompt_tokens[depths[-1]]) * 2 > capacity:
        raise ValueError(f"--capacity {options.capacity} must be twice the {longest} tokens of the deepest prompt")
    measure(model, talk, depths[0], capacity, pinned=True, repetition=-1)  # a warm-up
    probes: dict[tuple[int, bool], list[PinProbe]] = {(depth, arm): [] for depth in depths for arm in (False, True)}
    for repetition in budget.rounds(options.repetitions):
        for (depth, pinned), so_far in probes.items():
            so_far.append(measure(model, talk, depth, capacity, pinned=pinned, repetition=repetition))
            print(
                f"repetition {repetition + 1}/{options.repetitions} depth {depth} {'pinned' if pinned else 'baseline'}:"
                f" {so_far[-1].ttft_s * 1e3:.1f} ms", file=sys.stderr, flush=True,
            )  # fmt: skip
    rows = [row(depth, talk, probes[depth, False], probes[depth, True]) for depth in depths]
    if options.plot:
        plot(rows, options.plot)
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "capacity": capacity,
        "flood_requests": num_flood_requests(capacity),
        "repetitions": len(probes[depths[0], False]),
    }
    return {**settings, **summary(rows, probes), "depths": rows}


def conversation(vocab_size: int, scale: float = _SCALE) -> Conversation:
    """Make the seed's conversation at a scale. Raises ValueError where a new turn would be empty."""
    num_prompt = {depth: round(num_tokens * scale) for depth, (num_tokens, _) in _SEED.items()}
    num_new = {depth: round(num_tokens * scale * _NEW_TURN_SCALE) for depth, (_, num_tokens) in _SEED.items()}
    if min(num_new.values()) < 1:
        raise ValueError(f"--scale {scale} leaves nothing of a turn")
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(vocab_size, (max(num_prompt.values()),), generator=generator).tolist()
    return Conversation(tuple(token_ids), num_prompt, {depth: num_prompt[depth] - num_new[depth] for depth in _SEED})


def num_flood_requests(capacity: int) -> int:
    """Return the number of requests whose blocks would fill the cache three times."""
    return math.ceil(_FLOOD_ROUNDS * capacity / _FLOOD_TOKENS)


def measure(
    model: PreTrainedModel, talk: Conversation, depth: int, capacity: int, *, pinned: bool, repetition: int
) -> PinProbe:
    """Warm, pin or not, flood, drain, and time the next turn, on a new engine."""
    config = EngineConfig(kv_cache=capacity // EngineConfig.block_size, max_num_seqs=_MAX_NUM_SEQS)
    engine = Engine(model, config)
    one, two = (SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True) for count in (1, 2))
    with engine.model.rollout_phase():
        stored: list[int] = []
        hear = _collector(stored)
        engine.kv_events.attach(hear)  # before the warm-up: events report a cached block only once
        engine.generate(talk.warmed(depth), one)
        engine.kv_events.detach(hear)
        num_pinned = engine.pin_blocks(stored, owner="bench").num_pinned if pinned else 0
        if pinned and num_pinned < len(stored):
            raise ValueError(f"only {num_pinned} of {len(stored)} blocks could be pinned: --capacity is too small")
        generator = torch.Generator().manual_seed(1000 + repetition)
        shape = (num_flood_requests(capacity), _FLOOD_TOKENS)
        with without_forward(engine):
            engine.generate(torch.randint(engine.model.vocab_size, shape, generator=generator).tolist(), one)
        assert not engine.has_work
        prompt = talk.measured(depth)
        gc.collect()
        started = time.perf_counter()
        chunks = engine.stream(prompt, two)
        first = next(chunks)
        seconds = time.perf_counter() - started
        [completion] = [chunk.completion for chunk in chunks if chunk.completion is not None]
    engine.close()
    return PinProbe(seconds, completion.num_cached_tokens, num_pinned, first.token_ids[0])


def row(depth: int, talk: Conversation, baseline: list[PinProbe], pinned: list[PinProbe]) -> dict[str, Any]:
    """Build one line of the table: medians of the times, cached fractions of the prompt."""
    num_tokens = talk.num_prompt_tokens[depth]
    times = [statistics.median(probe.ttft_s for probe in arm) for arm in (baseline, pinned)]
    cached = [statistics.median(probe.num_cached_tokens for probe in arm) / num_tokens for arm in (baseline, pinned)]
    return {
        "depth": depth,
        "prompt_tokens": num_tokens,
        "baseline_ttft_ms": round(times[0] * 1e3, 1),
        "pinned_ttft_ms": round(times[1] * 1e3, 1),
        "speedup": round(times[0] / times[1], 1),
        "baseline_cached": round(cached[0], 3),
        "pinned_cached": round(cached[1], 3),
        "num_pinned": pinned[0].num_pinned,
    }


def summary(rows: list[dict[str, Any]], probes: dict[tuple[int, bool], list[PinProbe]]) -> dict[str, object]:
    """Compute the figures of the bars; `same_tokens`: both arms of each repetition began with the same token."""
    deepest = rows[-1]["depth"]
    pairs = list(zip(probes[deepest, False], probes[deepest, True], strict=True))
    ratios = [baseline.ttft_s / pinned.ttft_s for baseline, pinned in pairs]
    flat = [row["pinned_ttft_ms"] for row in rows if row["depth"] >= 2] or [rows[-1]["pinned_ttft_ms"]]
    return {
        "speedup": rows[-1]["speedup"],
        "speedup_range": [round(min(ratios), 1), round(max(ratios), 1)],
        "pinned_growth": round(max(flat) / min(flat), 2),
        "same_tokens": all(len({p.first_token for arm in (False, True) for p in probes[depth, arm]}) == 1
                           for depth, _ in probes),
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw both times over the prompt's length, with the speedups."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="prompt tokens", ylabel="time to first token, ms", title="A pinned conversation")
    lengths = [row["prompt_tokens"] for row in rows]
    for name in ("baseline", "pinned"):
        axes.plot(lengths, [row[f"{name}_ttft_ms"] for row in rows], marker="o", label=name)
    for row in rows:
        axes.annotate(f"{row['speedup']}x", (row["prompt_tokens"], row["pinned_ttft_ms"]), (0, 8),
                      textcoords="offset points", ha="center")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _collector(hashes: list[int]) -> Callable[[EventBatch], None]:
    """Make a sink that appends the hashes of newly cached blocks."""

    def hear(batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                hashes.extend(event.block_hashes)

    return hear
