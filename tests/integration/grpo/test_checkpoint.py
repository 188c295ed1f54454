"""Checkpoints are complete or absent, and restore model and optimizer bit by bit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from lockstep.integration.failures import FileFailed
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.results.best_model import BestModel
from lockstep.integration.grpo.results.checkpoint import (
    load_checkpoint,
    load_history,
    newest_checkpoint,
    refuse_other_draws,
    save_checkpoint,
)
from lockstep.integration.grpo.results.run_log import drop_lines_after, read_metrics
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams


class OneProcess(DdpBackend):
    """A backend without a process group. It keeps the same state of a model and its AdamW."""

    def __init__(self, model):
        ranks = SimpleNamespace(rank=0, num_ranks=1, is_first=True, device=torch.device("cpu"))
        super().__init__(TrainSettings(learning_rate=1e-3), ranks)
        self.model, self._ddp, self.optimizer = model, model, self.adamw(model)


def train(backend, num_steps):
    for step in range(num_steps):
        ids = torch.arange(step, step + 12)[None] % 256
        backend.model(ids, labels=ids).loss.backward()
        backend.step()


def test_a_loaded_checkpoint_trains_on_to_the_same_bits(make_model, tmp_path):
    straight, broken, other = (OneProcess(make_model("qwen2")) for _ in range(3))
    train(straight, 5)
    train(broken, 5)
    path = save_checkpoint(tmp_path, 5, broken.state())
    assert newest_checkpoint(tmp_path) == path
    step, state = load_checkpoint(path)
    other.load_state(state)
    assert step == 5
    train(straight, 3)
    train(other, 3)
    for a, b in zip(straight.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_the_newest_two_are_kept_and_unfinished_ones_do_not_count(make_model, tmp_path):
    backend = OneProcess(make_model("qwen2"))
    assert newest_checkpoint(tmp_path / "none") is None
    (tmp_path / ".partial-1").mkdir()
    assert newest_checkpoint(tmp_path) is None
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, backend.state())
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000010"]
    assert newest_checkpoint(tmp_path).name == "step-000010"


def test_as_many_checkpoints_stay_as_are_asked_for(make_model, tmp_path):
    backend = OneProcess(make_model("qwen2"))
    for num_kept, expected in ((1, [3]), (3, [1, 2, 3]), (0, [1, 2, 3])):
        folder = tmp_path / str(num_kept)
        for step in (1, 2, 3):
            save_checkpoint(folder, step, backend.state(), num_kept=num_kept)
        assert sorted(p.name for p in folder.glob("*")) == [f"step-{step:06d}" for step in expected]


def test_the_first_of_equally_good_models_stays_the_best(tmp_path):
    best = BestModel(tmp_path)
    assert best.is_beaten_by(0.0)
    best.folder.mkdir()
    (files,) = best.described(4, {"eval_reward_mean": 0.5, "eval_success": 0.25}, "digest").items()
    (best.folder / files[0]).write_text(files[1])
    assert json.loads(files[1]) == {
        "step": 4, "eval_reward_mean": 0.5, "eval_success": 0.25, "weight_digest": "digest"
    }  # fmt: skip
    assert not best.is_beaten_by(0.5) and best.is_beaten_by(0.51)
    (best.folder / files[0]).write_text("{")
    with pytest.raises(FileFailed, match=r"evaluation\.json"):
        best.is_beaten_by(1.0)


def test_a_checkpoint_of_another_model_is_refused_by_name(make_model, tmp_path):
    backend, other = OneProcess(make_model("qwen2")), OneProcess(make_model("qwen2", num_hidden_layers=1))
    path = save_checkpoint(tmp_path, 1, backend.state())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp"):
        other.load_state(load_checkpoint(path)[1])


def test_metrics_lose_their_half_written_line_and_what_comes_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert [line["step"] for line in drop_lines_after(path, 2)] == [1, 2]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(("saved", "named"), [({"draw_definition": 99}, 99), ({}, 1)])
def test_a_run_whose_seeds_meant_other_tokens_is_not_resumed(make_model, tmp_path, saved, named):
    """A checkpoint without a number was written under the first definition."""
    path = save_checkpoint(tmp_path, 3, OneProcess(make_model("qwen2")).state())
    refuse_other_draws(path)
    state = json.loads((path / "state.json").read_text())
    del state["draw_definition"]
    (path / "state.json").write_text(json.dumps({**state, **saved}))
    with pytest.raises(
        ValueError, match=f"step-000003 is of a run whose tokens were drawn by definition {named}; here"
    ):
        refuse_other_draws(path)


def test_the_history_of_samples_is_part_of_a_checkpoint(make_model, tmp_path):
    state, params = OneProcess(make_model("qwen2")).state(), SamplingParams(max_new_tokens=8, temperature=0.0)
    engine = Engine(make_model("qwen2"), EngineConfig(kv_cache=16))
    [first] = engine.generate([[3, 5, 7]], params)
    path = save_checkpoint(tmp_path, 1, state, drafts=engine.drafts)
    resumed = Engine(make_model("qwen2"), EngineConfig(kv_cache=16))
    load_history(path, resumed.drafts)
    assert resumed.state()["speculation"]["num_prompts_kept"] == 1
    [again] = resumed.generate([[3, 5, 7]], params)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    (path / "draft_history.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step-000001/draft_history.json is no saved history"):
        load_history(path, resumed.drafts)


def test_an_engine_without_a_history_neither_saves_nor_reads_one(make_model, tmp_path):
    state = OneProcess(make_model("qwen2")).state()
    keeps, keeps_none = (
        Engine(make_model("qwen2"), EngineConfig(kv_cache=16, speculation=which)) for which in ("auto", "off")
    )
    keeps.generate([[3, 5, 7]], SamplingParams(max_new_tokens=4))
    without = save_checkpoint(tmp_path, 1, state, drafts=keeps_none.drafts)
    assert not (without / "draft_history.json").exists()
    load_history(without, keeps.drafts)
    load_history(save_checkpoint(tmp_path, 2, state, drafts=keeps.drafts), keeps_none.drafts)
    assert newest_checkpoint(tmp_path) is not None
