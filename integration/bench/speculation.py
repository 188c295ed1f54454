"""Time saved by drafts, by turns with speculation off.

Three loads. `right`: a source that is right with probability --right for each token, made from the true continuation:
speedup_b1 and speedup_b4. `wrong`: a source that is never right: worst_slowdown of several batches, each run compared
with the one before it. `tail`: groups of samples of one prompt, with a lognormal number of tokens until their end of
sequence, on a small model that is trained here, with all real sources: tail_speedup is of the time until the last one
has ended; entropy_nats, equal_siblings and the acceptance of each source say what text it was. Outputs with drafts and
without are compared token by token. The first two run on one engine, whose requests of every other run ask for no
drafts: the places of two engines' memory alone differ by 3 %. Bars: 2.0 and 1.4 on a processor with AMX, else 1.7 and
1.2; 1.03; 1.3.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from ...kernels.machine.native import compile_flags
from ...rollout.completion import Completion
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.request_options import RequestOptions
from ...rollout.sampling_params import SamplingParams
from ...rollout.sequences.request import Request
from ...rollout.speculation.proposer import Proposal
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive
from .parts.phrases import MAX_ANSWER_TOKENS, MIN_ANSWER_TOKENS, PhraseLanguage, train_phrase_model
from .parts.presets import DTYPES, load_model

BATCHES_RIGHT, BATCHES_WRONG = (1, 4), (1, 8, 32)
_PROMPT_TOKENS = 16
_BARS = {True: (2.0, 1.4), False: (1.7, 1.2)}  # with AMX, without
_WORST_SLOWDOWN, _TAIL_SPEEDUP = 1.03, 1.3
_WARM_UP_PART = 4  # of the tokens, with a source that is made up
_WARM_UP_ROUNDS = 2  # of the tail: steps are recorded, their times learned, and a history is kept
_RIGHT_SHARE, _WRONG_SHARE = 0.15, 0.5  # of the time that is left, for each batch of the first two parts
_MAX_SECONDS = 280.0  # ten pairs at batch 32 take more than a minute without AMX

_Tokens = tuple[tuple[int, ...], tuple[float, ...]]  # of one answer, and their log-probabilities


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help="a preset or a model folder, for `right` and `wrong`")
    parser.add_argument("--right", type=float, default=0.7, help="chance of a proposed token to be the true one")
    parser.add_argument("--new-tokens", type=positive, default=256, help="of each sequence of `right` and `wrong`")
    parser.add_argument("--pairs", type=positive, default=10, help="of `wrong`; a third as many of `right`")
    parser.add_argument("--rounds", type=positive, default=6, help="of `tail`, after two that warm up")
    parser.add_argument("--group", type=positive, default=8, help="samples of each prompt of `tail`")
    parser.add_argument("--groups", type=positive, default=4, help="prompts of `tail`")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add_budget_argument(parser, _MAX_SECONDS)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report."""
    torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    model = load_model(options.model, dtype=options.dtype)
    right = {
        batch: _made_load(model, batch, options, options.right, budget.share(_RIGHT_SHARE)) for batch in BATCHES_RIGHT
    }
    wrong = {batch: _made_load(model, batch, options, 0.0, budget.share(_WRONG_SHARE)) for batch in BATCHES_WRONG}
    has_amx = torch.cpu._is_amx_tile_supported() and "-mno-amx-bf16" not in compile_flags(os.environ)
    tail_speedup, tail = _tail(options, budget)
    figures = {
        "speedup_b1": right[1].speedup,
        "speedup_b4": right[4].speedup,
        "worst_slowdown": max(1 / load.speedup for load in wrong.values()),
        "tail_speedup": tail_speedup,
    }
    bar_b1, bar_b4 = _BARS[has_amx]
    return {
        "model": options.model,
        "threads": options.threads,
        "has_amx": has_amx,
        **{name: round(figure, 3) for name, figure in figures.items()},
        "right": [load.row(batch) for batch, load in right.items()],
        "wrong": [load.row(batch) for batch, load in wrong.items()],
        "tail": tail,
        "passed": figures["speedup_b1"] >= bar_b1 and figures["speedup_b4"] >= bar_b4
        and tail_speedup >= _TAIL_SPEEDUP and figures["worst_slowdown"] <= _WORST_SLOWDOWN,
    }  # fmt: skip


