"""The index of a run's digests: all versions that weights have had, and the folders that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.integration.grpo.results.weights_kept import WeightsKept
from lockstep.integration.replay.digest_index import FILE, read_index


def indexed(folder: Path) -> list[tuple[str, str | None, str]]:
    return sorted((entry.folder, entry.version, entry.digest) for entry in read_index(folder))


def follow(kept: WeightsKept, versions: Sequence[int], digest: str | None) -> None:
    for version in versions:
        kept.follow(str(version), digest)


def test_weights_that_steps_leave_as_they_were_have_all_their_versions_in_the_index(tmp_path):
    first = tmp_path.parent / "first"
    kept = WeightsKept(tmp_path, "float32")
    kept.add(first, "0", "a")
    follow(kept, [0, 1, 2], "a")
    assert indexed(tmp_path) == [(str(first), version, "a") for version in "012"]
    follow(kept, [3, 4], "b")  # the checkpoint comes later than the weights
    kept.add(tmp_path / "checkpoints" / "step-000004", "4", "b")
    follow(kept, [5], "b")
    kept.add(tmp_path / "best", "5", "b")
    follow(kept, [6], "c")
    kept.add(tmp_path / "best", "6", "c")  # which does not hold the weights of version 5 any more
    assert [one for one in indexed(tmp_path) if one[0] == "checkpoints/step-000004"] == [
        ("checkpoints/step-000004", version, "b") for version in "345"
    ]
    resumed = WeightsKept(tmp_path, "float32")
    follow(resumed, [6, 7], "c")
    assert ("best", "7", "c") in indexed(tmp_path)
    follow(resumed, [8, 9], "b")
    assert ("checkpoints/step-000004", "9", "b") in indexed(tmp_path)
    assert ("best", "9", "b") not in indexed(tmp_path)


def test_weights_without_a_digest_are_in_no_index(tmp_path):
    kept = WeightsKept(tmp_path, "float32")
    follow(kept, [1, 2], None)
    kept.add(tmp_path / "model", "2", None)
    assert indexed(tmp_path) == []


def test_an_index_that_holds_something_else_is_named_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / FILE).write_text("{}")
    kept = WeightsKept(tmp_path, "float32")
    follow(kept, [1, 2], "a")
    kept.add(tmp_path / "model", "2", "a")
    assert (
        f"{tmp_path / FILE} is no index of digests" in caplog.text and "of version 2 by their receipts" in caplog.text
    )
    (tmp_path / FILE).unlink()
    kept.add(tmp_path / "model", "2", "a")
    assert ("model", "2", "a") in indexed(tmp_path)
