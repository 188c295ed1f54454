"""The command `lockstep`: help, versions, one-line refusals."""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.integration.cli import main as cli
from lockstep.integration.cli.arguments.settings import read_settings
from lockstep.integration.failures import FileFailed
from lockstep.kernels.machine import native
from lockstep.rollout.errors import BrokenLogits
from lockstep.tests.optional_packages import JOB, needs_packages
from lockstep.tests.support.callers import submit

CONFIG = str(Path(cli.__file__).parents[2] / "configs" / "arithmetic_cpu.toml")


def lockstep(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lockstep.integration.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input="", check=False)


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom lockstep.integration.cli import main as cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in ("generate", "train", "rollouts", "bench", "doctor"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "30000"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_sleep_soon_unless_the_environment_says_how_they_wait(environ, expected):
    cli.wait_briefly(environ)
    assert environ == expected


def test_the_way_to_wait_is_set_before_torch_is_loaded():
    code = (
        "import os, sys\nfrom lockstep.integration.cli import main as cli\n"
        "own = cli.wait_briefly\n"
        "cli.wait_briefly = lambda environ: (own(environ), print('torch' in sys.modules))\n"
        "try:\n    cli.main(['bench', '--help'])\nexcept SystemExit:\n    print(os.environ['GOMP_SPINCOUNT'])"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.startswith("False\n") and done.stdout.endswith("30000\n")


@pytest.mark.parametrize("command", ["generate", "train", "rollouts", "doctor", "bench"])
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: lockstep {command}")


def test_version_is_that_of_setup_cfg(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    text = (Path(cli.__file__).parents[2] / "setup.cfg").read_text()
    number = next(line.split("=")[1].strip() for line in text.splitlines() if line.startswith("version"))
    assert capsys.readouterr().out.split()[:2] == ["lockstep", number]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], "bogus"),
        ([], "COMMAND"),
        (["generate"], "--model"),
        (
            ["generate", "--model", "m", "--sampling", "temperature=-1", "foo=2"],
            "unknown key 'foo'; temperature must",
        ),
        (["generate", "--model", "m", "--sampling", "{broken"], "--sampling '{broken' is not JSON"),
        (["generate", "--model", "m", "--sampling", "hot"], "--sampling 'hot' is neither"),
        (["generate", "--model", "m", "--engine", "kv_cash=1"], "--engine: unknown engine setting: kv_cash; known: "),
        (["generate", "--model", "m", "--sampling", "max_tokens=3"], "unknown key 'max_tokens' (here max_new_tokens)"),
        (["generate", "--model", "m", "--engine", "max_num_seqs=many"], "--engine: max_num_seqs must be"),
        (["generate", "--model", "m"], "--input standard input: holds no prompt"),
        (["generate", "--model", "m", "--input", "nowhere"], "--input nowhere: cannot be read"),
        (["train", "nowhere.toml"], "config 'nowhere.toml' cannot be read"),
        (["serve", "--model", "x" * 300], "x/config.json: File name too long"),
        (["rollouts", "x" * 300], "x: File name too long"),
        (["train", CONFIG, f"run.name={'ü' * 125}", "--check"], "run.name must have at most 240 bytes, not 250"),
        (["train", CONFIG, f"model.path={'x' * 300}", "--check"], "xx' is no model folder"),
        (["train", CONFIG, "model.path=a/b", "--check"], "no config.json: download a model of the Hub to one first"),
        (["serve", "--model", "a/b"], "no config.json): download a model of the Hub to one first"),
        (["train", CONFIG, "train.lerning_rate=1"], "unknown key train.lerning_rate"),
        (
            ["train", CONFIG, "rollout.prompts_per_step=7", "--nproc-per-node", "2"],
            "does not divide by 2 ranks",
        ),
        (["train", CONFIG, "--nproc-per-node", "0"], "--nproc-per-node must be at least 1"),
        (["bench", "bogus"], "bogus"),
        (["bench", "rollout", "--model", "huge"], "--model 'huge' is neither tiny nor small"),
        (["bench", "rollout", "--batch", "0"], "--batch: must be at least 1"),
        (["bench", "rollout", "--device", "tpu"], "--device must be cpu or cuda"),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_exit_code_2(arguments, words, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with open("/dev/null") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        try:
            code = cli.main(arguments)
        except SystemExit as end:  # argparse exits by this exception
            code = end.code
    errors = capfd.readouterr().err
    assert code == 2
    assert words in errors
    assert errors.startswith("lockstep: error: ")
    assert errors.count("\n") == 1


def test_the_exit_code_reaches_the_shell():
    done = lockstep("generate", "--model", "m", "--engine", "kv_cash=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep: error: --engine: unknown engine setting: kv_cash; known: ")
    assert done.stderr.count("\n") == 1


def test_the_package_itself_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == lockstep("--version").stdout, done.stderr


@pytest.mark.parametrize(
    "command", [["ctl", "state"], ["ctl", "--json", "state"], ["--help"], ["doctor", "--help"], ["--version"]], ids=repr
)
def test_a_command_whose_output_nobody_reads_ends_quietly(command):
    answer = b'{"paused": false}'
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(answer) + answer)

        if command[0] == "ctl":
            command = ["ctl", "--url", url, *command[1:]]
            submit(serve)
        reader, writer = os.pipe()
        os.close(reader)  # before anything is written: `| head` that has ended
        with open(writer, "wb") as output:
            command = [sys.executable, "-m", "lockstep.integration.cli", *command]
            done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("command", [["--version"], ["--help"], ["train", CONFIG, "--check"]], ids=str)
def test_output_that_cannot_be_written_is_one_line_and_no_verdict(command):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "lockstep.integration.cli", *command]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == cli.NO_OUTPUT
    assert done.stderr == "lockstep: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileFailed("x/digests.json cannot be written: No space left on device"), "No space left on device"),
        (MemoryError(), "out of memory"),
        (BrokenLogits("the logits of one sequence are NaN"), "are NaN"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("command", ["replay", "explain", "bench", "doctor", "warm", "generate"])
def test_an_error_of_files_or_memory_is_no_verdict(command, error, said, monkeypatch, capsys):
    def run(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module(f"lockstep.integration.cli.{command}"), "run", run)
    assert cli.main([command]) == (1 if command in ("warm", "generate") else cli.NO_VERDICT)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("settings", [["--engine", "a=1", "b=2"], ["--engine", "a=1", "--engine", "b=2"]], ids=repr)
def test_warm_takes_engine_settings_as_serve_does(settings, capsys):
    for command in ("warm", "serve"):
        assert cli.main([command, "--model", "m", *settings]) == 2
        assert "setting: a, b" in capsys.readouterr().err


def test_settings_are_read_as_json_then_as_text_and_the_last_wins():
    items = [
        '{"n": 2, "stop": ["a"]}',
        "n=3",
        "ignore_eos=true",
        "kv_cache=2GiB",
        "temperature=0.5",
        "stop=\\n=",
    ]
    assert read_settings("--sampling", items) == {
        "n": 3, "stop": "\\n=", "ignore_eos": True, "kv_cache": "2GiB", "temperature": 0.5,
    }  # fmt: skip


def test_train_check_prints_the_plan_and_runs_nothing(capsys, monkeypatch, tmp_path):
    needs_packages(*JOB)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", CONFIG, "--check", "run.name=trial", "--nproc-per-node", "4"]) == 0
    assert "ranks      4" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_train_finds_a_reward_of_the_folder_it_is_started_in(capsys, monkeypatch, tmp_path):
    needs_packages(*JOB)
    (tmp_path / "reward_of_this_folder.py").write_text("def score(row, completion):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", os.getcwd())])
    reward = "reward=reward_of_this_folder:score"
    assert cli.main(["train", CONFIG, "--check", "run.name=trial", reward, "--nproc-per-node", "2"]) == 0
    del sys.modules["reward_of_this_folder"]


