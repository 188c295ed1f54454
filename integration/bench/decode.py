"""The time of a decode step by batch and context, beside its floor; and the parts of one step's time.

A cell of the table is a batch of sequences that all decode at about that many tokens of context (their KV is random
numbers, not the result of a prefill). step_ms is the median step, sampling and scheduling included. floor_ms is the
least time of any program that reads every weight and every sequence's KV from memory once and computes the products:
the larger of bytes over the bandwidth and operations over the product rate, both measured here first (weights that stay
in a cache between two steps may beat it). Cells whose KV exceeds --max-kv-gib are left out, and named,
and so are those for which no time is left.

Steps run as a call of `generate` runs them, those of one schedule together (`EngineConfig.num_scheduler_steps`); each
has the mean of their time. host_ms is the part of the median step outside its replay, where a CPU replays a recorded
step: scheduling, delivery, and turning tokens into text, for which a preset gets a tokenizer of its vocabulary's size
and a folder has its own.

The profile is of one cell (--profile-batch, --profile-context).
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...rollout.model.tokenizer import load_tokenizer
from .parts.budget import Budget, add_budget_argument, say
from .parts.decode_load import DecodeWork, decode_steps, head_dim_of, make_decode_engine, median_ms
from .parts.decode_profile import HostTime, profile_decode
from .parts.load import positive
from .parts.machine_peaks import Peaks, measure_peaks
from .parts.presets import DTYPES, PRESETS, load_model
from .parts.runs import find_device
from .parts.vocabularies import byte_level_bpe

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXTS = (128, 512, 2048, 8192)
_GIB = 2**30
_TABLE_SHARE = 0.85  # of the time; the rest is for the profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    parser.add_argument("--batch", type=positive, nargs="+", default=_BATCHES)
    parser.add_argument("--context", type=positive, nargs="+", default=_CONTEXTS)
    parser.add_argument("--steps", type=positive, default=8, help="measured steps of each cell; the median counts")
    parser.add_argument("--max-kv-gib", type=float, default=4.0)
    parser.add_argument("--profile-batch", type=positive, default=32)
    parser.add_argument("--profile-context", type=positive, default=256)
    parser.add_argument("--profile-steps", type=positive, default=20)
    parser.add_argument("--threads", type=positive, help="default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table (needs matplotlib)")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for an option that does not fit the machine or the model."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = find_device(options.device)
    if options.plot:
        _pyplot()  # raises before the measurement if it is missing
    model = load_model(options.model, dtype=options.dtype, device=str(device))
    if getattr(model.config, "num_attention_heads", None) is None:
        raise ValueError(f"{options.model} has no attention: steps are timed over random KV, of which it has none")
    longest = max(*options.context, options.profile_context) + max(options.steps, options.profile_steps) + 8
    if options.model in PRESETS:
        model.config.max_position_embeddings = max(longest, model.config.max_position_embeddings)
    elif longest > model.config.max_position_embeddings:
        raise ValueError(f"{longest} tokens exceed the context of {model.config.max_position_embeddings}")
    budget = Budget(options.max_seconds * _TABLE_SHARE)
    peaks = measure_peaks(DTYPES[options.dtype], device)
    table: list[dict[str, Any]] = []
    left_out, slowest = [], 0.0
    for context in sorted(options.context):
        for batch in sorted(options.batch):
            if batch * context * kv_bytes_per_token(model) > options.max_kv_gib * _GIB:
                left_out.append(f"{batch} x {context} (memory)")
                continue
            if table and budget.left < 2 * slowest:
                left_out.append(f"{batch} x {context} (time)")
                continue
            began = budget.left
            table.append(_cell(model, batch, context, options, peaks))
            slowest = max(slowest, began - budget.left)
            say(f"batch {batch}, context {context}: {table[-1]['step_ms']} ms")
    profile = _profile(model, options, peaks)
    report: dict[str, object] = {
        "model": options.model,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "invariant": options.invariant,
        "read_gb_s": round(peaks.bytes_per_s / 1e9, 2),
        "product_gflop_s": round(peaks.operations_per_s / 1e9, 1),
        "steps": table,
        "left_out": ", ".join(left_out) or "nothing",
        **profile,
    }
    if options.plot:
        plot(report, table, options.plot)
    return report


@cache
def tokenizer_of(model: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model folder, if it has one, or train one for a preset."""
    return byte_level_bpe(PRESETS[model]["vocab_size"]) if model in PRESETS else load_tokenizer(Path(model))


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config) * model.dtype.itemsize


def _cell(
    model: PreTrainedModel, batch: int, context: int, options: argparse.Namespace, peaks: Peaks
) -> dict[str, Any]:
    engine = make_decode_engine(
        model, batch, context, options.steps, invariant=options.invariant, tokenizer=tokenizer_of(options.model)
    )
    host = HostTime(engine, batch)
    try:
        step_ms = median_ms(decode_steps(engine, batch, context, options.steps, host))
    finally:
        engine.close()
    work = DecodeWork.of(model, batch, context, kv_bytes_per_token(model))
    floor_ms = work.floor_seconds(peaks) * 1e3
    return {
        "batch": batch,
        "context": context,
        "step_ms": step_ms,
        "host_ms": median_ms(host.seconds) if host.seconds else None,
        "floor_ms": round(floor_ms, 3),
        "of_floor": round(floor_ms / step_ms, 3),
        "read_mb": round(work.num_bytes / 1e6, 1),
        "gflop": round(work.num_operations / 1e9, 2),
    }


def _profile(model: PreTrainedModel, options: argparse.Namespace, peaks: Peaks) -> dict[str, object]:
    batch, context, num_steps = options.profile_batch, options.profile_context, options.profile_steps
    engine = make_decode_engine(model, batch, context, num_steps, invariant=options.invariant)
    try:
        before = decode_steps(engine, batch, context, num_steps)
        parts = profile_decode(engine, batch, context, num_steps)
        step_ms = statistics.median(before + decode_steps(engine, batch, context, num_steps)) * 1e3
    finally:
        engine.close()
    work = DecodeWork.of(model, batch, context, kv_bytes_per_token(model))
    return {
        "profiled": f"batch {batch}, context {context}: {step_ms:.3f} ms a step",
        "profile": [{"part": part, "ms": round(share * step_ms, 3), "share": share} for part, share in parts.items()],
        "profile_floor": {
            "bytes_ms": round(work.num_bytes / peaks.bytes_per_s * 1e3, 3),
            "operations_ms": round(work.num_operations / peaks.operations_per_s * 1e3, 3),
        },
    }


def plot(report: dict[str, object], table: list[dict[str, Any]], path: Path) -> None:
    """Draw step time over batch, one line per context, with its floor dashed."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for context in sorted({cell["context"] for cell in table}):
        cells = [cell for cell in table if cell["context"] == context]
        batches = [cell["batch"] for cell in cells]
        [line] = axes.plot(batches, [cell["step_ms"] for cell in cells], marker="o", label=f"context {context:,}")
        axes.plot(batches, [cell["floor_ms"] for cell in cells], linestyle="--", color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="ms per decode step (dashed: floor)")
    axes.set_title(", ".join(str(report[name]) for name in ("model", "dtype", "device")))
    ticks = sorted({cell["batch"] for cell in table})
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _pyplot() -> Any:
    """Import pyplot. Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib, the extra `train`: pip install -e '.[train]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
