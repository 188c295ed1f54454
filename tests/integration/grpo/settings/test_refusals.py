"""What ends a job before it has begun: a damaged model folder, and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lockstep.integration.failures import RESUME
from lockstep.integration.grpo.main import main
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.tests.support.closed_folders import closed

CONFIG = Path(__file__).parents[4] / "configs" / "arithmetic_cpu.toml"


def test_ctrl_c_ends_a_rank_in_one_line(tmp_path):
    path = tmp_path / "config"
    os.mkfifo(path)
    command = [sys.executable, "-m", "lockstep.integration.grpo", str(path)]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job may ignore it
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen) as job:
        with open(path, "w"):  # which waits for it
            job.send_signal(signal.SIGINT)
        # Closed, since Python hears of a signal only when a call returns that has begun just before it.
        _, said = job.communicate(timeout=60)
    assert job.returncode == 130
    assert said == f"lockstep: interrupted; {RESUME}\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "model.safetensors is cut: 5000 bytes"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read as JSON"),
        (lambda folder: configure(folder, hidden_act="none"), "KeyError: 'none'"),
        (lambda folder: configure(folder, quantization_config={"quant_method": "gptq"}), "holds quantised weights"),
        (lambda folder: [shutil.rmtree(folder), folder.symlink_to(folder)], "holds no config.json"),
    ],
)
def test_check_names_a_damaged_model_folder_in_one_line(make_model, tmp_path, capsys, damage, message):
    folder = tmp_path / "model"
    make_model("qwen3").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    damage(folder)
    capsys.readouterr()  # the bars of saving
    assert main([str(CONFIG), "--check", f"model.path={folder}"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_run_that_may_not_be_read_is_not_resumed(tmp_path, capsys):
    (tmp_path / "arithmetic" / "checkpoints").mkdir(parents=True)
    given = [str(CONFIG), "--check", "--resume", f"run.dir={tmp_path}"]
    assert main(given) == 0
    with closed(tmp_path):
        code = main(given)
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and said.endswith(": Permission denied\n")
