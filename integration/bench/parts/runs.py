"""Runs of one load through one engine: ours, or transformers' generate."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ....rollout.completion import Completion
from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ....rollout.reports.metrics import Metrics
from ....rollout.sampling_params import SamplingParams
from .load import Load


@dataclass(frozen=True)
class Run:
    """The measurement of one repeat."""

    seconds: float
    prefill_seconds: float
    decode_step_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Work:
    """The steps of one call, or all of an engine so far."""

    num_steps: int
    num_rows: int
    num_sequences: int  # of each step, added up
    num_drafted: int  # rows for proposed tokens

    @classmethod
    def of(cls, metrics: Metrics) -> Work:
        """Return the work of an engine so far."""
        return cls(metrics.num_steps, metrics.num_rows, metrics.num_sequence_forwards, metrics.num_drafted_tokens)

    def __sub__(self, earlier: Work) -> Work:
        """Return the work since then."""
        return Work(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence had several rows of known tokens."""
        return self.num_rows - self.num_drafted > self.num_sequences

    def are_decodes_of(self, batch: int) -> bool:
        """Return whether each step had one row of each of so many sequences, and no draft."""
        return self.num_rows == self.num_sequences == batch * self.num_steps > 0


def make_engine(
    model: PreTrainedModel, load: Load, *, invariant: bool, prefix_cache: bool = True, tp: int = 1, pp: int = 1
) -> Engine:
    """Make an engine that holds the whole load at once, on tp x pp ranks. Raises ValueError for a too short context."""
    config = EngineConfig(
        kv_cache=num_kv_blocks(load),
        max_num_seqs=load.batch,
        max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, load.batch),
        invariant=invariant,
        prefix_cache=prefix_cache,
        tp=tp,
        pp=pp,
        k_blocks=tp,
    )
    engine = Engine(model, config)
    if load.length > engine.max_model_len:
        raise ValueError(f"{load.length} tokens (prompt and new) exceed the context of {engine.max_model_len}")
    return engine


def num_kv_blocks(load: Load) -> int:
    """Return the number of blocks for the load twice."""
    return 2 * load.batch * -(-(load.length + 1) // EngineConfig.block_size)


def run_engine(engine: Engine, load: Load, prompts: list[list[int]], repeat: int) -> Run:
    """Run the load through our engine, step by step, as `generate` runs them: those of one schedule have the mean of
    their time."""
    counts = load.counts(repeat)
    completions: list[Completion] = []
    decode_steps: list[float] = []
    prefill_seconds = 0.0
    device, metrics = engine.model.device, engine.metrics
    with engine.model.rollout_phase():
        started = now = clock(device)
        for prompt, count in zip(prompts, counts, strict=True):
            engine.add(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        while engine.has_work:
            before, so_far = now, Work.of(metrics)
            completions += engine.step(engine.config.num_scheduler_steps)
            now = time.perf_counter()  # to wait for the device here would end the overlap of steps
            work = Work.of(metrics) - so_far
            if work.has_prompts:
                prefill_seconds += now - before
            elif work.are_decodes_of(load.batch):
                decode_steps += [(now - before) / work.num_steps] * work.num_steps
        now = clock(device)
    assert sum(len(completion.logprobs) for completion in completions) == sum(counts)
    # A prompt of one token per sequence is indistinguishable from a decode step, and is its own prefill.
    return Run(now - started, prefill_seconds or decode_steps.pop(0), tuple(decode_steps))


def run_transformers(model: PreTrainedModel, load: Load, prompts: list[list[int]], repeat: int) -> Run:
    """Run the load through transformers' generate: sdpa attention, one batch, log-probabilities as ours."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    input_ids = torch.tensor(prompts, device=model.device)
    counts = torch.tensor(load.counts(repeat), device=model.device)
    recorder = LogprobRecorder()
    torch.manual_seed(0)
    started = clock(model.device)
    generate: Any = model.generate  # the types of PreTrainedModel lack its mixin
    with torch.inference_mode():
        sequences = generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=int(counts.max()),
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([recorder]),
            stopping_criteria=StoppingCriteriaList([_EnoughTokens(load.prompt_tokens + counts)]),
        )
        logprobs = recorder.finish(sequences)
    seconds = clock(model.device) - started
    model.set_attn_implementation(before)
    assert tuple(logprobs.shape) == (load.batch, int(counts.max()))
    return Run(seconds, seconds, ())


class LogprobRecorder(LogitsProcessor):
    """A recorder of the log-probability of each token that generate samples, at the cost of one log_softmax a step."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the last token of input_ids [B, T]; returns scores [B, V] of the next token unchanged."""
        if self._last is not None:
            self._take(input_ids[:, -1:])
        self._last = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Return log-probabilities [B, new tokens] of the sequences that generate returned."""
        self._take(sequences[:, -1:])
        return torch.cat(self._chosen, dim=-1).cpu()

    def _take(self, token_ids: Tensor) -> None:
        assert self._last is not None
        self._chosen.append(self._last.gather(-1, token_ids))


class _EnoughTokens(StoppingCriteria):
    """A criterion that ends each sequence at its own length, int64 [B]."""

    def __init__(self, lengths: Tensor) -> None:
        self._lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return self._lengths <= input_ids.shape[1]


def clock(device: torch.device) -> float:
    """Wait until the device has done all its work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def find_device(name: str) -> torch.device:
    """Return the device of that name. Raises ValueError where there is none."""
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, not {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no CUDA device here")
    return torch.device(name)
