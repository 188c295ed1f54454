"""Checkpoints are whole or not there, and bring back model and optimizer to the bit."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from lockstep.integration.run_log import drop_lines_after, read_metrics


def train(model, optimizer, num_steps):
    for step in range(num_steps):
        ids = torch.arange(step, step + 12)[None] % 256
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loaded_checkpoint_trains_on_to_the_same_bits(make_model, tmp_path):
    straight, broken, other = (make_model("qwen2") for _ in range(3))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (straight, broken, other)]
    train(straight, optimizers[0], 5)
    train(broken, optimizers[1], 5)
    path = save_checkpoint(tmp_path, 5, broken, optimizers[1])
    assert newest_checkpoint(tmp_path) == path
    assert load_checkpoint(path, other, optimizers[2]) == 5
    train(straight, optimizers[0], 3)
    train(other, optimizers[2], 3)
    for a, b in zip(straight.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_the_newest_two_are_kept_and_unfinished_ones_do_not_count(make_model, tmp_path):
    model = make_model("qwen2")
    optimizer = torch.optim.AdamW(model.parameters())
    assert newest_checkpoint(tmp_path / "none") is None
    (tmp_path / ".partial-1").mkdir()
    assert newest_checkpoint(tmp_path) is None
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, model, optimizer)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000010"]
    assert newest_checkpoint(tmp_path).name == "step-000010"


def test_a_checkpoint_of_another_model_is_refused_by_name(make_model, tmp_path):
    model, other = make_model("qwen2"), make_model("qwen2", num_hidden_layers=1)
    path = save_checkpoint(tmp_path, 1, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp"):
        load_checkpoint(path, other, torch.optim.AdamW(other.parameters()))


def test_metrics_lose_their_half_written_line_and_what_comes_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert [line["step"] for line in drop_lines_after(path, 2)] == [1, 2]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
