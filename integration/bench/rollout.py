"""Rollout throughput: prompts sampled to a fixed length, by our engine and, interleaved, by transformers.

A repeat is one batch of random prompts of equal length, each continued by exactly --new-tokens tokens sampled
at temperature 1 from the whole vocabulary, with the log-probability of every token. tok_s is new tokens over
the wall seconds of the whole load, prefill included. prefill_tok_s is prompt tokens over the seconds of the
steps that ran prompt rows (decode rows in them included), step_ms the median step that ran one decode row of
every sequence. Prompts differ between repeats, so that no prefix is cached. Rates are medians over the repeats;
ratio is the median of each repeat's own ratio to the run of transformers beside it, since what else the machine
does changes between repeats more than within one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.sampling_params import SamplingParams
from .presets import DTYPES, PRESETS, load_model

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """What one repeat generates."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Random token ids, a pure function of the load and the repeat."""
        generator = torch.Generator().manual_seed(1000 + repeat)
        return torch.randint(vocab_size, (self.batch, self.prompt_tokens), generator=generator).tolist()


@dataclass(frozen=True)
class Run:
    """One repeat, measured."""

    seconds: float
    prefill_seconds: float
    decode_step_seconds: tuple[float, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder"
    )
    parser.add_argument("--batch", type=_positive, default=32, help="prompts at a time")
    parser.add_argument("--prompt-tokens", type=_positive, default=128)
    parser.add_argument("--new-tokens", type=_positive, default=128)
    parser.add_argument(
        "--against", choices=("hf",), help="run the same load through transformers' generate too"
    )
    parser.add_argument("--repeats", type=_positive, default=3, help="the median counts")
    parser.add_argument("--threads", type=_positive, help="default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--no-invariant", dest="invariant", action="store_false", help="give up batch invariance"
    )


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for an option that does not fit the machine or the model."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = _device(options.device)
    model = load_model(options.model, dtype=options.dtype, device=str(device))
    load = Load(options.batch, options.prompt_tokens, options.new_tokens)
    engine = make_engine(model, load, invariant=options.invariant)
    vocab_size = engine.model.vocab_size
    rivals = {"ours": lambda load, repeat: run_engine(engine, load, load.prompts(vocab_size, repeat))}
    if options.against == "hf":
        rivals["hf"] = lambda load, repeat: run_transformers(model, load, load.prompts(vocab_size, repeat))
    warm_up = Load(load.batch, load.prompt_tokens, min(load.new_tokens, _WARM_UP_TOKENS))
    for one in rivals.values():
        one(warm_up, -1)
    runs: dict[str, list[Run]] = {name: [] for name in rivals}
    for repeat in range(options.repeats):
        for name, one in rivals.items():  # A B A B: whatever else the machine does hits both
            runs[name].append(one(load, repeat))
            print(f"repeat {repeat + 1}/{options.repeats} {name}: {_tok_s(load, runs[name][-1]):.0f} tok/s",
                  file=sys.stderr, flush=True)  # fmt: skip
    settings = {
        "model": options.model,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "batch": load.batch,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
        "repeats": options.repeats,
        "invariant": bool(engine.model.numerics.guarantee and engine.model.numerics.guarantee.invariant),
    }
    return {**settings, **report(load, **runs)}


def report(load: Load, ours: list[Run], hf: list[Run] | None = None) -> dict[str, object]:
    """Medians over the repeats, and beside each rate its lowest and highest repeat."""
    rates = [_tok_s(load, run) for run in ours]
    prompt_tokens = load.batch * load.prompt_tokens
    steps = [seconds for run in ours for seconds in run.decode_step_seconds]
    numbers: dict[str, object] = {
        "tok_s": round(statistics.median(rates), 1),
        "tok_s_range": _range(rates, 1),
        "prefill_tok_s": round(statistics.median(prompt_tokens / run.prefill_seconds for run in ours), 1),
        "step_ms": round(statistics.median(steps) * 1e3, 3) if steps else None,
    }
    if hf is not None:
        hf_rates = [_tok_s(load, run) for run in hf]
        pairs = [mine / theirs for mine, theirs in zip(rates, hf_rates, strict=True)]
        numbers["hf_tok_s"] = round(statistics.median(hf_rates), 1)
        numbers["hf_tok_s_range"] = _range(hf_rates, 1)
        numbers["ratio"] = round(statistics.median(pairs), 3)
        numbers["ratio_range"] = _range(pairs, 3)
    return numbers


