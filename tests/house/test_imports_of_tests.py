"""Check that tests of modules without torch do not import torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
print("heavy:", sorted({"torch", "transformers", "triton", "fastapi"} & sys.modules.keys()))
sys.exit(code)
"""


def test_tests_of_modules_without_torch_import_none():
    files = [f"tests/{module}" for module in ("rollout/kv/test_prefix.py", "integration/grpo/test_rewards.py")]
    done = subprocess.run([sys.executable, "-c", RUN, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
