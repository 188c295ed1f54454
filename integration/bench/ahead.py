"""Time saved by rollouts ahead of training, by turns with the same run without, whose weights must be equal.

Two loads on a small model that is trained here first; no cache holds its weights, as of the models that people train.
`separate`: an engine in a process of its own, and a trainer, of one thread each; few sequences of one length, whose
decoding waits for the weights, without drafts; the number of prompts is chosen so that generating and training take
about equally long. speedup_separate is of the seconds of a step, verification included. `tail`: one module for both;
groups of samples with a lognormal number of tokens until their end of sequence, few at a time too, with drafts on both
sides. speedup_tail is of the seconds of a step's rollout, verification included. Each pair of runs goes on from the
steps of the one before, with digests compared at every step. kept_share: of the tokens that were drawn again, those
that came out equal. Bars: 1.3; 1.15 on a processor with AMX, else 1.05.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...kernels.machine.native import compile_flags
from ...kernels.sampling.draws import derive_seed
from ...rollout.ahead.rollouts import AheadCounts
from ...rollout.sampling_params import SamplingParams
from ..grpo.backends.ddp import DdpBackend
from ..grpo.engines.aliased import AliasedEngine
from ..grpo.engines.answers import Answer, StepSamples, waited
from ..grpo.engines.engine import JobEngine, StepPrompts
from ..grpo.engines.separate import SeparateEngine
from ..grpo.rewards.score import Score
from ..grpo.settings.config import JobConfig
from ..grpo.settings.sampling import RolloutSettings
from ..grpo.settings.sections import EngineSettings, ModelSettings, RunSettings
from ..grpo.settings.training import TrainSettings
from ..grpo.training.advantages import group_advantages
from ..grpo.training.packing import Sample
from ..grpo.training.trainer import GrpoTrainer
from ..ranks import Ranks, process_group
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive
from .parts.phrases import (
    MAX_ANSWER_TOKENS,
    MIN_ANSWER_TOKENS,
    PADDED,
    PROMPT_TOKENS,
    PhraseLanguage,
    train_phrase_model,
)
from .parts.presets import DTYPES

_MAX_SECONDS = 265.0  # with what comes before and after, within five minutes
_SEPARATE_SHARE = 0.5  # of the time that is left after the model is trained
_SEPARATE, _TAIL = 1.3, {True: 1.15, False: 1.05}  # bars; of `tail` with AMX, without
_MAX_PROMPTS = 48
_FEW = 2  # samples of a prompt of `separate`

Prompts = list[list[int]]
Load = Callable[[int], tuple[Prompts, list[SamplingParams]]]  # of a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=8, help="of one run of a pair")
    parser.add_argument("--pairs", type=positive, default=5, help="of `separate`; half as many of `tail`")
    parser.add_argument("--ahead", type=positive, default=1, help="steps that may be begun beyond the current one")
    parser.add_argument("--new-tokens", type=positive, default=96, help="of each sample of `separate`")
    parser.add_argument("--groups", type=positive, default=3, help="prompts of a step of `tail`")
    parser.add_argument("--group", type=positive, default=2, help="samples of a prompt of `tail`")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="the arithmetic job's, or a higher one")
    parser.add_argument("--threads", type=positive, default=2, help="of `tail`")
    parser.add_argument("--layers", type=positive, default=6, help="of the model")
    parser.add_argument("--width", type=positive, default=PADDED["intermediate_size"], help="of its MLPs")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add_budget_argument(parser, _MAX_SECONDS)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report."""
    torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    shape = PADDED | {"num_hidden_layers": options.layers, "intermediate_size": options.width}
    model = train_phrase_model(PhraseLanguage(), DTYPES[options.dtype], shape)
    say(f"a model of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters is trained")
    has_amx = torch.cpu._is_amx_tile_supported() and "-mno-amx-bf16" not in compile_flags(os.environ)
    ranks = Ranks(0, 1, torch.device("cpu"))
    with process_group(ranks, 600):
        separate = _separate(model, ranks, options, budget.share(_SEPARATE_SHARE))
        torch.set_num_threads(options.threads)
        tail = _tail(model, ranks, options, budget)
    figures = {"speedup_separate": separate.speedup("step_s"), "speedup_tail": tail.speedup("rollout_s")}
    return {
        "threads": options.threads,
        "has_amx": has_amx,
        **{name: round(figure, 3) for name, figure in figures.items()},
        "kept_share": round(min(separate.kept_share, tail.kept_share), 4),
        "digests_equal": True,  # else an error was raised
        "separate": separate.report("step_s"),
        "tail": tail.report("rollout_s"),
        "passed": figures["speedup_separate"] >= _SEPARATE and figures["speedup_tail"] >= _TAIL[has_amx],
    }


