"""Sentences of a given length about a given subject: rows for the job, and the reward that verifies them.

    python examples/smollm2/sentences.py data/smollm2

writes train.jsonl and heldout.jsonl there. No subject is in both.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BANDS = ((8, 12), (10, 14), (12, 16), (14, 18))  # least and largest number of words
SUBJECTS = """
airport apple autumn baker beach bicycle boat bridge bus cafe camera candle canyon castle cat cave church city
clock cloud coffee concert cow desert dog door dream engine factory family farm farmer festival field fire
flower forest friend garden guitar harbour holiday horse hospital hotel house island jungle kitchen lake lamp
library lighthouse market meadow mirror moon morning mountain museum neighbour night ocean office orchard
painting park piano picnic planet pond rabbit rain rainbow restaurant river road rocket sailor school sea shop
singer sky snow spring star station storm street summer sunset teacher theatre tower toy train tree valley
village volcano waterfall window winter writer
""".split()  # noqa: SIM905 - a list would take a line for each
TEMPLATES = (
    "Describe a {subject} in one sentence. Use between {least} and {largest} words.",
    "In one sentence of {least} to {largest} words, describe a {subject}.",
)
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_ONE_SENTENCE = re.compile(r"[^.!?\n]+[.!?]")


def one_sentence(row: Mapping[str, Any], completion: str) -> dict[str, float]:
    """Reward one sentence about the row's subject with as many words as the row asks for.

    The reward is `in_band`: 1 for a number of words within the band, less by 1/8 for each word beyond it; 0 for what
    is not one sentence, or does not name the subject. It is a success where it is 1.
    """
    text = completion.strip()
    num_words = len(_WORD.findall(text))
    beyond = max(row["least"] - num_words, num_words - row["largest"], 0)
    is_one = _ONE_SENTENCE.fullmatch(text) is not None and row["subject"] in text.lower()
    in_band = max(1.0 - beyond / 8, 0.0) if is_one else 0.0
    return {"in_band": in_band, "success": float(in_band == 1.0)}


def rows(subjects: list[str], seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each subject, band and template, in random order."""
    every = [(subject, band, text) for subject in subjects for band in BANDS for text in TEMPLATES]
    random.Random(seed).shuffle(every)
    for subject, (least, largest), text in every:
        question = text.format(subject=subject, least=least, largest=largest)
        yield {
            "prompt": [{"role": "user", "content": question}],
            "subject": subject, "least": least, "largest": largest,
        }  # fmt: skip


def write(folder: Path) -> None:
    """Write the rows for training and those that are held out, of one subject in three."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, subjects in {
        "train.jsonl": [s for at, s in enumerate(SUBJECTS) if at % 3],
        "heldout.jsonl": list(SUBJECTS[::3]),
    }.items():
        lines = [json.dumps(row) + "\n" for row in rows(subjects, seed=0)]
        (folder / name).write_text("".join(lines), encoding="utf-8")
        print(f"{folder / name}: {len(lines)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files go")
    write(parser.parse_args().folder)
