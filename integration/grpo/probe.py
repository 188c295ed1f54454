"""A look at a job before its first run: what the model is rewarded for the task, and what a step takes."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..ranks import Ranks, process_group
from .engines.answers import StepSamples
from .job import GrpoJob
from .results.samples import shown
from .results.statistics import step_statistics
from .settings.config import JobConfig
from .settings.sections import HttpSettings, ParallelSettings
from .settings.training import TrainSettings
from .training.packing import Sample

_FEW, _MANY = 8, 32  # samples of the two updates whose difference gives the time of a row


@dataclass(frozen=True)
class Probe:
    """The findings of a probe."""

    reward_mean: float
    statistics: dict[str, object]  # of the samples, as metrics.jsonl names them
    examples: list[str]  # samples, to be shown
    tokens_per_s: float  # generated, with the samples of one probe at a time
    logprob_gap: float  # largest |engine - trainer|
    generate_s: float  # expected of a step of the job: its generation
    reward_s: float  # its rewards
    train_s: float  # its training
    sync_s: float  # and its commit
    memory_bytes: int  # largest use of this process so far; on a GPU of its memory
    is_on_cpu: bool

    @property
    def step_s(self) -> float:
        """Expected seconds of a step of the job."""
        return self.generate_s + self.reward_s + self.train_s + self.sync_s


def probed_config(config: JobConfig, num_prompts: int, num_samples: int) -> JobConfig:
    """Return the config that a probe runs: the job's on one rank, with an engine that aliases the trainer's module,
    steps of its own size and no files."""
    return replace(
        config,
        run=replace(config.run, num_ranks=0, rollouts_every=0, tensorboard=False, wandb="", replay_schedule=""),
        rollout=replace(
            config.rollout,
            prompts_per_step=num_prompts,
            group_size=num_samples,
            ahead=0,
            on_commit="verify",
            keep_kv=False,
            redraw=0,
        ),
        # One step of few prompts. Where the job has more micro-batches than they have samples, each sample is one.
        train=replace(
            config.train,
            minibatches_per_step=1,
            epochs_per_step=1,
            gradient_accumulation_steps=min(config.train.gradient_accumulation_steps, num_prompts * num_samples),
        ),
        trainer="ddp",
        sync="in_place",
        engines="local",
        parallel=ParallelSettings(),
        http=HttpSettings(),
    )


def probe(config: JobConfig, ranks: Ranks, num_prompts: int, num_samples: int) -> Probe:
    """Sample `num_samples` answers to each of `num_prompts` training prompts, and train on some of them. Nothing is
    written, and the weights of the model's folder stay as they are.

    config: of the job. ranks: this process alone. Seconds of a step are for the job's own sizes: on CPUs for all its
    ranks sharing this machine's cores, on GPUs divided by `run.num_ranks` (1 where it is 0).
    """
    with process_group(ranks, config.run.timeout_s, setting="run.timeout_s"):
        found = _probed(config, GrpoJob(probed_config(config, num_prompts, num_samples), ranks, resume=False))
        gc.collect()  # a DDP module must end inside the block
        return found


def _probed(config: JobConfig, job: GrpoJob) -> Probe:
    job.trainer.on_gap = None  # nothing is written; and a second step on the same samples has one
    try:
        done = StepSamples()
        samples = list(job.rollouts.samples(0, done))
        group_size = job.config.rollout.group_size
        found = step_statistics(job.rollouts.numbers(done), group_size)
        num_tokens = sum(len(sample.logprobs) for sample in samples)
        is_on_cpu = job.ranks.device.type == "cpu"
        at_once = 1 if is_on_cpu else max(config.run.num_ranks, 1)
        num_of_step = config.rollout.prompts_per_step * config.rollout.group_size / at_once
        # An answer may be several samples: the conversations of an agent.
        seconds, gap = _training_seconds(job, samples, num_of_step * len(samples) / len(done.answers))
        began = time.perf_counter()
        job.engine.sync("1")
        return Probe(
            sum(score.total for score in done.scores) / len(done.scores),
            found,
            [shown(row) for row in job.rollouts.rows(done)[::group_size][:5]],
            num_tokens / done.waited_s,
            gap,
            done.waited_s * num_of_step / len(done.answers),
            done.scored_s * num_of_step / len(done.answers),
            seconds * _num_passes(config.train),
            time.perf_counter() - began,
            _memory(job.ranks.device),
            is_on_cpu,
        )
    finally:
        job.close()


def _num_passes(train: TrainSettings) -> float:
    """Return how many times as long a step's training takes as one update on all its samples. A forward is about a
    third of one; each sample of a later mini-batch has one more, unless it is skipped."""
    later = 0.0 if train.skip_forward else 1.0 - 1.0 / train.minibatches_per_step
    return train.epochs_per_step + later / 3


def _training_seconds(job: GrpoJob, samples: Sequence[Sample], num_of_step: float) -> tuple[float, float]:
    """Train on a few samples, twice, and then on more. Returns the seconds that an update on `num_of_step` samples
    would take, and the largest gap of the first update, which alone has the weights that drew the samples."""
    few, many = samples[:_FEW], samples[: min(_MANY, len(samples))]
    gap = job.trainer.update(few, 0).logprob_gap  # compiles, and allocates the optimizer's moments
    (small, rows_of_few), (large, rows_of_many) = _timed(job, few), _timed(job, many)
    share = rows_of_many / sum(sample.num_rows for sample in many)  # of rows that are not common ones
    rows_of_step = num_of_step * share * sum(sample.num_rows for sample in samples) / len(samples)
    if rows_of_many == rows_of_few:
        return large * rows_of_step / rows_of_many, gap
    of_a_row = max(large - small, 0.0) / (rows_of_many - rows_of_few)
    return max(small - of_a_row * rows_of_few, 0.0) + of_a_row * rows_of_step, gap


def _timed(job: GrpoJob, samples: Sequence[Sample]) -> tuple[float, int]:
    """Train on samples. Returns the seconds, and the rows of their forward."""
    began = time.perf_counter()
    stats = job.trainer.update(samples, 0)
    if job.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, stats.num_rows


def _memory(device: torch.device) -> int:
    """Return the largest use so far, in bytes: of a GPU's memory, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def advice(found: Probe, config: JobConfig) -> list[str]:
    """Return what the numbers of a probe say about the run that they announce, one line for each."""
    lines, numbers = [], found.statistics
    flat, cut = _number(numbers, "flat_groups"), _number(numbers, "truncated_share")
    if config.train.has_teacher or not config.train.compares_groups:
        pass  # samples of groups of equal rewards teach all the same
    elif flat == 1.0:
        lines.append(
            "no group has spread: every group's rewards are equal, so that nothing is learned. Take easier problems, "
            "a reward with steps between, or examples in the prompt (data.few_shot_path)"
        )
    elif flat > 0.5:
        lines.append(f"{flat:.0%} of the groups have no spread and teach nothing")
    if cut > 0.2:
        lines.append(
            f"{cut:.0%} of the samples were cut off at rollout.max_new_tokens={config.rollout.max_new_tokens}; "
            "train.truncated says what becomes of them"
        )
    if found.logprob_gap and config.engine.invariant:
        lines.append(f"the engine's log-probabilities are not the trainer's: a gap of {found.logprob_gap:.3g}")
    if (successes := numbers.get("success")) is not None and math.isclose(_number(numbers, "success"), 1.0):
        lines.append(f"all samples are successes ({successes}): there is nothing left to learn")
    return lines


def _number(numbers: dict[str, object], name: str) -> float:
    value = numbers.get(name, 0.0)
    assert isinstance(value, float | int)
    return float(value)