@dataclass(frozen=True)
class Stretch:
    """Some steps of a run, in seconds a step."""

    step_s: float
    rollout_s: float
    train_s: float
    sync_s: float
    generate_s: float  # of the engine's steps, without:
    verify_s: float
    redraw_s: float  # of generate_s, the share of the tokens behind a first difference
    counts: AheadCounts
    digests: tuple[str | None, ...]


class Run:
    """One run of GRPO: an engine, a trainer, and the steps so far."""

    def __init__(self, config: JobConfig, model: PreTrainedModel, make: Callable[..., JobEngine], load: Load) -> None:
        ranks = Ranks(0, 1, torch.device("cpu"))
        self.config, self._load, self._ahead = config, load, config.rollout.ahead
        self.backend = DdpBackend(config.train, ranks)
        self.engine = make(config, model, self.backend)
        self._trainer = GrpoTrainer(
            self.engine.hosted, self.backend, config.train, 1.0, ranks, announce_step=self.engine.announce_step
        )
        self.step = self._num_begun = 0
        self.engine.sync("0")

    def go_on(self, num_steps: int) -> Stretch:
        """Run further steps; nothing is begun beyond them."""
        before, first, last = self.engine.counts(), self.step, self.step + num_steps
        seconds, digests, num_tokens = [0.0, 0.0, 0.0], [], 0
        for step in range(first, last):
            began, done = time.perf_counter(), StepSamples()
            for coming in range(max(step, self._num_begun), min(step + self._ahead, last - 1) + 1):
                self.engine.begin(coming, StepPrompts(*self._load(coming)))  # type: ignore[arg-type]  # token ids are prompts
                self._num_begun = coming + 1
            if self._trainer.update(self._samples(step, done), step).logprob_gap != 0.0:
                raise RuntimeError("the trainer's log-probabilities are not the engine's")
            trained = time.perf_counter()
            self.engine.sync(str(step + 1))
            digests.append(self.engine.weight_digest())
            parts = (done.waited_s, trained - began - done.waited_s, time.perf_counter() - trained)
            seconds = [so_far + part for so_far, part in zip(seconds, parts, strict=True)]
            num_tokens += sum(len(one.token_ids) for one in done.completions)
        self.step = last
        counts = self.engine.counts() - before
        generate_s = counts.step_seconds - counts.verify_seconds
        num_drawn = num_tokens - counts.num_kept_tokens
        return Stretch(
            sum(seconds) / num_steps,
            seconds[0] / num_steps,
            seconds[1] / num_steps,
            seconds[2] / num_steps,
            generate_s / num_steps,
            counts.verify_seconds / num_steps,
            generate_s / num_steps * min(counts.num_parted_tokens / max(num_drawn, 1), 1.0),
            counts,
            tuple(digests),
        )

    def _samples(self, step: int, done: StepSamples) -> Iterator[Sample]:
        groups = waited(self.engine.groups(step, self.config.rollout.prompts_per_step), done)
        for answers in chain.from_iterable(groups):
            rewards = [sum(one.token_ids) % 97 / 97 for one in answers]
            done.answers += [Answer(one, Score(reward)) for one, reward in zip(answers, rewards, strict=True)]
            advantages = group_advantages(torch.tensor([rewards]))[0].tolist()
            for one, advantage in zip(answers, advantages, strict=True):
                yield Sample(one.prompt_ids, one.token_ids, one.logprobs, advantage)


