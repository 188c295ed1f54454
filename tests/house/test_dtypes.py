"""Every tensor of floats is made with its dtype: torch's default is one of the whole process, and others change it.

transformers does while it loads a model, in whatever thread, and kernels write through addresses.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye"}


@pytest.mark.parametrize("room", ["kernels", "rollout", "weight_sync"])
def test_tensors_are_made_with_a_dtype(room: str) -> None:
    without = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            if not any(keyword.arg in ("dtype", None) for keyword in node.keywords):  # None: **options
                without.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert without == []
