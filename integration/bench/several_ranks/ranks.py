"""Rollout throughput of a replica of several ranks with one thread each, beside one rank with as many threads.

The ranks are processes of this machine. A repeat is one batch of random prompts, each continued by --new-tokens tokens
sampled at temperature 1, by the replica and by the single rank in turn; the one that does not run is idle. The replica
adds in k_blocks = --tp blocks, the single rank in one.

replica_tok_s and single_tok_s are new tokens over the wall seconds of the whole load, prefill included; ..._step_ms the
median step that ran one decode row of every sequence; ratio and step_ratio the median over the repeats of the replica's
rate over the single rank's, of the whole load and of such steps. has_memory tells whether the ranks of a stage exchange
tensors through shared memory, replays whether the last decode step of the replica's first rank was a replay.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from transformers import PreTrainedModel

from ....rollout.engine import Engine
from ..parts.budget import Budget, add_budget_argument, say
from ..parts.load import Load, add_load_arguments, load_of, positive
from ..parts.presets import DTYPES, PRESETS, load_model
from ..parts.runs import Run, make_engine, run_engine
from .local_ranks import local_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    add_load_arguments(parser)
    parser.add_argument("--tp", type=positive, default=2, help="ranks that share each layer")
    parser.add_argument("--pp", type=positive, default=1, help="stages of layers")
    parser.add_argument("--repeats", type=positive, default=3, help="the median counts")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for a model that is not there and for a single rank."""
    num_ranks = options.tp * options.pp
    if num_ranks == 1:
        raise ValueError("--tp 1 --pp 1 is a single rank: there is nothing to compare")
    budget, load = Budget(options.max_seconds), load_of(options)
    model = load_model(options.model, dtype=options.dtype)
    with local_ranks(num_ranks, _follow, options, load):
        replica, single = _engine(model, options, load), make_engine(model, load, invariant=True)
        runs: dict[str, list[Run]] = {"replica": [], "single": []}
        engines = {"replica": (replica, 1), "single": (single, num_ranks)}
        for number in budget.rounds(1 + options.repeats, least=2):
            repeat = number - 1  # one to warm up
            for name, (engine, num_threads) in engines.items():
                torch.set_num_threads(num_threads)
                one = run_engine(engine, load, load.prompts(engine.model.vocab_size, repeat), repeat)
                rate = load.num_new_tokens(repeat) / one.seconds
                say(f"repeat {number}/{options.repeats} {name}: {rate:.0f} tok/s")
                if repeat >= 0:
                    runs[name].append(one)
        replays = _replays(replica)
        torch.set_num_threads(1)
        for engine in (replica, single):
            engine.close()
    settings = {
        "model": options.model, "dtype": options.dtype, "tp": options.tp, "pp": options.pp, "batch": load.batch,
        "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens, "repeats": len(runs["replica"]),
        "has_memory": replica.parts.ranks.mesh.tp_memory is not None, "replays": replays,
    }  # fmt: skip
    return {**settings, **report(load, runs)}


def _engine(model: PreTrainedModel, options: argparse.Namespace, load: Load) -> Engine:
    return make_engine(model, load, invariant=True, tp=options.tp, pp=options.pp)


def _follow(options: argparse.Namespace, load: Load) -> None:
    engine = _engine(load_model(options.model, dtype=options.dtype), options, load)
    engine.follow()
    engine.close()


def _replays(engine: Engine) -> bool:
    runner: Any = engine.parts.runner  # of several ranks: it has a stage
    graphs = runner.stage._graphs
    return graphs is not None and any(step.is_trusted for step in graphs._records.values())


def report(load: Load, runs: dict[str, list[Run]]) -> dict[str, object]:
    """Compute medians over the repeats, and the lowest and highest ratio."""
    rates = {
        name: [load.num_new_tokens(repeat) / run.seconds for repeat, run in enumerate(of_name)]
        for name, of_name in runs.items()
    }
    steps = {
        name: [statistics.median(run.decode_step_seconds) for run in of_name]
        for name, of_name in runs.items()
        if all(run.decode_step_seconds for run in of_name)
    }
    ratios = [mine / other for mine, other in zip(rates["replica"], rates["single"], strict=True)]
    found: dict[str, object] = {f"{name}_tok_s": round(statistics.median(rates[name]), 1) for name in rates}
    found |= {f"{name}_step_ms": round(statistics.median(steps[name]) * 1e3, 3) for name in steps}
    found["ratio"] = round(statistics.median(ratios), 3)
    found["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    if len(steps) == len(rates):
        of_steps = [other / mine for mine, other in zip(steps["replica"], steps["single"], strict=True)]
        found["step_ratio"] = round(statistics.median(of_steps), 3)
    return found
