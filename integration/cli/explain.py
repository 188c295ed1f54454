"""`lockstep explain`: run one sequence in two ways and show where their numbers part."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments.parser import CommandParser

if TYPE_CHECKING:
    from ..explain.scores import Scores
    from ..explain.sequence import TokenSequence

EQUAL, PARTED, FAILED = 0, 1, 3
_MOST_ULPS = 2**62


def run(arguments: Sequence[str]) -> int:
    """Compare the two ways and print where they part. Returns the exit code. SIGTERM ends it as an exception does: with
    the ranks that it has started, and without the files that it has written for them."""
    options = _parse(arguments)
    with _ended_by_sigterm():
        return _explained(options)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which alone may set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _explained(options: argparse.Namespace) -> int:
    from ..explain.ways import RunFailed, parse_way

    given = options.way
    # Heavy imports come after the ways, so that a wrong word is reported at once.
    first, second = (parse_way(text) for text in given or ("decode", "trainer"))
    from ...rollout.errors import BrokenLogits
    from ..explain.explain import explain
    from ..explain.gap_folder import GapFolder
    from ..explain.scores import read_scores

    gap = GapFolder.at(Path(options.source)) if options.source else None
    if gap is not None and not given:
        first, second = gap.ways
    model = Path(options.model) if options.model else gap.model if gap is not None else None
    if model is None:
        if options.source and not Path(options.source).exists():
            raise ValueError(f"there is no file or folder {options.source}: give that of a sequence, or of a run")
        raise ValueError("--model is missing: the folder of the model that the sequence is of")
    scores = read_scores(Path(options.scores), options.choice) if options.scores else None
    sequence = _sequence(options, model, scores) if gap is None else gap.sequence
    if gap is not None and options.temperature is not None:
        sequence = replace(sequence, temperature=options.temperature)
    try:
        report = explain(
            model, sequence, first, second, scores=scores, at_least=options.at_least, tolerance=options.tolerance,
            announce=lambda line: print(f"lockstep: {line}", file=sys.stderr, flush=True),
        )  # fmt: skip
    except (RunFailed, BrokenLogits) as error:
        print(f"lockstep: error: {error}", file=sys.stderr, flush=True)
        return FAILED
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        print("\n".join(report.lines(shows_all=options.all)))
    return EQUAL if report.is_equal else PARTED


def _sequence(options: argparse.Namespace, model: Path, scores: Scores | None) -> TokenSequence:
    """Return the sequence that the options name. Raises ValueError if there is none, or more than one."""
    from ..explain.checkpoint_folder import model_folder
    from ..explain.sequence import TokenSequence, read_sequence, sample_of, text_sequence

    if options.text is not None:
        with model_folder(model) as folder:
            return text_sequence(options.text, folder, _given(options.temperature))
    if options.source:
        source = Path(options.source)
        if source.is_dir():
            return sample_of(source, options.step, options.sample, options.temperature)
        if options.step is not None:
            raise ValueError(f"--step is of the folder of a run, and {source} is none: give --sample for a line of it")
        return read_sequence(source, options.sample, options.temperature)
    if scores is not None and scores.prompt_ids:
        return TokenSequence(scores.prompt_ids, scores.token_ids, (), _given(options.temperature), options.scores)
    without = f": {options.scores} has no token ids of the prompt" if scores is not None else ""
    raise ValueError(f"there is no sequence{without}; give a file, the folder of a run, or --text")


def _given(temperature: float | None) -> float:
    return 1.0 if temperature is None else temperature


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep explain",
        description="Run one sequence in two ways and name the first layer, operation, row and element where their "
        "numbers part, with both values and their distance in units in the last place. Exit code: 0 if all is equal, 1 "
        "if something parts, 2 for a mistake, 3 if a way could not be run to its end.",
        epilog="ways: decode, prefill, trainer, transformers, with NAME=VALUE after commas: chunk, prefix, draft, "
        "mates, tp, pp, k_blocks, dtype, attention (of transformers), model (a folder). chunked, prefix-hit, "
        "speculation, no-invariant, fp32 and bf16 are short for settings. docs/guides/explain.md has examples.",
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="JSON with prompt_ids and token_ids; the folder of a run, with --step and --sample; or the folder that a "
        "run has written at a gap, which has the model and the ways too",
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="a causal LM in Hugging Face format, or a checkpoint of a run"
    )
    parser.add_argument("--way", action="append", metavar="WAY", help="twice; default: decode and trainer")
    parser.add_argument("--text", metavar="TEXT", help="in place of SOURCE: a text, scored from its second token on")
    parser.add_argument("--step", type=int, metavar="N", help="step of a run; default: the newest with samples")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="sample of the step, or line of the file, from 0"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="that log-probabilities are of; default: the file's, or 1"
    )
    parser.add_argument(
        "--scores",
        metavar="FILE",
        help="an answer of vLLM or SGLang as JSON: its log-probabilities are compared with the first way's, token by "
        "token",
    )
    parser.add_argument("--choice", type=int, default=0, metavar="N", help="of the answer in --scores, from 0")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="NATS", help="by which reported log-probabilities may differ"
    )
    parser.add_argument("--at-least", type=int, default=1, metavar="ULPS", help="pass over smaller differences")
    parser.add_argument("--all", action="store_true", help="list every operation and token that differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all of it")
    options = parser.parse_args(arguments)
    if options.way is not None and len(options.way) != 2:
        parser.error(f"--way stands twice, not {len(options.way)} times")
    if options.text is not None and options.source:
        parser.error("--text takes the place of SOURCE")
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        parser.error(f"--temperature must be above 0, not {options.temperature}: a greedy draw reports it as 1")
    if not 0 <= options.tolerance < math.inf:
        parser.error(f"--tolerance must be a number from 0 on, not {options.tolerance}")
    if not 1 <= options.at_least < _MOST_ULPS:
        parser.error(f"--at-least must be at least 1 and below 2**62, not {options.at_least}")
    return options
