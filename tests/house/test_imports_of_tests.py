"""Check that tests of modules without torch do not import torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]])
print("heavy:", sorted({"torch", "transformers", "triton", "fastapi"} & sys.modules.keys()))
sys.exit(code)
"""


@pytest.mark.parametrize("module", ["rollout/kv/test_prefix.py", "integration/grpo/test_rewards.py"])
def test_a_test_of_a_module_without_torch_imports_none(module):
    done = subprocess.run([sys.executable, "-c", RUN, f"tests/{module}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