def test_train_becomes_torchrun_of_the_same_interpreter(monkeypatch, capsys):
    needs_packages(*JOB)
    commands = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append((path, command)))
    cli.main(["train", CONFIG, "run.num_steps=3", "--resume", "--nproc-per-node", "2", "run.name=trial"])
    [(path, command)] = commands
    assert path == command[0] == sys.executable
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    job = command.index("lockstep.integration.grpo")
    assert command[job - 1 :] == [
        "-m", "lockstep.integration.grpo", CONFIG, "run.num_steps=3", "run.name=trial", "--resume",
    ]  # fmt: skip
    told = capsys.readouterr().out
    assert "steps      3, 1 optimizer step(s) on each" in told and "starting   2 ranks with torchrun\n" in told


def test_doctor_reports_kernels_and_the_guarantee():
    done = lockstep("doctor")
    assert done.returncode == 0, done.stderr
    report = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if not line.startswith("cpu "))
    assert {"torch", "processor", "features", "Triton", "linear.cpp", "paged_attention.cpp", "products"} <= set(report)
    if not report["linear.cpp"].startswith("not used"):
        _, in_float32, _, in_bfloat16 = report["products"].replace(",", "").split()[:4]
        assert {in_float32, in_bfloat16} <= set(native.ISA_LEVELS)
    guarantees = [line for line in done.stdout.splitlines() if line.startswith("cpu ")]
    assert [line.split()[1] for line in guarantees] == ["float32", "bfloat16"]
    assert all("; invariant: " in line for line in guarantees)