@dataclass(frozen=True)
class Pairs:
    """Stretches of two runs by turns: without any step ahead, and with."""

    off: list[Stretch]
    on: list[Stretch]
    load: dict[str, object]

    def ratios(self, name: str) -> list[float]:
        return [getattr(off, name) / getattr(on, name) for off, on in zip(self.off, self.on, strict=True)]

    def speedup(self, name: str) -> float:
        return statistics.median(self.ratios(name))

    @property
    def kept_share(self) -> float:
        num_kept = sum(one.counts.num_kept_tokens for one in self.on)
        return num_kept / max(num_kept + sum(one.counts.num_parted_tokens for one in self.on), 1)

    def report(self, name: str) -> dict[str, object]:
        ratios, names = (
            self.ratios(name),
            ("step_s", "rollout_s", "train_s", "sync_s", "generate_s", "verify_s", "redraw_s"),
        )
        return {
            **self.load,
            "ratios": [round(ratio, 3) for ratio in ratios],
            "kept_share": round(self.kept_share, 4),
            "verified_tokens": sum(one.counts.num_verified_tokens for one in self.on),
            **{
                side: {name: round(statistics.median(getattr(one, name) for one in stretches), 3) for name in names}
                for side, stretches in (("off", self.off), ("on", self.on))
            },
        }


def _by_turns(
    off: Run, on: Run, options: argparse.Namespace, num_pairs: int, load: dict[str, object], budget: Budget
) -> Pairs:  # fmt: skip
    """Run a short stretch of both to warm up, then pairs. Raises RuntimeError where the weights differ."""
    pairs = Pairs([], [], load)
    for number in budget.rounds(num_pairs + 1, least=2):
        num_steps = options.steps if number else 2
        first, second = off.go_on(num_steps), on.go_on(num_steps)
        if first.digests != second.digests:
            raise RuntimeError("the weights of the run ahead are not those of the run without")
        if number:
            pairs.off.append(first)
            pairs.on.append(second)
            say(f"{load}: {first.step_s:.2f} s a step, ahead {second.step_s:.2f} s; "
                 f"rollout {first.rollout_s:.2f} s, ahead {second.rollout_s:.2f} s")  # fmt: skip
    return pairs


def _separate(model: PreTrainedModel, ranks: Ranks, options: argparse.Namespace, budget: Budget) -> Pairs:
    """Measure an engine and a trainer in two processes of one thread each."""
    torch.set_num_threads(1)
    language = PhraseLanguage()

    def load_of(num_prompts: int) -> Load:
        return lambda step: (
            [language.prompt(step * num_prompts + index) for index in range(num_prompts)],
            [_params(_FEW, options.new_tokens, step, index, options.new_tokens) for index in range(num_prompts)],
        )

    with tempfile.TemporaryDirectory(prefix="lockstep-bench-ahead-") as folder, ExitStack() as exit:
        model.save_pretrained(folder)

        def make(config: JobConfig, its_model: PreTrainedModel, backend: DdpBackend) -> JobEngine:
            engine = SeparateEngine(config, its_model, Path(folder), ranks, backend)
            exit.callback(engine.close)
            return engine

        def run_of(num_prompts: int, ahead: int) -> Run:
            config = _config(options, folder, num_prompts, _FEW, options.new_tokens, ahead)
            # As many rows as a group has: the trainer has the first one while others are verified.
            num_rows = _FEW * (options.new_tokens + PROMPT_TOKENS)
            its_engine = replace(config.engine, speculation="off", max_num_batched_tokens=num_rows)
            separate = replace(config, engines="separate", sync="tensor", engine=its_engine)
            return Run(separate, copy.deepcopy(model), make, load_of(num_prompts))

        num_prompts = _balanced(run_of)
        off, on = run_of(num_prompts, 0), run_of(num_prompts, options.ahead)
        return _by_turns(
            off,
            on,
            options,
            options.pairs,
            {"prompts": num_prompts, "group": _FEW, "tokens": options.new_tokens},
            budget,
        )


