"""The kernels' tests run Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton") is not None:
        from lockstep.tests.support.triton.interpreter import make_interpreter_fast

        make_interpreter_fast()
