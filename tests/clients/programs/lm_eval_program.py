"""lm-eval's `local-completions` against a server: URL, tokenizer folder, model name. Prompts are scored as by lm-eval's
own run of the model with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ["name", "value", "items", "type", "object", "string", "true", "false"]
CHOICE = """task: toy_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """task: toy_text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/text.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""


def main(url: str, model: str, name: str) -> None:
    """Evaluate two small tasks by the server and by transformers, and compare the figures."""
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        settings = f"model={name},base_url={url}/v1/completions,tokenizer={model},num_concurrent=4"
        served = evaluate(Path(folder), "local-completions", settings)
        own = evaluate(Path(folder), "hf", f"pretrained={model},dtype=float32")
    assert served["toy_choice"] == own["toy_choice"], (served, own)
    ours, theirs = (found["toy_text"]["byte_perplexity,none"] for found in (served, own))
    assert abs(ours - theirs) < 1e-4 * theirs, (ours, theirs)
    accuracy = own["toy_choice"]["acc,none"]
    print(f"lm_eval: accuracy {accuracy:.3f}, byte perplexity {ours:.5f}, by transformers {theirs:.5f}")


def write_tasks(folder: Path) -> None:
    """Write two tasks: choices scored after a question, and texts scored from their first token."""
    choices = [
        {"question": f'"{WORDS[i % 8]}": "{WORDS[(i + 3) % 8]} of the', "choices": [WORDS[i % 8], WORDS[(i + 1) % 8]],
         "gold": i % 2}
        for i in range(12)
    ]  # fmt: skip
    texts = [{"text": " ".join(WORDS[(i + j) % 8] for j in range(20))} for i in range(4)]
    for task, template, rows in (("choice", CHOICE, choices), ("text", TEXT, texts)):
        (folder / f"{task}.yaml").write_text(template.replace("FOLDER", str(folder)))
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluate(folder: Path, kind: str, settings: str) -> dict[str, dict[str, float]]:
    """Return lm-eval's figures by task, without the task's name."""
    command = [
        str(Path(sys.executable).parent / "lm_eval"), "run", "--model", kind, "--model_args", settings,
        "--include_path", str(folder), "--tasks", "toy_choice,toy_text", "--batch_size", "4",
        "--output_path", str(folder / kind), "--device", "cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [found] = (folder / kind).rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    return {
        task: {key: value for key, value in row.items() if key.startswith(("acc", "byte")) and "stderr" not in key}
        for task, row in results.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:4])
