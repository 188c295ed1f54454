"""The README tells the truth about settings and code."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from lockstep.integration.grpo.config import JobConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def settings(cls: type = JobConfig, prefix: str = "") -> dict[str, object]:
    """Every key of a config with its default."""
    found: dict[str, object] = {}
    types = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(types[field.name]):
            found.update(settings(types[field.name], f"{prefix}{field.name}."))
        else:
            found[f"{prefix}{field.name}"] = field.default
    return found


def test_every_setting_is_listed_with_its_default_and_no_other_is():
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `?([^|`]*?)`? \|", README, re.MULTILINE))
    expected = {key: "required" if value is MISSING else str(value) for key, value in settings().items()}
    listed = {key: value for key, value in rows.items() if key in expected or "." in key}
    assert listed == {key: value.lower() if value in ("True", "False") else value for key, value in expected.items()}


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_compile_and_name_things_that_exist(block):
    compile(block, "README.md", "exec")
    for module, names in re.findall(r"^from (lockstep[\w.]+) import (.+)$", block, re.MULTILINE):
        imported = __import__(module, fromlist=["_"])
        assert all(hasattr(imported, name.strip()) for name in names.split(","))


def test_no_placeholder_is_left():
    assert not re.findall(r"@[A-Z_]+@", README)
