"""The speed of a CUDA GPU with a model of the shape of Qwen3-8B (bfloat16, random weights; --model takes a preset too).

In parts, any of them in any order. peaks: the memory's and the products' rates, which all floors are computed from.
products: each of a layer's, and the head's, from 1 to 512 rows, beside the library's. kernels: the others. roofline:
decode steps by batch, with overlap and without, and without invariance, beside the time for reading weights and KV.
profile: the kernels of a step and their times. pauses: their latency. weights: a commit in place, and the digest of
every byte. training: a forward and backward, beside sdpa's. rollout: beside transformers' generate.

The figures of --out are written one by one; a part that fails is noted, and none begins after --budget seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from ...kernels.linear.linear import LinearMethod
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...weight_sync.digests.model_digest import model_digest
from ..service import RolloutService
from . import pause
from .decode import kv_bytes_per_token
from .on_gpu.gpu_kernels import kernel_times, product_times
from .on_gpu.gpu_report import Report
from .parts.budget import MAX_SECONDS, Budget
from .parts.decode_load import DecodeWork, decode_steps, make_decode_engine, median_ms
from .parts.load import Load, positive
from .parts.machine_peaks import Peaks, measure_peaks
from .parts.presets import PRESETS, load_model, random_model
from .parts.runs import clock, make_engine, run_engine, run_transformers

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_TRAINED = (8, 256)  # sequences and their tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="8b", help=f"8b or {', '.join(PRESETS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="in this order")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written again after every figure")
    parser.add_argument("--budget", type=positive, default=3600, help="seconds after which no part begins")
    parser.add_argument("--batch", type=positive, nargs="+", default=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--rows", type=positive, nargs="+", default=(1, 16, 32, 64, 127, 128, 256, 512))
    parser.add_argument("--steps", type=positive, default=20, help="measured steps of each batch; the median counts")
    parser.add_argument("--kernel-batch", type=positive, default=32)
    parser.add_argument("--pauses", type=positive, default=20, help="number of pauses of each mode")
    parser.add_argument("--new-tokens", type=positive, default=128, help="of a rollout")


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
    return measure(model, options)


def measure(model: PreTrainedModel, options: argparse.Namespace, peaks: Peaks | None = None) -> dict[str, object]:
    """Measure the parts that are asked for, on the device of the model. peaks: instead of measuring them."""
    report = Report(options.out, options.budget)
    bench = GpuBench(model, options, report, peaks)
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    report.set(model=options.model, num_parameters=sum(p.numel() for p in model.parameters()), device=name)
    for part in options.parts:
        if report.is_over:
            report.add("skipped", {"part": part})
            continue
        try:
            PARTS[part](bench)
        except _FAILURES as error:
            report.add("failed", {"part": part, "error": f"{type(error).__name__}: {error}"[:500]})
        gc.collect()  # an engine's recorded steps hold memory until then
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return report.figures


def _failures() -> tuple[type[Exception], ...]:
    """Return what a part may fail with and the next one still run: compilers, libraries and memory of a GPU."""
    found: list[type[Exception]] = [
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        OSError,
    ]
    if importlib.util.find_spec("triton") is not None:
        from triton.errors import TritonError

        found.append(TritonError)
    return tuple(found)


_FAILURES = _failures()


@dataclass
class GpuBench:
    """The parts over one model."""

    model: PreTrainedModel
    options: argparse.Namespace
    report: Report
    given_peaks: Peaks | None = None

    @cached_property
    def peaks(self) -> Peaks:
        return self.given_peaks or measure_peaks(self.model.dtype, self.model.device)

    @cached_property
    def linear(self) -> LinearMethod:
        """The product that engines choose for this model here."""
        engine = Engine(self.model, EngineConfig(kv_cache=64))
        guarantee = engine.model.numerics.guarantee
        engine.close()
        return guarantee.linear if guarantee else "library"

    def measure_peaks(self) -> None:
        rates = {"read_gb_s": self.peaks.bytes_per_s / 1e9, "product_tflop_s": self.peaks.operations_per_s / 1e12}
        self.report.set(**{name: round(rate, 1) for name, rate in rates.items()})

    def measure_products(self) -> None:
        for figure in product_times(self.model, self.options.rows, self.peaks, linear=self.linear):
            self.report.add("products", figure)
            if self.report.is_over:
                return

    def measure_kernels(self) -> None:
        given = self.options.kernel_batch, self.options.context, self.peaks
        for figure in kernel_times(self.model, *given, linear=self.linear):
            self.report.add("kernels", figure)

    def measure_roofline(self) -> None:
        for batch in self.options.batch:
            for invariant, overlap in ((True, True), (True, False), (False, True)):
                if self.report.is_over:
                    return
                self.report.add("roofline", self._decode(batch, invariant, overlap))

    def _decode(self, batch: int, invariant: bool, overlap: bool) -> dict[str, object]:
        context, steps = self.options.context, self.options.steps
        engine = make_decode_engine(self.model, batch, context, steps, invariant=invariant, overlap=overlap)
        try:
            step_ms = median_ms(decode_steps(engine, batch, context, steps))
        finally:
            engine.close()
        work = DecodeWork.of(self.model, batch, context, kv_bytes_per_token(self.model))
        share = round(work.floor_seconds(self.peaks) * 1e3 / step_ms, 3)
        return {"batch": batch, "invariant": invariant, "overlap": overlap, "step_ms": step_ms, "of_floor": share}

    def measure_profile(self) -> None:
        """Count the device's kernels of a decode step, and add up the microseconds of each."""
        is_cuda = self.model.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        for batch in {min(self.options.batch), self.options.kernel_batch}:
            engine = make_decode_engine(self.model, batch, self.options.context, 5, invariant=True)
            counts: Counter[str] = Counter()
            times: Counter[str] = Counter()

            def around(step: Callable[[], object], counts: Counter[str] = counts, times: Counter[str] = times) -> None:
                with profile(activities=activities) as profiled:
                    step()
                    clock(self.model.device)
                for event in profiled.events():
                    if (event.device_type == DeviceType.CUDA) == is_cuda:
                        counts[event.name[:70]] += 1
                        times[event.name[:70]] += event.time_range.elapsed_us()

            try:
                decode_steps(engine, batch, self.options.context, 5, around)
            finally:
                engine.close()
            top = [[name, counts[name] / 5, round(us / 5, 1)] for name, us in times.most_common(25)]
            totals = {"launches": sum(counts.values()) / 5, "busy_us": round(sum(times.values()) / 5, 1)}
            self.report.add("profile", {"batch": batch, **totals, "top": top})

    def measure_pauses(self) -> None:
        load = Load(self.options.kernel_batch, 128, 512)
        bench = pause.PauseBench(pause.make_engine(self.model, load, overlap=False), load, seed=0)
        try:
            with bench.engine.model.rollout_phase():
                resumes = [bench.resume(0)]
                steps, latencies = bench.pauses(self.options.pauses, Budget(MAX_SECONDS))
        finally:
            bench.engine.close()
        found = pause.report(steps, latencies, resumes)
        self.report.set(**{f"pause_{name}": value for name, value in found.items()})

    def measure_weights(self) -> None:
        """Measure a commit in place, which sets the version and empties the cache, and the digest of every byte."""
        model, service = self.model, RolloutService(Engine(self.model, EngineConfig(kv_cache=64)))
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
        self.report.set(
            commit_ms=round((committed - started) * 1e3, 3), first_digest_s=round(first - committed, 3),
            digest_s=round(again - first, 3), digest_gb_s=round(num_bytes / (again - first) / 1e9, 2),
        )  # fmt: skip

    def measure_training(self) -> None:
        """Measure a forward and backward of one layer's gradients, ours and with transformers' sdpa."""
        model, before = self.model, self.model.config._attn_implementation
        engine = Engine(model, EngineConfig(kv_cache=64))
        layer = model.get_submodule("model.layers.0")
        shape = _TRAINED if model.device.type == "cuda" else (2, 16)
        ids = torch.randint(model.config.vocab_size, shape, device=model.device)
        layer.requires_grad_(True)
        try:
            with engine.model.training_numerics():
                ours = self._training_ms(layer, ids)
            model.set_attn_implementation("sdpa")
            theirs = self._training_ms(layer, ids)
        finally:
            model.set_attn_implementation(before)
            layer.requires_grad_(False)
            engine.close()
        figure = {"tokens": ids.numel(), "ms": ours, "sdpa_ms": theirs, "ratio": round(theirs / ours, 3)}
        self.report.add("training", figure)

    def _training_ms(self, layer: nn.Module, ids: torch.Tensor) -> float:
        seconds = []
        for _ in range(4):
            layer.zero_grad()
            began = clock(ids.device)
            self.model(ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
            seconds.append(clock(ids.device) - began)
        return round(statistics.median(seconds[1:]) * 1e3, 2)

    def measure_rollout(self) -> None:
        """Measure a rollout of equal prompts and answers, by turns with transformers' generate."""
        load = Load(self.options.kernel_batch, 128, self.options.new_tokens)
        engine = make_engine(self.model, load, invariant=True)
        try:
            for repeat in range(3):
                prompts = load.prompts(engine.model.vocab_size, repeat)
                ours = run_engine(engine, load, prompts, repeat).seconds
                theirs = run_transformers(self.model, load, prompts, repeat).seconds
                tokens = load.num_new_tokens(repeat)
                figure = {"tokens_s": round(tokens / ours), "transformers_tokens_s": round(tokens / theirs)}
                self.report.add("rollout", {**figure, "ratio": round(theirs / ours, 2)})
                if self.report.is_over:
                    return
        finally:
            engine.close()


PARTS: dict[str, Callable[[GpuBench], None]] = {
    "peaks": GpuBench.measure_peaks, "products": GpuBench.measure_products, "kernels": GpuBench.measure_kernels,
    "roofline": GpuBench.measure_roofline, "profile": GpuBench.measure_profile, "pauses": GpuBench.measure_pauses,
    "weights": GpuBench.measure_weights, "training": GpuBench.measure_training, "rollout": GpuBench.measure_rollout,
}  # fmt: skip