def _balanced(run_of: Callable[[int, int], Run]) -> int:
    """Find the number of prompts with which generating takes as long as training: both grow linearly with it."""
    trial = {num_prompts: run_of(num_prompts, 0) for num_prompts in (1, 4)}
    found = {}
    for num_prompts, one in trial.items():
        one.go_on(1)  # warms up
        found[num_prompts] = one.go_on(2)
        one.engine.close()
    (few, at_few), (many, at_many) = found.items()
    difference = {num: at.rollout_s - at.train_s for num, at in ((few, at_few), (many, at_many))}
    slope = (difference[many] - difference[few]) / (many - few)
    say(f"generating and training {few} prompts: {at_few.rollout_s:.2f} s and {at_few.train_s:.2f} s; "
         f"{many} prompts: {at_many.rollout_s:.2f} s and {at_many.train_s:.2f} s")  # fmt: skip
    if slope >= 0:  # generating takes longer, and the more so the more prompts there are; or the reverse
        return 1 if difference[few] > 0 else _MAX_PROMPTS
    return min(max(round(few - difference[few] / slope), 1), _MAX_PROMPTS)


def _tail(model: PreTrainedModel, ranks: Ranks, options: argparse.Namespace, budget: Budget) -> Pairs:
    """Measure one module that generates and is trained, with answers of many lengths."""
    language, num_prompts, group = PhraseLanguage(), options.groups, options.group

    def load(step: int) -> tuple[Prompts, list[SamplingParams]]:
        prompts = [language.prompt(step * num_prompts + index) for index in range(num_prompts)]
        return prompts, [_params(group, MAX_ANSWER_TOKENS, step, index) for index in range(num_prompts)]

    def make(config: JobConfig, its_model: PreTrainedModel, backend: DdpBackend) -> JobEngine:
        return AliasedEngine(config, its_model, None, backend)  # type: ignore[arg-type]  # prompts are token ids

    config = _config(options, "", num_prompts, group, MAX_ANSWER_TOKENS, 0)
    off = Run(config, copy.deepcopy(model), make, load)
    on = Run(replace(config, rollout=replace(config.rollout, ahead=options.ahead)), copy.deepcopy(model), make, load)
    try:
        return _by_turns(
            off,
            on,
            options,
            -(-options.pairs // 2),
            {"prompts": num_prompts, "group": group, "lengths": "lognormal"},
            budget,
        )
    finally:
        off.engine.close()
        on.engine.close()


def _config(
    options: argparse.Namespace, folder: str, num_prompts: int, group: int, num_tokens: int, ahead: int
) -> JobConfig:
    num_sequences = num_prompts * group
    num_blocks = 2 * num_sequences * -(-(num_tokens + 64) // 16)
    return JobConfig(
        run=RunSettings("bench-ahead", dir=folder or "."),
        model=ModelSettings(dtype=options.dtype),
        rollout=RolloutSettings(num_prompts, group, num_tokens, ahead=ahead),
        # A group is trained on while the next ones are verified.
        train=TrainSettings(options.learning_rate, microbatch_tokens=group * (num_tokens + PROMPT_TOKENS)),
        engine=EngineSettings(device="cpu", kv_cache=f"{num_blocks} blocks", max_num_seqs=max(num_sequences, 2)),
    )


def _params(group: int, num_tokens: int, step: int, index: int, least: int = MIN_ANSWER_TOKENS) -> SamplingParams:
    seed = derive_seed(0, step, index)
    return SamplingParams(n=group, min_new_tokens=least, max_new_tokens=num_tokens, sampling_seed=seed)