def make_engine(model: PreTrainedModel, load: Load, *, invariant: bool) -> Engine:
    """An engine that holds the whole load at once. Raises ValueError when the model's context does not."""
    length = load.prompt_tokens + load.new_tokens
    blocks_each = -(-(length + 1) // EngineConfig.block_size)
    config = EngineConfig(
        kv_cache=2 * load.batch * blocks_each,
        max_num_seqs=load.batch,
        max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, load.batch),
        invariant=invariant,
    )
    engine = Engine(model, config)
    if length > engine.max_model_len:
        raise ValueError(f"{length} tokens (prompt and new) exceed the context of {engine.max_model_len}")
    return engine


def run_engine(engine: Engine, load: Load, prompts: list[list[int]]) -> Run:
    """Run the load through our engine, step by step."""
    params = SamplingParams(max_new_tokens=load.new_tokens, ignore_eos=True)
    completions, prefill_seconds, decode_steps = [], 0.0, []
    device, metrics = engine.model.device, engine.metrics
    with engine.model.rollout_phase():
        started = now = _clock(device)
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.has_work:
            before, num_rows, num_open = now, metrics.num_rows, load.batch - len(completions)
            completions += engine.step()
            now = _clock(device)
            if metrics.num_rows - num_rows > num_open:
                prefill_seconds += now - before
            elif num_open == load.batch:
                decode_steps.append(now - before)
    assert sum(len(completion.logprobs) for completion in completions) == load.batch * load.new_tokens
    # A prompt of one token per sequence is indistinguishable from a decode step, and is its own prefill.
    return Run(now - started, prefill_seconds or decode_steps.pop(0), tuple(decode_steps))


def run_transformers(model: PreTrainedModel, load: Load, prompts: list[list[int]]) -> Run:
    """Run the load through transformers' generate: sdpa attention, one batch, log-probabilities as ours."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    input_ids = torch.tensor(prompts, device=model.device)
    recorder = LogprobRecorder()
    torch.manual_seed(0)
    started = _clock(model.device)
    with torch.inference_mode():
        sequences = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=load.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([recorder]),
        )
        logprobs = recorder.finish(sequences)
    seconds = _clock(model.device) - started
    model.set_attn_implementation(before)
    assert tuple(logprobs.shape) == (load.batch, load.new_tokens)
    return Run(seconds, seconds, ())


class LogprobRecorder(LogitsProcessor):
    """Keeps the log-probability of each token that generate samples: what it costs is one log_softmax a step."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [B, T] so far, scores [B, V] of the next token: returned as they are."""
        if self._last is not None:
            self._take(input_ids[:, -1:])
        self._last = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probabilities [B, new tokens] of what generate returned."""
        self._take(sequences[:, -1:])
        return torch.cat(self._chosen, dim=-1).cpu()

    def _take(self, token_ids: Tensor) -> None:
        assert self._last is not None
        self._chosen.append(self._last.gather(-1, token_ids))


def _tok_s(load: Load, run: Run) -> float:
    return load.batch * load.new_tokens / run.seconds


def _range(values: list[float], digits: int) -> list[float]:
    return [round(min(values), digits), round(max(values), digits)]


def _clock(device: torch.device) -> float:
    """Seconds, when everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device(name: str) -> torch.device:
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no CUDA device here")
    return torch.device(name)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
