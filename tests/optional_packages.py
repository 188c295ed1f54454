"""The packages of tests that not every environment has: where one is missing, tests that need it are skipped.

Lockstep's own requirements, and pytest, are everywhere. `make test-minimal` runs the suite where there is nothing else.
Modules that import such a package are named here and are skipped unread. A test that meets a missing one while it runs,
or Lockstep's error that names the extra, is skipped then.
"""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SERVE = ("fastapi", "httpx", "prometheus_client", "uvicorn")  # the extra `serve`
HYPOTHESIS = ("hypothesis",)
JOB = ("matplotlib", "zstandard")  # of the extra `train`: the job asks for both before it starts

EXTRAS = {  # of setup.cfg: the packages whose absence its errors name
    "deepspeed": ("deepspeed",), "events": ("msgpack", "zmq"), "grammar": ("xgrammar",), "images": ("PIL",),
    "lora": ("peft",), "parquet": ("pyarrow",),
    "rewards": ("math_verify", "reasoning_gym"), "serve": SERVE, "train": ("jsonschema", *JOB), "triton": ("triton",),
}  # fmt: skip

# A folder or a module: the packages that its modules import, or that all its tests start programs with.
NEEDS: dict[str, tuple[str, ...]] = {
    "integration/cli/test_ctl.py": SERVE,
    "integration/cli/test_rollouts.py": JOB,
    "integration/cli/test_served_model.py": SERVE,
    "integration/cli/test_tinker.py": (*SERVE, "peft"),
    "integration/grpo/environments/test_adapters.py": ("reasoning_gym",),
    "integration/grpo/rewards/test_packages.py": ("math_verify", "reasoning_gym"),
    "integration/grpo/test_job.py": JOB,
    "integration/grpo/test_probe.py": JOB,
    "integration/grpo/results/test_run_folder.py": JOB,
    "integration/grpo/test_samples.py": JOB,
    "integration/grpo/test_sampling.py": JOB,
    "integration/grpo/tasks/test_parquet.py": ("pyarrow",),
    "integration/grpo/training/test_microbatches.py": HYPOTHESIS,
    "integration/http": SERVE,
    "integration/http/admin/test_lora.py": ("peft",),
    "integration/http/chat/test_chat_calls.py": ("jsonschema", "openai"),
    "integration/http/chat/test_grammar.py": ("jsonschema", "xgrammar"),
    "integration/http/chat/test_messages.py": ("openai",),
    "integration/http/conversations/test_templates.py": ("xgrammar",),
    "integration/http/edge/test_malformed.py": HYPOTHESIS,
    "integration/http/generation/test_grammar.py": ("jsonschema", "xgrammar"),
    "integration/http/images": ("PIL",),
    "integration/http/openai": ("openai",),
    "integration/http/responses": ("openai",),
    "integration/http/vllm/test_generate.py": ("openai",),
    "integration/pages/test_rollouts_page.py": SERVE,
    "integration/push/test_http_target.py": SERVE,
    "integration/push/test_lost_pushers.py": SERVE,
    "integration/push/test_vllm_wire.py": SERVE,
    "integration/router": SERVE,
    "integration/router/test_parts.py": HYPOTHESIS,
    "integration/tinker": (*SERVE, "peft"),
    "integration/tinker/test_wire.py": HYPOTHESIS,
    "integration/trl/test_images.py": ("PIL",),
    "integration/trl/test_trainer.py": ("peft",),
    "integration/verl/test_server.py": SERVE,
    "integration/weights/test_adapter_folders.py": ("peft",),
    "integration/weights/test_adapters.py": ("peft",),
    "integration/weights/test_verify.py": SERVE,
    "integration/replay/test_grammars.py": ("xgrammar",),
    "integration/router/moving/test_replaced_tokens.py": ("xgrammar",),
    "rollout/grammars/test_compiler.py": ("xgrammar",),
    "rollout/grammars/test_corpus.py": ("jsonschema", "xgrammar"),
    "rollout/grammars/test_engine.py": ("jsonschema", "xgrammar"),
    "rollout/grammars/test_limits.py": ("xgrammar",),
    "rollout/grammars/test_looking_ahead.py": ("xgrammar",),
    "rollout/grammars/test_neighbours.py": ("xgrammar",),
    "rollout/kv/test_pins_random.py": HYPOTHESIS,
    "rollout/loop/test_scored_prompts.py": ("peft",),
    "rollout/model/test_adapters.py": ("peft",),
    "rollout/proving/test_layout.py": HYPOTHESIS,
    "rollout/sequences/test_detokenizer.py": HYPOTHESIS,
    "rollout/test_interruption_random.py": HYPOTHESIS,
    "rollout/verify/test_traces.py": HYPOTHESIS,
    "torture/test_torture.py": (*HYPOTHESIS, *SERVE),
    "weight_sync/delta/test_apply.py": HYPOTHESIS,
    "weight_sync/digests/test_model_digest.py": HYPOTHESIS,
    "weight_sync/disk/test_folder.py": HYPOTHESIS,
    "weight_sync/layout/test_bucket.py": HYPOTHESIS,
    "weight_sync/same_host/test_shared_memory.py": HYPOTHESIS,
    "weight_sync/transaction/test_pieces.py": HYPOTHESIS,
    "weight_sync/transaction/test_pieces_in_sessions.py": HYPOTHESIS,
    "weight_sync/transaction/test_sharded_transaction.py": HYPOTHESIS,
    "weight_sync/transaction/test_transaction.py": HYPOTHESIS,
}

