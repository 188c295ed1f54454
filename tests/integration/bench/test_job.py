"""Tests of `lockstep bench job --against trl`, with a small stand-in for TRL."""

import json
import sys

import pytest

from lockstep.integration.bench.rivals.trl_worker import score
from lockstep.integration.cli import main as cli

# The part of TRL that the worker uses: a trainer that samples words and takes no time.
TRL = """
import json, pathlib
from types import SimpleNamespace

__version__ = "0.0-stand-in"
GRPOConfig = lambda **settings: SimpleNamespace(**settings)

class GRPOTrainer:
    def __init__(self, model, args, reward_funcs, train_dataset, processing_class, callbacks):
        self.__dict__.update(locals())

    def train(self):
        notes = pathlib.Path(__file__).with_name("notes.json")
        args, control = self.args, SimpleNamespace(should_training_stop=False)
        [callback], rewards, steps = self.callbacks, [], 0
        callback.on_train_begin(args, None, control)
        while not control.should_training_stop:
            ids = [[2] * args.max_completion_length] * args.per_device_train_batch_size
            for _ in range(args.gradient_accumulation_steps):
                rewards += self.reward_funcs(completions=["w2 w3"] * len(ids), completion_ids=ids)
            steps += 1
            callback.on_step_end(args, None, control)
        prompts = [len(self.processing_class(row["prompt"])["input_ids"]) for row in self.train_dataset]
        found = {"args": vars(args), "rewards": rewards, "steps": steps, "prompts": prompts,
                 "dtype": str(self.model.dtype)}
        notes.write_text(json.dumps(found))
"""
DATASETS = """
class Dataset:
    from_list = staticmethod(list)
"""


@pytest.fixture
def python(tmp_path):
    """Make a Python whose `trl` is the stand-in."""
    (tmp_path / "trl.py").write_text(TRL)
    (tmp_path / "datasets.py").write_text(DATASETS)
    executable = tmp_path / "python"
    executable.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    executable.chmod(0o755)
    return executable


ARGUMENTS = [
    "--model", "tiny", "--prompts", "2", "--group", "4", "--microbatch", "4", "--prompt-tokens", "9", "--new-tokens",
    "5", "--pairs", "2", "--threads", "1",
]  # fmt: skip


def test_both_sides_get_the_same_settings_and_their_ratio_is_reported(python, tmp_path, capsys, restore_threads):
    code = cli.main(["bench", "job", *ARGUMENTS, "--against", "trl", "--trl-python", str(python), "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if report["passed"] else 1)
    assert report["passed"] == (report["ratio_trl"] >= 1.3) and len(report["ratios"]) == 2
    assert report["trl_version"] == "0.0-stand-in" and report["ours_tokens"] == report["trl_tokens"] == 2 * 4 * 5
    assert report["ours_s"] > 0 <= report["trl_s"]  # the stand-in takes next to no time
    notes = json.loads((tmp_path / "notes.json").read_text())
    assert notes["dtype"] == "torch.float32" and set(notes["prompts"]) == {9} and set(notes["rewards"]) == {0.5}
    expected = {
        "learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0, "max_grad_norm": 1.0,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 5, "beta": 0.0, "num_iterations": 1, "gradient_checkpointing": False, "bf16": False,
    }  # fmt: skip
    assert expected.items() <= notes["args"].items()


def test_options_that_do_not_fit_are_named(capsys, python):
    assert cli.main(["bench", "job", *ARGUMENTS, "--against", "trl"]) == 2
    assert "--against trl needs --trl-python" in capsys.readouterr().err
    assert cli.main(["bench", "job", *ARGUMENTS, "--microbatch", "3"]) == 2
    assert "--microbatch 3 does not divide 8 samples" in capsys.readouterr().err
    arguments = ["bench", "job", *ARGUMENTS, "--against", "trl", "--trl-python", str(python.with_name("none"))]
    assert cli.main(arguments) == 2
    assert "--trl-python: " in capsys.readouterr().err


def test_a_text_is_scored_by_its_even_words():
    assert score("w2 w13 w40 w7") == 0.5 and score("") == 0.0
