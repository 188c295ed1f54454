"""`lockstep rollouts`: show what a run of the job has sampled."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..failures import files_of
from ..grpo.results.samples import read_samples, saved_steps, shown
from .arguments.parser import CommandParser

Row = Mapping[str, Any]  # a line of a file of samples

SHOWN = 5  # samples, where no number is asked for
# The sort keys beside the names of the reward's components.
_KEYS: dict[str, Callable[[Row], float]] = {
    "reward": lambda row: row["reward"],
    "advantage": lambda row: row["advantage"],
    "length": lambda row: len(row["token_ids"]),
    "logprob": lambda row: math.fsum(row["logprobs"]) / max(len(row["logprobs"]), 1),
}


def run(arguments: Sequence[str]) -> int:
    """Print the samples that are asked for. Returns the exit code."""
    options = _parse(arguments)
    folder = Path(options.run)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give that of a run, such as runs/arithmetic")
    steps = saved_steps(folder)
    if not steps:
        raise ValueError(f"{folder} has no samples: no step has been done, or `run.rollouts_every` is 0")
    step = steps[-1] if options.step is None else options.step
    if options.html:
        return _write_page(folder, step, Path(options.html), options.tokenizer)
    rows = read_samples(folder, step)
    chosen = _chosen(rows, options)
    if options.json:
        for row in chosen:
            print(json.dumps(row))
    else:
        print("\n".join(_head(rows, chosen, step, steps)))
        for row in chosen:
            print("\n" + shown(row))
    return 0


def _write_page(folder: Path, step: int, path: Path, tokenizer_path: str | None) -> int:
    """Write the page of a step's samples and print its path. Returns the exit code."""
    # Imports that take seconds, which the other uses of this command do not need.
    from ...rollout.model.tokenizer import load_tokenizer
    from ..grpo.results.samples_page import samples_data, tokenizer_folder
    from ..pages.rollouts import static_page

    found = Path(tokenizer_path) if tokenizer_path else tokenizer_folder(folder)
    tokenizer = load_tokenizer(found) if found is not None else None
    if tokenizer_path and tokenizer is None:
        raise ValueError(f"--tokenizer {tokenizer_path}: no tokenizer is there")
    data = samples_data(folder, step, tokenizer)
    with files_of(path, advice="give --html another path, or make this one writable"):
        path.write_text(static_page(data), encoding="utf-8")
    without = "" if tokenizer is not None else "; tokens are shown by their ids, for the run has no tokenizer"
    print(f"{len(data['samples'])} samples of step {step} in {path}{without}")
    return 0


def _chosen(rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """Return the samples to show. Raises ValueError for a sort key that the samples do not have."""
    if options.sort is None and not options.worst and not options.best:
        return list(rows if options.all or options.json else rows[:SHOWN])
    name = options.sort or "reward"
    components = sorted({key for row in rows for key in row.get("components", {})})
    if name not in _KEYS and name not in components:
        raise ValueError(f"--sort {name}: the samples have {', '.join([*_KEYS, *components])}")
    key = _KEYS.get(name, lambda row: row.get("components", {}).get(name, -math.inf))
    ascending = sorted(rows, key=key)  # stable: equal ones stay in the order of their prompts
    if options.worst:
        return ascending[: options.worst]
    descending = sorted(rows, key=key, reverse=True)
    return descending[: options.best or (None if options.all or options.json else SHOWN)]


def _head(rows: Sequence[Row], chosen: Sequence[Row], step: int, steps: Sequence[int]) -> Iterator[str]:
    """Yield lines about all samples of the step."""
    there = f"steps {steps[0]} to {steps[-1]} are there" if len(steps) > 1 else "no other step is there"
    yield f"step {step} ({there}): {len(chosen)} of {len(rows)} samples"
    if not rows:
        return
    rewards, lengths = [row["reward"] for row in rows], [len(row["token_ids"]) for row in rows]
    cut = sum(row["finish_reason"] == "length" for row in rows) / len(rows)
    yield f"reward {statistics.fmean(rewards):.4g} ({min(rewards):.4g} to {max(rewards):.4g})"
    for name in sorted({key for row in rows for key in row.get("components", {})}):
        its = [row["components"][name] for row in rows if name in row.get("components", {})]
        yield f"  {name} {statistics.fmean(its):.4g} ({min(its):.4g} to {max(its):.4g})"
    if any("is_success" in row for row in rows):
        yield f"successes {sum(bool(row.get('is_success')) for row in rows) / len(rows):.1%}"
    yield f"tokens {statistics.fmean(lengths):.4g} ({min(lengths)} to {max(lengths)}), ended by length: {cut:.1%}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep rollouts",
        description="Show samples of a run of the job: prompts, texts, rewards, and how they ended. Characters "
        "that could control a terminal are written out.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/arithmetic")
    parser.add_argument("--step", type=int, metavar="N", help="default: the newest step whose samples are there")
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help=f"largest first: {', '.join(_KEYS)} (mean of a token), or a component of the reward",
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--worst", type=int, metavar="N", help="the N least by --sort (reward), the least first")
    number.add_argument("--best", type=int, metavar="N", help="the N largest by --sort (reward)")
    number.add_argument("--all", action="store_true", help=f"all samples, not only the first {SHOWN}")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page with all samples of the step, which a browser opens without a network: tokens coloured by "
        "log-probability or advantage, groups side by side, filters",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="of the page's tokens; default: the run's own, which the job has kept"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a line of JSON for each sample, with all of it: for all samples, if no number is asked for",
    )
    options = parser.parse_args(arguments)
    for name in ("step", "worst", "best"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    return options
