"""`lockstep rollouts`: which samples it shows, and that none of them controls the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.integration.cli import main as cli
from lockstep.integration.grpo.results.samples import SampleFiles, packed
from lockstep.tests.support.closed_folders import closed


def row(name: str, reward: float, num_tokens: int, **more: object) -> dict[str, object]:
    return {
        "source": "rows:1", "prompt": "2+2?", "answer": "4", "sample": 0, "text": f"text {name}\x1b[2J",
        "reward": reward, "advantage": -reward, "finish_reason": "stop", "prompt_ids": [1],
        "token_ids": [2] * num_tokens, "logprobs": [-reward] * num_tokens,
        "weight_versions": [["1", 0, num_tokens]], **more,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = SampleFiles(tmp_path, 0, 0)
    files.write(1, [packed([row("old", 0.0, 1)])])
    files.write(
        3,
        [
            packed(
                [
                    row("a", 0.5, 3, components={"short": 0.1}, is_success=False),
                    row("b", 0.25, 9, components={"short": 0.9}, finish_reason="length", is_success=False),
                    row("c", 1.0, 6, components={"short": 0.5}, is_success=True),
                    *[row(f"d{i}", 0.75, 4, components={"short": 0.2}, is_success=True) for i in range(5)],
                ]
            )
        ],
    )
    return tmp_path


def names(text: str) -> list[str]:
    return [line.split()[2].removesuffix("\\x1b[2J") for line in text.splitlines() if line.startswith(">>> text")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["a", "b", "c", "d0", "d1"]),
        (["--all"], ["a", "b", "c", "d0", "d1", "d2", "d3", "d4"]),
        (["--worst", "2"], ["b", "a"]),
        (["--best", "2"], ["c", "d0"]),
        (["--sort", "length", "--best", "1"], ["b"]),
        (["--sort", "logprob", "--worst", "1"], ["c"]),
        (["--sort", "short"], ["b", "c", "d0", "d1", "d2"]),
        (["--sort", "advantage", "--all"], ["b", "a", "d0", "d1", "d2", "d3", "d4", "c"]),
        (["--step", "1"], ["old"]),
    ],
)
def test_samples_are_chosen_and_sorted(folder, capsys, arguments, expected):
    assert cli.main(["rollouts", str(folder), *arguments]) == 0
    shown = capsys.readouterr().out
    assert names(shown) == expected
    assert "\x1b" not in shown


def test_the_head_counts_all_samples_of_the_step(folder, capsys):
    cli.main(["rollouts", str(folder), "--worst", "1"])
    assert capsys.readouterr().out.splitlines()[:5] == [
        "step 3 (steps 1 to 3 are there): 1 of 8 samples",
        "reward 0.6875 (0.25 to 1)",
        "  short 0.3125 (0.1 to 0.9)",
        "successes 75.0%",
        "tokens 4.75 (3 to 9), ended by length: 12.5%",
    ]


def test_as_json_nothing_is_left_out(folder, capsys):
    cli.main(["rollouts", str(folder), "--json", "--best", "1"])
    assert json.loads(capsys.readouterr().out) == row("c", 1.0, 6, components={"short": 0.5}, is_success=True)


@pytest.mark.parametrize(("arguments", "num"), [([], 7), (["--sort", "length"], 7), (["--worst", "2"], 2)])
def test_as_json_all_samples_are_there_unless_a_number_is_asked_for(folder, capsys, arguments, num):
    SampleFiles(folder, 0, 0).write(4, [packed([row(str(n), float(n), 1) for n in range(7)])])
    cli.main(["rollouts", str(folder), "--json", *arguments])
    assert len(capsys.readouterr().out.splitlines()) == num


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "2"], "no samples of step 2: it has steps 1 to 3"),
        (["--sort", "bogus"], "--sort bogus: the samples have reward, advantage, length, logprob, short"),
    ],
)
def test_what_is_not_there_is_named(folder, capsys, arguments, words):
    assert cli.main(["rollouts", str(folder), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_samples_and_a_number_below_one_are_named(tmp_path, capsys):
    assert cli.main(["rollouts", str(tmp_path / "none")]) == 2
    assert "none is no folder" in capsys.readouterr().err
    assert cli.main(["rollouts", str(tmp_path)]) == 2
    assert "has no samples" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["rollouts", str(tmp_path), "--worst", "0"])
    assert "--worst must be at least 1, not 0" in capsys.readouterr().err


def test_a_reader_that_ends_early_ends_the_command_quietly_and_nothing_heavy_is_imported(folder):
    files = SampleFiles(folder, 0, 3)
    files.write(4, [packed([row("x" * 1000, 1.0, 3) for _ in range(500)])])
    code = (
        "import sys\nfrom lockstep.integration.cli.main import main\n"
        f"status = main(['rollouts', {str(folder)!r}, '--all'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\nsys.exit(status)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_page_that_cannot_be_written_is_named_without_a_word_of_training(folder, capsys):
    assert cli.main(["rollouts", str(folder), "--html", str(folder / "none" / "page.html")]) == 1
    said = capsys.readouterr().err
    assert "page.html cannot be written: No such file or directory; give --html another path" in said
    assert "--resume" not in said


@pytest.mark.parametrize("place", [".", "rollouts"])
def test_a_folder_that_may_not_be_read_is_named_and_not_taken_for_an_empty_one(folder, capsys, place):
    assert cli.main(["rollouts", str(folder)]) == 0
    with closed(folder / place):
        code = cli.main(["rollouts", str(folder)])
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("lockstep: error: /") and said.endswith(": Permission denied\n")


def test_files_of_other_names_beside_the_samples_are_passed_over(folder, capsys):
    (folder / "rollouts" / "step-old.jsonl.zst").write_bytes(b"")
    assert cli.main(["rollouts", str(folder), "--best", "1"]) == 0
    assert "step 3 (steps 1 to 3 are there)" in capsys.readouterr().out