# Modules whose tests run Triton's interpreter where there is no GPU.
INTERPRETED = (
    "kernels/attention/test_triton_gradients.py",
    "kernels/attention/test_triton_kernels.py",
    "kernels/attention/test_triton_row_ends.py",
    "kernels/layers/test_triton_rotary.py",
    "kernels/layers/test_triton_swiglu.py",
    "kernels/linear/test_triton_grouped.py",
    "kernels/linear/test_triton_kernels.py",
    "kernels/recurrent/test_triton_kernels.py",
    "kernels/sampling/test_segments.py",
    "kernels/sha256/test_triton_kernels.py",
    "kernels/test_triton_engine.py",
    "kernels/test_triton_images.py",
    "kernels/test_triton_launches.py",
    "kernels/test_triton_rows.py",
)


def why_skipped(path: Path) -> str | None:
    """Return the reason to skip a test module unread, or None."""
    if missing := missing_packages(path):
        return f"not installed: {', '.join(missing)}"
    is_interpreted = path.relative_to(TESTS).as_posix() in INTERPRETED and os.environ["TRITON_INTERPRET"] == "1"
    return why_not_interpreted() if is_interpreted else None


def needs_of(path: Path) -> tuple[str, ...]:
    """Return the packages that NEEDS names for a test module."""
    places = [path, *path.parents]
    return tuple(package for name, packages in NEEDS.items() if TESTS / name in places for package in packages)


def missing_packages(path: Path) -> list[str]:
    """Return which of a test module's packages this environment lacks."""
    return [package for package in needs_of(path) if not _is_there(package)]


def what_was_missing(error: BaseException | None) -> str | None:
    """Return what an error says is not installed, if it or one that it follows from is about an optional package."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name and not _is_there(error.name.partition(".")[0]):
            return f"not installed: {error.name}"
        if (extra := re.search(r"the extra `(\w+)`", str(error))) and not all(map(_is_there, EXTRAS[extra[1]])):
            return f"not installed: the extra {extra[1]}"
        error = error.__cause__ or error.__context__
    return None


@cache
def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def needs_packages(*packages: str) -> None:
    """Skip the calling test where one of the packages is missing, which only a program that it starts would say."""
    for package in packages:
        pytest.importorskip(package)


def needs_transformers(*least: int) -> None:
    """Skip the calling test where transformers is older: its layer has another form there, which nothing replaces."""
    if _numbers(version("transformers")) < least:
        pytest.skip(f"needs transformers {'.'.join(map(str, least))}")


def needs_peft_of_transformers() -> None:
    """Skip the calling test where transformers asks for a newer PEFT than there is."""
    least = pytest.importorskip("transformers.integrations.peft").MIN_PEFT_VERSION
    if _numbers(version("peft")) < _numbers(least):
        pytest.skip(f"transformers {version('transformers')} needs peft {least}")


@cache
def why_not_interpreted() -> str | None:
    """Return the reason why Triton's interpreter does not run here, or None where it does.

    It turns arrays of one element into numbers, which NumPy refuses from 2.4 on; Triton 3.9 does so no more.
    """
    try:
        triton, numpy = (_numbers(version(name)) for name in ("triton", "numpy"))
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    if numpy >= (2, 4) and triton < (3, 9):
        return f"the interpreter of Triton {triton[0]}.{triton[1]} needs numpy below 2.4"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def needs_triton() -> None:
    """Skip the calling test where Triton's kernels run neither on a GPU nor in its interpreter."""
    pytest.importorskip("triton")
    reason = why_not_interpreted() if os.environ["TRITON_INTERPRET"] == "1" else None
    if reason is not None:
        pytest.skip(reason)
