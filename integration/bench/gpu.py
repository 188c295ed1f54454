"""The speed of a CUDA GPU with a model of the shape of Qwen3-8B (bfloat16, random weights; --model takes a preset too).

roofline: decode steps by batch, in invariant mode and without, beside the time for reading the weights and the KV at
the memory bandwidth that is measured first (`of_floor`). Then single kernels, the latency of each kind of pause, a
commit of weights that were written in place, and the SHA-256 digest of all weights. logprob_gap of the job is in the
job's own metrics: `lockstep train`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...weight_sync.digests.model_digest import model_digest
from ..service import RolloutService
from . import pause
from .decode import kv_bytes_per_token
from .parts.decode_load import DecodeWork, decode_steps, make_decode_engine, median_ms
from .parts.gpu_kernels import kernel_times
from .parts.load import Load, positive
from .parts.machine_peaks import Peaks, measure_peaks
from .parts.presets import PRESETS, load_model, random_model
from .parts.runs import clock

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="8b", help=f"8b or {', '.join(PRESETS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--steps", type=positive, default=20, help="measured steps of each batch; the median counts")
    parser.add_argument("--kernel-batch", type=positive, default=32)
    parser.add_argument("--pauses", type=positive, default=20, help="number of pauses of each mode")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError where there is no CUDA device, and for an unknown model."""
    if not torch.cuda.is_available():
        raise ValueError("bench gpu needs a CUDA device, and torch sees none here")
    if options.model == "8b":
        model: PreTrainedModel = random_model(
            QWEN3_8B, tie_word_embeddings=False, device=options.device, dtype=torch.bfloat16
        )
        model.eval().requires_grad_(False)
    else:
        model = load_model(options.model, device=options.device)
    peaks = measure_peaks(model.dtype, model.device)
    report: dict[str, object] = {
        "model": options.model,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(model.device),
        "read_gb_s": round(peaks.bytes_per_s / 1e9, 1),
        "product_tflop_s": round(peaks.operations_per_s / 1e12, 1),
    }
    return {**report, **measure(model, options, peaks)}


def measure(model: PreTrainedModel, options: argparse.Namespace, peaks: Peaks) -> dict[str, object]:
    """Make all measurements, on the device of the model."""
    roofline = []
    for batch in options.batch:
        for invariant in (True, False):
            roofline.append(_decode(model, batch, invariant, options, peaks))
            print(f"roofline: {roofline[-1]}", file=sys.stderr, flush=True)
    engine = Engine(model, EngineConfig(kv_cache=64))
    guarantee = engine.model.numerics.guarantee
    linear = guarantee.linear if guarantee else "library"
    engine.close()
    return {
        "roofline": roofline,
        "kernels": kernel_times(model, options.kernel_batch, options.context, peaks, linear=linear),
        **_pauses(model, options),
        **_weights(model),
    }


def _decode(
    model: PreTrainedModel, batch: int, invariant: bool, options: argparse.Namespace, peaks: Peaks
) -> dict[str, Any]:
    engine = make_decode_engine(model, batch, options.context, options.steps, invariant=invariant)
    try:
        step_ms = median_ms(decode_steps(engine, batch, options.context, options.steps))
    finally:
        engine.close()
    floor = DecodeWork.of(model, batch, options.context, kv_bytes_per_token(model)).floor_seconds(peaks)
    return {"batch": batch, "invariant": invariant, "step_ms": step_ms, "of_floor": round(floor * 1e3 / step_ms, 3)}


def _pauses(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, object]:
    load = Load(options.kernel_batch, 128, 512)
    bench = pause.PauseBench(pause.make_engine(model, load, overlap=False), load, seed=0)
    try:
        with bench.engine.model.rollout_phase():
            resumes = [bench.resume(0)]
            steps, latencies = bench.pauses(options.pauses)
    finally:
        bench.engine.close()
    return {f"pause_{name}": value for name, value in pause.report(steps, latencies, resumes).items()}


def _weights(model: PreTrainedModel) -> dict[str, object]:
    """Measure a commit in place, which sets the version and empties the cache, and the digest of every byte."""
    service = RolloutService(Engine(model, EngineConfig(kv_cache=64)))
    try:
        with service.optimizer_step(), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.0)
        started = clock(model.device)
        service.commit_in_place("bench", source=model.named_parameters(), digest="later")
        committed = clock(model.device)
        service.finish_digest()
        first = clock(model.device)
        model_digest(model.named_parameters())
        again = clock(model.device)
    finally:
        service.close()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "commit_ms": round((committed - started) * 1e3, 3),
        "first_digest_s": round(first - committed, 3),
        "digest_s": round(again - first, 3),
        "digest_gb_s": round(num_bytes / (again - first) / 1e9, 2),
    }
