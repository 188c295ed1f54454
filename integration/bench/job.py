"""Seconds of a step of the job against those of TRL's GRPOTrainer with its own generation, by turns.

Both train all weights of the same model by GRPO on one rank: --prompts prompts of --prompt-tokens tokens, --group
samples of each with --new-tokens tokens at temperature 1, one optimizer step on all of them in micro-batches of
--microbatch samples. Weights, gradients and AdamW's moments are in --dtype on both sides. There is no reference model
and no activation is computed twice. A text has one token a word, and the reward is the share of even words, so that
groups have spread. TRL runs in a process of its own, of the Python that --trl-python names, which is stopped while our
step runs; both have run a step before the measurement. ratio_trl is the median of the pairs' own ratios, TRL's seconds
over ours. Bar: 1.3. The job is our defaults; with speculation, where the engine finds that it pays.

--against own-prefixes runs our job a second time, with `train.share_prefixes=false`: ratio_own_prefixes is the median
of the pairs' ratios of the seconds of training alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..grpo.job import GrpoJob
from ..grpo.settings.config import JobConfig
from ..grpo.settings.sampling import RolloutSettings
from ..grpo.settings.sections import (
    DataSettings,
    EngineSettings,
    ModelSettings,
    RunSettings,
    WarmStartSettings,
)
from ..grpo.settings.training import TrainSettings
from ..ranks import Ranks, process_group
from .parts.budget import Budget, add_budget_argument
from .parts.load import positive
from .parts.presets import DTYPES, PRESETS, load_model
from .rivals.trl_process import TrlWorker
from .rivals.trl_worker import score
from .rivals.worker_process import unwinding_on_sigterm

_BAR = 1.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    parser.add_argument("--against", choices=("trl", "own-prefixes"), help="run the same steps there, or so, too")
    parser.add_argument("--trl-python", metavar="FILE", help="the Python of an environment that has TRL")
    parser.add_argument("--prompts", type=positive, default=4, help="of a step")
    parser.add_argument("--group", type=positive, default=8, help="samples of a prompt")
    parser.add_argument("--microbatch", type=positive, default=8, help="samples of a micro-batch")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--pairs", type=positive, default=5, help="steps of each side")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for options that do not fit."""
    if options.against == "trl" and not options.trl_python:
        raise ValueError("--against trl needs --trl-python")
    if options.prompts * options.group % options.microbatch:
        raise ValueError(f"--microbatch {options.microbatch} does not divide {options.prompts * options.group} samples")
    torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    with ExitStack() as stack:
        stack.enter_context(unwinding_on_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-job-")))
        write_load(folder, options)
        config = job_config(folder, options)
        ranks = Ranks(0, 1, torch.device("cpu"))
        stack.enter_context(process_group(ranks, 600))
        job = GrpoJob(config, ranks, resume=False)
        stack.callback(job.close)
        rival: TrlWorker | _OwnPrefixes | None = None
        if options.against == "trl":
            rival = TrlWorker(options.trl_python, trl_settings(folder, config, options), options.threads)
        elif options.against:
            rival = _OwnPrefixes(config, ranks)
        if rival is not None:
            stack.callback(rival.close)
        ours, theirs = _pairs(job, rival, options.pairs, budget)
        report: dict[str, object] = {
            "model": options.model, "dtype": options.dtype, "threads": options.threads,
            **{name: getattr(options, name) for name in ("prompts", "group", "microbatch")},
            "learning_rate": config.train.learning_rate, "max_grad_norm": config.train.max_grad_norm,
            "ours_s": _median(one.seconds for one in ours), "ours_rollout_s": _median(one.rollout_s for one in ours),
            "ours_train_s": _median(one.train_s for one in ours), "ours_tokens": ours[-1].num_tokens,
        }  # fmt: skip
        if rival is None:
            return report
        if isinstance(rival, _OwnPrefixes):
            ratios = [its.train_s / mine.train_s for mine, its in zip(ours, theirs, strict=True)]
            return report | {
                "own_prefixes_train_s": _median(one.train_s for one in theirs),
                "ratio_own_prefixes": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }  # fmt: skip
        ratios = [its.seconds / mine.seconds for mine, its in zip(ours, theirs, strict=True)]
        report |= {
            "trl_version": rival.version, "trl_s": _median(one.seconds for one in theirs),
            "trl_tokens": theirs[-1].num_tokens, "ratio_trl": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios], "passed": statistics.median(ratios) >= _BAR,
        }  # fmt: skip
        return report


@dataclass(frozen=True)
class Step:
    """The figures of one step, in seconds."""

    seconds: float
    num_tokens: int  # that were sampled
    rollout_s: float = 0.0  # of ours
    train_s: float = 0.0


