"""Tests of the sweep over the families of transformers, and of its page: no hosted family differs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import transformers

from lockstep.tests.families import sweep
from lockstep.tests.families.compare import Differs

# A type of each verdict and of each way to be hosted: its own rotary, MLA, experts, short convolutions, products by
# matmul, text of a composite class; a reason of each kind.
SAMPLE = [("text", "gpt2"), ("text", "phi3"), ("text", "deepseek_v3"), ("text", "lfm2"), ("text", "roberta"),
          ("text", "bloom"), ("text", "xglm"), ("text", "phimoe"), ("text", "mamba"), ("vision", "llava"),
          ("images", "smolvlm"), ("images", "glm4v"), ("images", "mistral3")]  # fmt: skip
PAGE = sweep.PAGE.read_text(encoding="utf-8")
TORCH = re.search(r" and torch ([0-9.]+[0-9])", PAGE)[1]
same_transformers = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE, reason="the page was measured with other transformers"
)


@same_transformers
def test_page_has_every_type_and_none_that_is_hosted_and_differs():
    rows = sweep.rows_of(PAGE)
    assert set(rows) == {(kind, one) for kind, types in sweep.TYPES.items() for one in types}
    assert {row.verdict for row in rows.values()} == {"equal", "refused", "not built"}
    assert [row for row in rows.values() if row.verdict != "equal" and not row.text] == []
    assert sweep.page_of(rows.values()) == PAGE.replace(f"torch {TORCH}", f"torch {torch.__version__.split('+')[0]}")


def test_readme_has_the_counts_of_the_page():
    rows = sweep.rows_of(PAGE).values()
    of_kind = {kind: [row.verdict for row in rows if row.kind == kind] for kind in sweep.TYPES}
    text, vision, _ = (f"{verdicts.count('equal')} of {len(verdicts)}" for verdicts in of_kind.values())
    readme = " ".join((sweep.PAGE.parents[2] / "README.md").read_text(encoding="utf-8").split())
    assert f"{text} types of causal language models and {vision} vision-language classes" in readme
    assert f"{of_kind['images'].count('equal')} of them with images" in readme


@pytest.mark.slow
@same_transformers
@pytest.mark.parametrize(("kind", "model_type"), SAMPLE)
def test_row_of_a_type_is_that_of_the_page(kind, model_type, restore_threads):
    torch.set_num_threads(1)
    found, expected = sweep.measure(kind, model_type), sweep.rows_of(PAGE)[kind, model_type]
    assert found.is_as(expected), f"{found.line()}, but the page has {expected.line()}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_all_types_are_as_the_page_says():
    command = [sys.executable, "-m", "lockstep.tests.families.sweep", "--check"]
    subprocess.run(command, check=True, timeout=3600)


def _killed(*_: object) -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _hanging(*_: object) -> list[str]:
    signal.pause()
    raise AssertionError


def _at(part: str, error: Exception):
    def compare(kind: str, model_type: str, progress: sweep.Progress) -> list[str]:
        progress.part = part
        raise error

    return compare


@pytest.mark.parametrize(
    ("compare", "limit_s", "expected"),
    [
        (_killed, 60.0, ("differs", "its process ended (SIGKILL)")),
        (_hanging, 0.1, ("differs", "not done in 0.1 s")),
        (_at("build torch.float32", TypeError("no size")), 60.0, ("not built", "TypeError: no size")),
        (_at("host torch.bfloat16", ValueError("X cannot be hosted: odd")), 60.0, ("refused", "odd (bfloat16)")),
        (_at("host torch.float32", IndexError("5")), 60.0, ("differs", "IndexError while it was to host: 5")),
        (_at("compare torch.float32", Differs("gap 1")), 60.0, ("differs", "gap 1")),
        (lambda *_: ["a remark"], 60.0, ("equal", "a remark")),
    ],
)
def test_any_end_of_a_type_is_a_row(compare, limit_s, expected):
    row = sweep.measure("text", "qwen3", limit_s, compare)
    assert (row.verdict, row.text) == expected
