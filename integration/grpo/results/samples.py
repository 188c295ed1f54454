"""Samples of a run on disk: for each step one file of lines of JSON, compressed with zstandard.

`rollouts/step-000040.jsonl.zst` has a line for each sample of the step, prompt by prompt: everything that says what was
sampled, from which weights, and what it was given. Each prompt's samples are a frame of their own: the rank that has
them compresses it, and the first one writes them one after another. Images of prompts lie in a file beside it
(`sample_images`). The files are a view of the run: one that cannot be written is reported once, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .sample_images import images_bytes, images_path

if TYPE_CHECKING:
    from ....rollout.completion import Completion
    from ....rollout.media.images import Images
    from ..environments.episode import Episode
    from ..rewards.score import Score
    from ..tasks.problems import Problem

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
TOKENIZER = "tokenizer"  # in that folder
_SUFFIX = ".jsonl.zst"
_NAME = re.compile(rf"step-(\d+){re.escape(_SUFFIX)}")
_LEVEL = 3
_CHUNK = 1 << 20  # bytes that are decompressed at a time: what follows a frame in them is copied


def sample_row(
    problem: Problem, completion: Completion, score: Score, advantage: float, episode: Episode | None = None,
    images: Sequence[Images] = (), temperature: float | None = None,
) -> dict[str, object]:  # fmt: skip
    """Return what is kept of one sample. episode: that it is, where it has several turns; images: of its prompts;
    temperature: of its log-probabilities, None: it is left out."""
    reason = completion.finish_reason
    receipts: tuple[object, ...] = () if completion.receipt is None else (completion.receipt,)
    if episode is not None:
        receipts = episode.all_receipts
    return {
        "source": problem.source,
        **({"source_name": problem.source_name} if problem.source_name else {}),
        "prompt": problem.prompt,
        "answer": problem.answer,
        "sample": completion.index,
        "text": completion.text,
        "reward": score.total,
        **({"components": dict(score.components)} if score.components else {}),
        **({"is_success": score.is_success} if score.is_success is not None else {}),
        "advantage": advantage,
        "finish_reason": None if reason is None else reason.type,
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        **({"temperature": temperature} if temperature is not None else {}),
        **({"forced": completion.forced} if completion.forced is not None else {}),
        "weight_versions": [(span.version, span.start, span.end) for span in completion.weight_versions],
        **(episode.kept() if episode is not None else {}),
        **({"images": [one.digest for one in images]} if images else {}),
        **({"receipts": receipts} if receipts else {}),
    }


def shown(row: Mapping[str, Any]) -> str:
    """Return a sample of a file as text for a terminal, in which no character of the model's can control it."""
    given = f"reward {row['reward']:g}"
    if components := row.get("components"):
        given += f" ({', '.join(f'{name} {value:g}' for name, value in components.items())})"
    end = "" if row["finish_reason"] in (None, "stop") else f", ended by {row['finish_reason']}"
    head = f"--- {row['source'] or 'sample'} #{row['sample']}: {given}, {len(row['token_ids'])} tokens{end}"
    return "\n".join(map(printable, (head, row["prompt"], ">>> " + row["text"])))


def printable(text: str) -> str:
    """Return a text with every character written out that is neither printable nor the end of a line."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text
    )


_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("prompt", "text"), ((str,), "text")),
    **dict.fromkeys(("prompt_ids", "token_ids", "logprobs"), ((list,), "list")),
    **dict.fromkeys(("reward", "sample"), ((int, float), "number")),
    "finish_reason": ((str, type(None)), "text or null"),
}


def packed(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Return the samples of a group as a part of a file."""
    import zstandard  # of the extra `train`

    data = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")  # json escapes the rest
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


class UnreadableSamples(ValueError):
    """A file of samples is damaged, or cannot be read."""