class _OwnPrefixes:
    """Our job, whose samples have no rows in common in training."""

    def __init__(self, config: JobConfig, ranks: Ranks) -> None:
        run, train = replace(config.run, name="own-prefixes"), replace(config.train, share_prefixes=False)
        self._job, self._num_steps = GrpoJob(replace(config, run=run, train=train), ranks, resume=False), 0

    def step(self) -> Step:
        """Run a step."""
        self._num_steps += 1
        return _own_step(self._job, self._num_steps - 1)

    def close(self) -> None:
        """End the job."""
        self._job.close()


def _pairs(
    job: GrpoJob, rival: TrlWorker | _OwnPrefixes | None, num_pairs: int, budget: Budget
) -> tuple[list[Step], list[Step]]:
    """Run a step of each side to warm up, then pairs."""
    ours: list[Step] = []
    theirs: list[Step] = []
    for number in budget.rounds(num_pairs + 1, least=2):
        ours.append(_own_step(job, number))
        if rival is not None:
            theirs.append(rival.step() if isinstance(rival, _OwnPrefixes) else Step(*rival.step()))
        seconds = f"ours {ours[-1].seconds:.2f} s" + (f", the other {theirs[-1].seconds:.2f} s" if theirs else "")
        print(f"step {number}/{num_pairs}: {seconds}", file=sys.stderr, flush=True)
    return ours[1:], theirs[1:]


def _own_step(job: GrpoJob, number: int) -> Step:
    line = {name: value for name, value in job.run_step(number).items() if isinstance(value, int | float)}
    if line["logprob_gap"] != 0.0:
        raise RuntimeError(f"the trainer's log-probabilities are not the engine's: a gap of {line['logprob_gap']}")
    parts = {name: float(line[name]) for name in ("rollout_s", "reward_s", "train_s", "sync_s")}
    num_tokens = round(float(line["rollout_tokens_per_s"]) * parts["rollout_s"])
    return Step(sum(parts.values()), num_tokens, parts["rollout_s"], parts["train_s"])


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


# -- the load ----------------------------------------------------------------------------------------------------------


def write_load(folder: Path, options: argparse.Namespace) -> None:
    """Write the model, a tokenizer of one word a token, and the rows of all steps."""
    model = load_model(options.model, dtype=options.dtype)
    vocab_size = int(model.config.get_text_config().vocab_size)
    model.generation_config.eos_token_id = model.config.eos_token_id = vocab_size - 1
    model.save_pretrained(folder)
    word_tokenizer(vocab_size).save_pretrained(folder)
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(options.prompts * (options.pairs + 1) * 2):
            words = " ".join(f"w{draw.randrange(vocab_size)}" for _ in range(options.prompt_tokens))
            print(json.dumps({"prompt": words, "answer": ""}), file=file)


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words w0, w1, ... The first is the padding. TRL needs a last token: it
    is the last word, of which a random model draws one in `vocab_size` tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token=f"w{vocab_size - 1}", padding_side="left"
    )


def even_words(row: dict[str, object], completion: str) -> float:
    """Reward the share of words with an even number."""
    return score(completion)


def job_config(folder: Path, options: argparse.Namespace) -> JobConfig:
    """Return the settings of our side."""
    num_samples, num_tokens = options.prompts * options.group, options.prompt_tokens + options.new_tokens
    blocks = num_samples * -(-num_tokens // 16) + 64
    return JobConfig(
        RunSettings("bench-job", str(folder), num_steps=options.pairs + 1, rollouts_every=0, tensorboard=False),
        model=ModelSettings(path=str(folder), dtype=options.dtype),
        warm_start=WarmStartSettings(enabled=False),
        data=DataSettings(path=str(folder / "rows.jsonl"), answer_field=""),
        reward=f"{__name__}:even_words",
        rollout=RolloutSettings(options.prompts, options.group, options.new_tokens),
        train=TrainSettings(
            learning_rate=1e-5, beta2=0.999, num_warmup_steps=0, microbatch_tokens=options.microbatch * num_tokens,
            loss="dapo", low_precision="masters" if options.dtype == "float32" else "nearest",
        ),
        engine=EngineSettings(device="cpu", kv_cache=f"{blocks} blocks", max_num_seqs=num_samples),
    )  # fmt: skip


def trl_settings(folder: Path, config: JobConfig, options: argparse.Namespace) -> dict[str, object]:
    """Return the settings of TRL's side, from those of ours."""
    train = asdict(config.train)
    shared = ("learning_rate", "max_grad_norm", "beta1", "beta2", "weight_decay")
    own = ("dtype", "threads", "prompts", "group", "microbatch", "new_tokens")
    return {
        "model": str(folder), "rows": str(folder / "rows.jsonl"), "num_steps": 10**6,
        **{name: getattr(options, name) for name in own}, **{name: train[name] for name in shared},
    }  # fmt: skip
