"""`lockstep replay`: prove samples by their receipts."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...rollout.config import EngineConfig
from ..grpo.results.sample_images import images_path, read_images
from ..grpo.results.samples import UnreadableSamples, read_samples, sample_path, saved_steps
from ..grpo.results.weights_kept import RUN_ENGINE, read_run_engine
from .arguments.parser import PACKAGE, CommandParser
from .arguments.settings import named, read_settings

Receipts = list[dict[str, Any]]
# Settings of the engine that change the bits of the receipts' samples: name of the guarantee's value.
_FROM_GUARANTEE = {"dtype": "dtype", "k_blocks": "k_blocks"}
_LEAST_TOKENS = 1024  # of a pool
_MOST_OF_A_BLOCK = 4096  # tokens: a receipt decides for no larger one


def run(arguments: Sequence[str]) -> int:
    """Prove the samples, and print what was found. Returns the exit code."""
    options = _parse(arguments)
    from ..replay.beside import others_beside
    from ..replay.reading import completed, read_lines  # heavy imports come after the parser

    source = Path(options.source)
    if options.step is not None and not source.is_dir():
        raise ValueError(f"--step is of the folder of a run, and {source} is none")
    given = _of_run(source, options) if source.is_dir() else _Given(read_lines(source))
    receipts = given.receipts
    if options.samples:
        receipts = completed(receipts, read_lines(options.samples))
    if not receipts:
        raise ValueError(f"{source} holds no receipts: ask for them with return_receipt, or EngineConfig.receipts")
    weights = options.weights or given.weights
    if not weights:
        raise ValueError("--weights is needed: a model folder, the folder of a run, or a folder of checkpoints")
    settings = {
        **({} if given.max_model_len is None else {"max_model_len": given.max_model_len}),
        **read_settings("--engine", options.engine),
    }
    images = [*given.images, *map(Path, options.images)]
    report = _proven(receipts, weights, options.model or given.model, settings, images, options)
    report = report.with_samples(others_beside(given.values))
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        print("\n".join(report.lines()))
    return report.exit_code


@dataclass(frozen=True)
class _Given:
    """The content of the source of a replay."""

    values: Sequence[Any]  # JSON, with receipts anywhere
    weights: tuple[str, ...] = ()  # folders
    model: str | None = None  # the folder that they began with
    images: tuple[Path, ...] = ()  # files
    max_model_len: int | None = None  # of its engines, where a run says it

    @property
    def receipts(self) -> Receipts:
        from ..replay.reading import receipts_in

        return receipts_in(self.values)


def _of_run(folder: Path, options: argparse.Namespace) -> _Given:
    """Return the samples of a step of a run, where its weights are, the model that it began with, and the file of its
    images."""
    steps, step = saved_steps(folder), options.step
    if not steps:
        raise ValueError(f"{folder} has no samples: give a file of receipts, or the folder of a run such as runs/NAME")
    if step is None:
        step = _newest_with_weights(folder, steps, options.weights or [folder])
        print(f"{folder}: step {step}" + (", the newest whose weights it has" * (step != steps[-1])), file=sys.stderr)
    rows = read_samples(folder, step)
    engine = read_run_engine(folder) if (folder / RUN_ENGINE).is_file() else {}
    base, settings = engine.get("model"), engine.get("engine")
    length = settings.get("max_model_len") if isinstance(settings, Mapping) else None
    images = images_path(sample_path(folder, step))
    return _Given(
        rows, (str(folder),), None if base is None else str(base), (images,) * images.is_file(),
        length if type(length) is int else None,
    )  # fmt: skip


def _newest_with_weights(folder: Path, steps: Sequence[int], weights: Sequence[str | Path]) -> int:
    """Return the newest of a run's steps that was drawn from weights which the indexes of these folders name; the
    newest of all where they have those of none. Files of samples that cannot be read are named and passed over;
    raises UnreadableSamples where none can be."""
    from ...rollout.proving.fields import wrong_fields
    from ..replay.digest_index import read_index
    from ..replay.reading import receipts_in

    kept = {one.digest for root in map(Path, weights) for one in read_index(root) if (root / one.folder).is_dir()}
    readable: list[int] = []
    for step in reversed(steps):
        try:
            rows = read_samples(folder, step)
        except UnreadableSamples as error:
            if step == steps[0] and not readable:
                raise
            print(f"passed over: {error}", file=sys.stderr)
            continue
        readable.append(step)
        sound = [receipt for receipt in receipts_in(rows) if not wrong_fields(receipt)]
        if sound and all(kept.issuperset(_digests(receipt)) for receipt in sound):
            return step
    return readable[0]


def _proven(
    receipts: Receipts, weights: Sequence[str], model: str | None, settings: Mapping[str, Any],
    images: Sequence[Path], options: argparse.Namespace,
) -> Any:  # fmt: skip
    """Load the model and prove the receipts with the weights of their digests; returns the report. images: files."""
    prompts = [tensors for path in images for tensors in read_images(path)]
    from ...rollout.engine import Engine  # heavy imports come after the checks
    from ...rollout.model.loading import read_config
    from ...rollout.model.supported import context_length
    from ...rollout.proving.fields import wrong_fields
    from ..replay.folders import FolderWeights, model_folder
    from ..service import RolloutService

    folder = model or model_folder(weights)
    if folder is None:
        raise ValueError(f"no folder of a model (with config.json) at {', '.join(weights)}: give one with --model")
    sound = [receipt for receipt in receipts if not wrong_fields(receipt)]  # the others have no proof, but a verdict
    given = {"max_num_seqs": 4, "speculation": "off", **_settings_of(sound), **settings}
    if "kv_cache" not in given:
        asked = given["max_model_len"] if type(given.get("max_model_len")) is int else None
        context = context_length(read_config(Path(folder)).get_text_config(decoder=True), asked)
        size = given.get("block_size", EngineConfig.block_size)
        given["kv_cache"] = f"{num_blocks(receipts, context, size)} blocks"
    logging.getLogger(PACKAGE).setLevel(logging.WARNING)
    config = named("--engine", lambda: EngineConfig.from_dict(given))
    try:
        service = RolloutService(Engine(folder, config))
    except OSError as error:  # transformers raises it for a folder that lacks a file
        raise ValueError(f"--model {folder}: {error}") from error
    wanted = {str(digest) for receipt in sound for digest in _digests(receipt) if digest}
    bar = tqdm(total=len(receipts), unit="sample", dynamic_ncols=True, file=sys.stderr, disable=options.quiet)
    try:
        with bar:
            found = FolderWeights(
                service, weights, wanted, lambda path: bar.set_postfix_str(f"digest of {path.name}"),
                origin=Path(folder),
            )  # fmt: skip
            return service.replay(
                receipts, weights=found, prompts=prompts, anyway=options.anyway, on_progress=bar.update
            )
    finally:
        service.close()


def num_blocks(receipts: Receipts, context: int, block_size: object) -> int:
    """Return the size of a pool in which the longest sample has room beside others. context: in tokens, the most that a
    sample of this model has, whatever its receipt says."""
    longest = 0
    for receipt in receipts:
        lists = [receipt.get(name) for name in ("prompt", "output")]
        nums = [one.get("num") if isinstance(one, dict) else len(one) if isinstance(one, list) else 0 for one in lists]
        longest = max(longest, sum(num for num in nums if type(num) is int and num > 0))
    size = block_size if type(block_size) is int and block_size > 0 else EngineConfig.block_size  # refused later
    return max(-(-_LEAST_TOKENS // size), -(-min(longest, context) // size) + 4)


def _settings_of(receipts: Receipts) -> dict[str, Any]:
    """Return the engine's settings that the receipts name, but for receipts whose settings no engine can have. Raises
    ValueError where they name several."""
    found: dict[str, set[Any]] = {}
    for receipt in receipts:
        settings = _settings_in(receipt)
        try:
            EngineConfig.from_dict(settings)
        except ValueError:
            continue
        if settings.get("block_size", 0) <= _MOST_OF_A_BLOCK:
            for name, value in settings.items():
                found.setdefault(name, set()).add(value)
    if several := {name: sorted(values, key=str) for name, values in found.items() if len(values) > 1}:
        named_values = "; ".join(f"{name} {' and '.join(map(str, values))}" for name, values in several.items())
        raise ValueError(f"the receipts are of several engines ({named_values}): prove those of each alone")
    return {name: next(iter(values)) for name, values in found.items()}


def _settings_in(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's settings that a receipt names."""
    from ...rollout.receipt import GRAMMAR_SETTINGS  # heavy imports come after the parser

    guarantee, grammar = receipt["guarantee"], receipt.get("grammar") or {}
    found = {setting: guarantee[name] for setting, name in _FROM_GUARANTEE.items() if name in guarantee}
    return found | {name: grammar[name] for name in GRAMMAR_SETTINGS if name in grammar}


