"""A script that trains with TRL's GRPOTrainer and its own generation, for the Python of an environment that has TRL.

Started with one argument, a JSON object: model (a folder), rows (a JSONL file with `prompt`), dtype, threads, prompts,
group, microbatch (samples), new_tokens, learning_rate, max_grad_norm, beta1, beta2, weight_decay, num_steps. It answers
{"ready": version} once the trainer stands, then for every line of its standard input one optimizer step, generation
included: {"seconds": s, "num_tokens": n}. It ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    # TRL prints to standard output: the answers use another descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # TRL must not import the files in this folder, whatever their names.
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(settings["threads"])
    num_tokens = [0]

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        num_tokens[0] += sum(map(len, completion_ids))
        return [score(text) for text in completions]

    class Turns(TrainerCallback):
        """A callback that waits for a line before each step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            """Say that the trainer stands."""
            print(json.dumps({"ready": trl.__version__}), file=answers)
            self.wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            """Answer with the step's figures."""
            found = {"seconds": time.perf_counter() - self.began, "num_tokens": num_tokens[0]}
            print(json.dumps(found), file=answers)
            num_tokens[0] = 0
            self.wait(control)

        def wait(self, control: Any) -> None:
            """Wait for the next line, or end the training."""
            if not sys.stdin.readline():
                control.should_training_stop = True
            self.began = time.perf_counter()

    with open(settings["rows"], encoding="utf-8") as file:
        rows = Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in file])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            args=arguments(trl, folder, settings),
            reward_funcs=reward,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[Turns()],
        )
        trainer.train()


def arguments(trl: Any, folder: str, settings: dict[str, Any]) -> Any:
    """Return the settings that stand for those of the other side."""
    return trl.GRPOConfig(
        output_dir=folder,
        max_steps=settings["num_steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=settings["max_grad_norm"],
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        weight_decay=settings["weight_decay"],
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=settings["prompts"] * settings["group"] // settings["microbatch"],
        num_generations=settings["group"],
        max_completion_length=settings["new_tokens"],
        temperature=1.0,
        beta=0.0,  # no reference model
        num_iterations=1,
        gradient_checkpointing=False,
        bf16=False,  # the dtype is that of the weights
        use_cpu=not _has_gpu(),
        disable_dropout=False,
        shuffle_dataset=False,
        logging_strategy="no",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def score(text: str) -> float:
    """Return the share of words with an even number: the rows of `lockstep bench job` are rewarded by it."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


if __name__ == "__main__":  # processes that TRL starts import this file too
    main()
