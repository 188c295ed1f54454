"""Write the table of families: each model type of transformers, built tiny, hosted and compared, or refused and why.

    python -m lockstep.tests.families.sweep                       # all types: write docs/reference/families.md
    python -m lockstep.tests.families.sweep --check               # exit with 1 where the page says something else
    python -m lockstep.tests.families.sweep --types qwen3 gpt2    # these only: write their rows anew

Each type has a process of its own, with a limit of time and memory: a crash is a row and not the end. The exit code is
1 where a hosted type differs.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from lockstep.tests.families.compare import Differs, Progress
from lockstep.tests.families.compare import compare as compare_text
from lockstep.tests.families.images import compare_images

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "families.md"
MAX_BYTES = 24 << 30  # of a process's addresses
LIMIT_S = 300.0  # a class of images of several towers takes two minutes beside other work
VERDICTS = ("equal", "refused", "not built", "differs")
TYPES: dict[str, list[str]] = {
    "text": sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "vision": sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "images": sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}
TITLES = {
    "text": "Causal language models",
    "vision": "Vision-language classes on text",
    "images": "Vision-language classes with images",
}
Compare = Callable[[str, str, Progress], list[str]]
_FORK = multiprocessing.get_context("fork")
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str  # of TYPES
    model_type: str
    verdict: str  # of VERDICTS
    text: str  # remarks, or the reason

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.model_type

    def is_as(self, other: Row) -> bool:
        """Return whether another row says the same, but for numbers, which rounding changes from machine to machine."""
        return _NUMBER.sub("#", self.line()) == _NUMBER.sub("#", other.line())

    def line(self) -> str:
        """Return the line of a Markdown table."""
        return f"| `{self.model_type}` | {self.verdict} | {self.text} |"


def measure(kind: str, model_type: str, limit_s: float = LIMIT_S, compare: Compare | None = None) -> Row:
    """Compare one type in a forked process of its own, as its kind says if no other comparison is given."""
    compare = compare or (compare_images if kind == "images" else compare_text)
    mine, its = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_answer, args=(its, kind, model_type, compare), daemon=True)
    process.start()
    its.close()
    try:
        row = mine.recv() if mine.poll(limit_s) else Row(kind, model_type, "differs", f"not done in {limit_s:g} s")
    except EOFError:
        process.join()
        name = signal.Signals(-process.exitcode).name if (process.exitcode or 0) < 0 else process.exitcode
        row = Row(kind, model_type, "differs", f"its process ended ({name})")
    finally:
        process.kill()
        process.join()
        mine.close()
    return row


def _answer(pipe: Connection, kind: str, model_type: str, compare: Compare) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    progress = Progress()
    try:
        row = Row(kind, model_type, "equal", "; ".join(compare(kind, model_type, progress)))
    except Exception as error:  # noqa: BLE001 - the boundary of a process: any error is a row
        logging.getLogger(__name__).info("%s", traceback.format_exc())
        row = _failed(kind, model_type, progress.part, error)
    pipe.send(row)


def _failed(kind: str, model_type: str, part: str, error: Exception) -> Row:
    step, _, dtype = part.partition(" ")
    where = "" if dtype == "torch.float32" else f" ({dtype.removeprefix('torch.')})"
    text = " ".join(str(error).split()).replace("|", "/")
    if step == "host" and isinstance(error, ValueError):
        return Row(kind, model_type, "refused", re.sub(r"^\w+ cannot be hosted: ", "", text) + where)
    if step == "build":
        return Row(kind, model_type, "not built", f"{type(error).__name__}: {text.partition('. ')[0][:200]}{where}")
    name = "" if isinstance(error, Differs) else f"{type(error).__name__} while it was to {step}: "
    return Row(kind, model_type, "differs", f"{name}{text[:300]}{where}")


def page_of(rows: Iterable[Row]) -> str:
    """Write the page."""
    rows = list(rows)
    counts = Counter((row.kind, row.verdict) for row in rows)
    parts = [
        "<!-- Written by tests/families/sweep.py. `make families` measures again. -->",
        "# Families",
        f"Measured with transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]} on a CPU. "
        "Every model type that transformers knows as a causal language model or as a class of images and text was "
        "built as a tiny random model, hosted by an engine, and compared in float32 and bfloat16:",
        "\n".join((
            "- greedy tokens are those of the module's own forward and of transformers' `generate` (float32), "
            "log-probabilities within 1e-3, and the same bits with cached prompts;",
            "- the log-probabilities of sampled tokens are the trainer's, bit for bit: one sequence alone, a padded "
            "batch, a packed row;",
            "- a prompt is prefilled in chunks, beside others.",
        )),
        "With images, random pixels in the form that the type's processor gives, log-probabilities are compared with "
        "the module's own forward (float32, within 1e-3) and with the trainer's, bit for bit: one prompt alone, and a "
        "padded batch whose images are encoded together.",
        "*equal*: all of this holds. *refused*: the engine is not made; the reason is its message. *not built*: no "
        "tiny model of the type could be made, so nothing is known here, and the check that every engine makes at its "
        "start decides. *differs*: a hosted model computes something else.",
        "\n".join((
            "| verdict | causal language models | vision-language classes | with images |",
            "|---|---|---|---|",
            *(f"| {verdict} | {' | '.join(str(counts[kind, verdict]) for kind in TITLES)} |" for verdict in VERDICTS),
        )),
    ]  # fmt: skip
    for kind, title in TITLES.items():
        lines = [row.line() for row in rows if row.kind == kind]
        parts += [f"## {title}", "\n".join(("| type | verdict | reason or remark |", "|---|---|---|", *lines))]
    return "\n\n".join(parts) + "\n"


def rows_of(page: str) -> dict[tuple[str, str], Row]:
    """Return the rows of a page by kind and type."""
    found = {}
    for kind, title in TITLES.items():
        table = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        for match in re.finditer(r"^\| `([^`]+)` \| ([a-z ]+) \| (.*) \|$", table, re.MULTILINE):
            found[kind, match[1]] = Row(kind, *match.groups())
    return found


def prepare() -> None:
    """Make this process one that others are forked from: one thread, and quiet libraries."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def sweep(types: Sequence[tuple[str, str]], limit_s: float) -> Iterator[Row]:
    """Compare types one after the other."""
    for index, (kind, model_type) in enumerate(types):
        row = measure(kind, model_type, limit_s)
        print(f"{index + 1}/{len(types)} {row.kind} {row.line()}", file=sys.stderr, flush=True)
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make families", description="Measure the families of transformers.")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="these only")
    parser.add_argument("--kinds", nargs="+", choices=tuple(TYPES), default=tuple(TYPES), help="these only")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"for one type; default {LIMIT_S:g}")
    parser.add_argument("--verbose", action="store_true", help="show where an error came from")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.ERROR)
    os.environ["HF_HUB_OFFLINE"] = "1"
    prepare()
    types = [(kind, one) for kind in options.kinds for one in TYPES[kind]]
    if options.types:
        if unknown := set(options.types) - {one for _, one in types}:
            parser.error(f"transformers {transformers.__version__} has no {', '.join(sorted(unknown))}")
        types = [pair for pair in types if pair[1] in options.types]
    rows = list(sweep(types, options.limit_s))
    before = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    changed = [row for row in rows if row.key not in before or not row.is_as(before[row.key])]
    for row in changed:
        print(f"{row.kind} {row.line()}\n  the page has: {before[row.key].line() if row.key in before else 'nothing'}")
    if not options.check:
        kept = before if options.types or set(options.kinds) != set(TYPES) else {}
        of_all = kept | {row.key: row for row in rows}
        PAGE.write_text(page_of(of_all[key] for key in sorted(of_all)), encoding="utf-8")
    return 1 if any(row.verdict == "differs" for row in rows) or (options.check and changed) else 0


if __name__ == "__main__":
    sys.exit(main())