def _digests(receipt: Mapping[str, Any]) -> list[Any]:
    return [run["digest"] for span in receipt["spans"] for run in (span, *span["kept_kv"])]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep replay",
        description="Prove samples by their receipts: every token is drawn again in large prefills, with the weights "
        "of the receipt's digests, and tokens and log-probabilities are compared bit by bit. Exit code 0: all are "
        "equal; 1: some differ; 3: some could not be proven, and it is said why.",
    )
    parser.add_argument(
        "source", metavar="SOURCE",
        help="a file of receipts (lines of JSON in which they stand anywhere), or the folder of a run of the job",
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="of a run; default: the newest whose weights it has")
    parser.add_argument(
        "--weights", nargs="+", metavar="FOLDER",
        help="model folders, runs or folders of checkpoints, whose weights are found by digest; default: the run",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="FOLDER",
        help="the folder that the model is loaded from first, where those of the weights have no config.json",
    )  # fmt: skip
    parser.add_argument(
        "--samples", metavar="FILE",
        help="JSON with prompt_ids, token_ids and logprobs of samples whose receipts have digests in their place",
    )  # fmt: skip
    parser.add_argument(
        "--images", nargs="+", default=[], metavar="FILE",
        help="safetensors files with the images of prompts, as a run has them beside its samples; default: the run's",
    )  # fmt: skip
    parser.add_argument("--anyway", action="store_true", help="prove also where the guarantee is another one here")
    parser.add_argument("--engine", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
                        help="engine settings, or one JSON object of them")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object with a verdict on each sample")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if options.step is not None and options.step < 1:
        parser.error(f"--step must be at least 1, not {options.step}")
    return options