class MadeUp:
    """A source that knows the true continuations, and is right with some probability for each token."""

    name = "made up"

    def __init__(self, truth: Sequence[Completion], chance: float, vocab_size: int) -> None:
        self._truth = {one.prompt_ids: one.token_ids for one in truth}
        self._chance, self._vocab_size, self._draw = chance, vocab_size, random.Random(0)

    def propose(self, request: Request, most: int) -> Proposal:
        sequence = request.sequence
        truth = self._truth[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        first = sequence.num_output_tokens
        token_ids = [id if self._draw.random() < self._chance else (id + 1) % self._vocab_size
                     for id in truth[first : first + most]]  # fmt: skip
        return Proposal(token_ids)

    def on_tokens(self, request: Request, num_cut: int) -> None:
        """Do nothing: the truth is known."""

    def on_end(self, request: Request) -> None:
        """Do nothing: the truth is known."""


@dataclass(frozen=True)
class Turns:
    """Runs of a load by turns: off, on, off, on ..."""

    off_seconds: list[float]
    on_seconds: list[float]
    steps_off: int
    steps_on: int

    @property
    def ratios(self) -> list[float]:
        """How many times as fast each run with drafts was as the run before it, and as the run after it."""
        runs = [s for pair in itertools.zip_longest(self.off_seconds, self.on_seconds) for s in pair if s is not None]
        return [a / b if index % 2 == 0 else b / a for index, (a, b) in enumerate(itertools.pairwise(runs))]

    @property
    def speedup(self) -> float:
        return statistics.median(self.ratios)

    def row(self, batch: int) -> dict[str, object]:
        return {
            "batch": batch, "speedup": round(self.speedup, 3), "least": round(min(self.ratios), 3),
            "most": round(max(self.ratios), 3), "off_s": round(statistics.median(self.off_seconds), 3),
            "on_s": round(statistics.median(self.on_seconds), 3), "steps_off": self.steps_off,
            "steps_on": self.steps_on,
        }  # fmt: skip


def _made_load(model: PreTrainedModel, batch: int, options: argparse.Namespace, chance: float, budget: Budget) -> Turns:
    """Measure a batch with a source that is made from the true continuations."""
    generator = torch.Generator().manual_seed(batch)
    vocab_size = int(model.config.vocab_size)
    prompts = torch.randint(vocab_size, (batch, _PROMPT_TOKENS), generator=generator).tolist()
    settings = [
        SamplingParams(max_new_tokens=options.new_tokens, sampling_seed=i, ignore_eos=True) for i in range(batch)
    ]
    num_blocks = batch * -(-(_PROMPT_TOKENS + options.new_tokens + 16) // EngineConfig.block_size)
    engine = _engine(model, num_blocks, batch, {})
    truth = engine.generate(prompts, settings)  # warms up too
    engine.drafts.add_source(MadeUp(truth, chance, vocab_size))
    few = -(-options.new_tokens // _WARM_UP_PART)
    engine.generate(prompts, [replace(one, max_new_tokens=few) for one in settings])  # records steps with drafts
    num_pairs = options.pairs if chance == 0.0 else -(-options.pairs // 3)
    turns = _by_turns(engine, prompts, settings, _tokens(truth), num_pairs, budget)
    print(f"batch {batch}, right {chance}: {turns.row(batch)}", file=sys.stderr, flush=True)
    return turns


def _engine(model: PreTrainedModel, num_blocks: int, batch: int, speculation: str | Mapping[str, int]) -> Engine:
    config = EngineConfig(
        kv_cache=num_blocks, max_num_seqs=batch, prefix_cache=False, speculation=speculation
    )  # fmt: skip
    return Engine(model, config)


def _by_turns(
    engine: Engine, prompts: list[list[int]], settings: list[SamplingParams], expected: list[_Tokens],
    num_pairs: int, budget: Budget,
) -> Turns:  # fmt: skip
    """Run a load without drafts and with them, one more run than pairs. Raises RuntimeError where an answer is not the
    expected one."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    steps = {}
    for number in budget.rounds(num_pairs + 1, least=3):
        is_on = number % 2 == 1
        before, started = engine.metrics.num_steps, time.perf_counter()
        found = _tokens(engine.generate(prompts, settings, options=RequestOptions(speculation=is_on)))
        seconds[is_on].append(time.perf_counter() - started)
        steps[is_on] = engine.metrics.num_steps - before
        if found != expected:
            raise RuntimeError("outputs with drafts differ from those without")
    return Turns(seconds[False], seconds[True], steps[False], steps[True])


def _tokens(completions: list[Completion]) -> list[_Tokens]:
    return [(one.token_ids, one.logprobs) for one in completions]


def _tail(options: argparse.Namespace, budget: Budget) -> tuple[float, dict[str, object]]:
    """Measure groups of samples with a long tail, with the real sources. Returns the speedup, and of what text."""
    started, language = time.perf_counter(), PhraseLanguage()
    model = train_phrase_model(language, DTYPES[options.dtype])
    train_s = time.perf_counter() - started
    num_samples = options.groups * options.group
    prompts = [language.prompt(topic) for topic in range(options.groups) for _ in range(options.group)]
    num_blocks = num_samples * -(-(len(prompts[0]) + MAX_ANSWER_TOKENS + 16) // EngineConfig.block_size)
    off, on = (_engine(model, num_blocks, num_samples, name) for name in ("off", "auto"))
    # Each pair has seeds of its own, or an earlier run would be the history of the next.
    seeds, rounds = itertools.count(), []
    for number in budget.rounds(options.rounds + _WARM_UP_ROUNDS, least=_WARM_UP_ROUNDS + 1):
        settings = [
            SamplingParams(
                min_new_tokens=MIN_ANSWER_TOKENS, max_new_tokens=MAX_ANSWER_TOKENS, sampling_seed=next(seeds)
            )
            for _ in prompts
        ]
        found = []
        for engine in (off, on):
            before, began = engine.metrics.num_steps, time.perf_counter()
            answers = engine.generate(prompts, settings)
            found.append((time.perf_counter() - began, engine.metrics.num_steps - before, answers))
        if _tokens(found[0][2]) != _tokens(found[1][2]):
            raise RuntimeError("outputs with drafts differ from those without")
        rounds.append(found)
        say(f"tail, round {number + 1}: {found[0][0]:.2f} s without drafts, {found[1][0]:.2f} s with them")
    rounds = rounds[_WARM_UP_ROUNDS:]
    answers = [one for found in rounds for one in found[0][2]]
    lengths = sorted(len(one.token_ids) for one in answers)
    siblings = [{one.token_ids for one in found[0][2][g : g + options.group]}
                for found in rounds for g in range(0, num_samples, options.group)]  # fmt: skip
    assert on.parts.speculation is not None
    return statistics.median(a[0] / b[0] for a, b in rounds), {
        "least": round(min(a[0] / b[0] for a, b in rounds), 3),
        "off_s": round(statistics.median(a[0] for a, _ in rounds), 3),
        "on_s": round(statistics.median(b[0] for _, b in rounds), 3),
        "steps_off": statistics.median(a[1] for a, _ in rounds),
        "steps_on": statistics.median(b[1] for _, b in rounds),
        "entropy_nats": round(-sum(sum(one.logprobs) for one in answers) / sum(lengths), 3),
        "equal_siblings": 1 - sum(map(len, siblings)) / len(answers),
        "not_ended": sum(one.finish_reason is None or one.finish_reason.type != "stop" for one in answers),
        "median_length": lengths[len(lengths) // 2],
        "longest": lengths[-1],
        "train_s": round(train_s, 1),
        "accepted": {name: round(counts.num_accepted / max(counts.num_drafted, 1), 3)
                     for name, counts in on.parts.speculation.counts.items()},
        "drafted": {name: counts.num_drafted for name, counts in on.parts.speculation.counts.items()},
    }  # fmt: skip