class SampleFiles:
    """Writer of the samples of a run. One rank has it."""

    def __init__(self, folder: Path, num_kept: int, first_step: int) -> None:
        """Remove the samples of later steps. folder: of the run; num_kept: number of newest files that stay; 0: all;
        first_step: number of steps that the run has done."""
        self._folder, self._num_kept, self._has_failed = folder / FOLDER, num_kept, False
        for step in saved_steps(folder):
            if step > first_step:
                _remove(folder, step)

    def write_tokenizer(self, save: Callable[[Path], object]) -> None:
        """Write the model's tokenizer beside the samples, so that the text of each token can be shown later. save:
        writes it into a folder."""
        path = self._folder / TOKENIZER
        try:
            path.mkdir(parents=True, exist_ok=True)
            save(path)
        except OSError as error:
            logger.error("%s is not written, the run goes on: %s", path, error)

    def write(self, step: int, groups: Iterable[bytes], images: Mapping[str, Images] | None = None) -> None:
        """Write the `packed` samples of a step, counted from 1, and remove the oldest beyond the number that is kept.
        images: of their prompts, by their SHA-256."""
        if self._has_failed:
            return
        path = sample_path(self._folder.parent, step)
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(exist_ok=True)
            if images:
                partial.write_bytes(images_bytes(images))
                os.replace(partial, images_path(path))
            with open(partial, "wb") as file:
                file.writelines(groups)
            os.replace(partial, path)
            if self._num_kept:
                for old in saved_steps(self._folder.parent)[: -self._num_kept]:
                    _remove(self._folder.parent, old)
        except OSError as error:
            self._has_failed = True
            with suppress(OSError):  # the folder may be what is wrong
                partial.unlink()
            logger.error("samples end before %s, the run goes on: %s", path, error)


def _remove(folder: Path, step: int) -> None:
    path = sample_path(folder, step)
    images_path(path).unlink(missing_ok=True)
    path.unlink()


def saved_steps(folder: Path) -> list[int]:
    """Return the steps, counted from 1, whose samples a run's folder holds, in order. Raises PermissionError for a
    folder that may not be read."""
    try:
        names = os.listdir(folder / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def sample_path(folder: Path, step: int) -> Path:
    """Return the path of the samples of a step."""
    return folder / FOLDER / f"step-{step:06d}{_SUFFIX}"


def read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """Read the samples of a step. Raises UnreadableSamples naming the file, and another ValueError where there is none,
    naming the steps that are there."""
    try:
        import zstandard  # of the extra `train`
    except ModuleNotFoundError as error:
        raise ValueError("samples need zstandard, the extra `train`: pip install -e '.[train]'") from error

    path = sample_path(folder, step)
    try:
        rows = [json.loads(line) for line in _unpacked(path.read_bytes()).decode("ascii").splitlines()]
        for number, row in enumerate(rows, 1):
            if wrong := _wrong_fields(row):
                raise ValueError(f"line {number} is no sample: {', '.join(wrong)}")
        return rows
    except FileNotFoundError:
        steps = saved_steps(folder)
        there = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none of any step"
        raise ValueError(f"{folder} has no samples of step {step}: {there}") from None
    except (OSError, ValueError, RecursionError, zstandard.ZstdError) as error:
        raise UnreadableSamples(f"{path} cannot be read: {error}") from error


def _unpacked(data: bytes) -> bytes:
    """Decompress frames one after another. Raises ValueError where the last one is cut off, or there is none."""
    import zstandard

    parts, reader = [], None
    for at in range(0, len(data), _CHUNK):
        left = data[at : at + _CHUNK]
        while left:
            reader = reader or zstandard.ZstdDecompressor().decompressobj()
            parts.append(reader.decompress(left))
            left = reader.unused_data if reader.eof else b""
            reader = None if reader.eof else reader
    if reader is not None or not parts:
        raise ValueError("it is cut off")
    return b"".join(parts)


def _wrong_fields(row: object) -> list[str]:
    """Name the fields that every sample has, and which this one lacks or has of another kind."""
    if not isinstance(row, dict):
        return ["it is no object"]
    return [f"{name} is no {kind}" for name, (types, kind) in _FIELDS.items() if not isinstance(row.get(name), types)]
