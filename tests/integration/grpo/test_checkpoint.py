"""Checkpoints are complete or absent, and restore model and optimizer bit by bit."""

from __future__ import annotations

import json
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch

from lockstep.integration.activity import Activity
from lockstep.integration.failures import FileFailed
from lockstep.integration.grpo.backends.backend import GatheredState, Gathering
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.results import json_files, tensor_file
from lockstep.integration.grpo.results.best_model import BestModel
from lockstep.integration.grpo.results.checkpoint import (
    _identity,
    load_checkpoint,
    load_history,
    newest_checkpoint,
    refuse_other_checkpoints,
    refuse_other_draws,
    save_checkpoint,
    saved_digest,
)
from lockstep.integration.grpo.results.json_files import read_json, write_json
from lockstep.integration.grpo.results.run_log import drop_lines_after, read_metrics
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.ranks import Ranks
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams


class OneProcess(DdpBackend):
    """A backend without a process group. It keeps the same state of a model and its AdamW."""

    def __init__(self, model):
        ranks = SimpleNamespace(rank=0, num_ranks=1, is_first=True, device=torch.device("cpu"), activity=Activity())
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


def test_every_piece_of_a_checkpoint_is_told_while_it_is_written_and_read(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 4096)
    monkeypatch.setattr(tensor_file, "_READ_BYTES", 4096)
    state, written, read = OneProcess(make_model("qwen2")).state(), [], []
    path = save_checkpoint(tmp_path, 1, state, on_bytes=written.append)
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert max(written) == 4096 and sum(written) > 1.9 * num_bytes, "once for the bytes, once for their hash"
    _, found = load_checkpoint(path, read.append)
    assert max(read) == 4096 and sum(read) == num_bytes
    assert found.model.keys() == set(state.model.names)
    assert all(torch.equal(found.model[name], tensor) for name, tensor in state.model)


def test_one_tensor_of_a_checkpoint_is_there_at_a_time(tmp_path):
    alive, most = weakref.WeakSet(), []

    def gathered():
        for number in range(9):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor.untyped_storage())
            most.append(len(alive))
            yield f"tensor {number}", tensor
            del tensor

    tensors = Gathering([f"tensor {number}" for number in range(9)], gathered, Ranks(0, 1, torch.device("cpu")))
    path = save_checkpoint(tmp_path, 1, GatheredState(tensors, tensors))
    assert max(most) <= 2, most
    _, found = load_checkpoint(path)
    assert [found.model[f"tensor {number}"][0] for number in range(9)] == list(
        range(9)
    ) and "tensor 9" not in found.model


@pytest.mark.parametrize("others", ["none", "of another step", "of another run"])
def test_ranks_that_do_not_see_the_same_checkpoint_are_refused_by_name(make_model, tmp_path, others):
    here = save_checkpoint(tmp_path / "here", 2, OneProcess(make_model("qwen2")).state())
    there = None
    if others != "none":
        other = OneProcess(make_model("qwen2"))
        there = save_checkpoint(tmp_path / "there", 4 if "step" in others else 2, other.state(), "another digest")

    def as_seen(*checkpoints):
        return SimpleNamespace(of_all=lambda own: [_identity(one) for one in checkpoints])

    refuse_other_checkpoints(as_seen(here, here), here)
    refuse_other_checkpoints(as_seen(None, None), None)
    with pytest.raises(ValueError, match=r"do not see the same checkpoint: rank 0 has .*run\.dir must be shared"):
        refuse_other_checkpoints(as_seen(here, there), here)


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


def test_the_best_model_of_a_branch_that_is_given_up_is_set_aside(tmp_path, caplog):
    best = BestModel(tmp_path)
    assert best.set_aside_after(0) is None

    def save(step: int) -> None:
        best.folder.mkdir()
        (best.folder / "evaluation.json").write_text(json.dumps({"step": step, "eval_reward_mean": 0.5}))

    save(4)
    assert best.set_aside_after(4) is None and not best.is_beaten_by(0.5)
    assert best.set_aside_after(3) == tmp_path / "best.1" and best.is_beaten_by(0.1)
    save(2)
    assert best.set_aside_after(1) == tmp_path / "best.2"
    assert json.loads((tmp_path / "best.1/evaluation.json").read_text())["step"] == 4


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
    (path / "state.json").write_text('{"step": 1}')  # of an older version, which tells no hashes
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


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "draft_history.json"])
def test_a_file_that_is_not_the_one_which_was_saved_is_refused_by_name(make_model, tmp_path, name):
    """An optimizer's state of another step was taken, and the run went on to other results."""
    backend, engine = OneProcess(make_model("qwen2")), Engine(make_model("qwen2"), EngineConfig(kv_cache=16))
    engine.generate([[3, 5, 7]], SamplingParams(max_new_tokens=40))
    earlier = save_checkpoint(tmp_path, 1, backend.state(), drafts=engine.drafts)
    train(backend, 1)
    engine.generate([[3, 5, 9]], SamplingParams(max_new_tokens=40))
    path = save_checkpoint(tmp_path, 2, backend.state(), drafts=engine.drafts)

    def load():
        load_checkpoint(path)
        load_history(path, engine.drafts)

    load()
    whole = (path / name).read_bytes()
    flip_a_bit(path / name)
    with pytest.raises(FileFailed, match=rf"step-000002/{name} cannot be read: it is not the file that was saved"):
        load()
    (path / name).write_bytes((earlier / name).read_bytes())
    with pytest.raises(FileFailed, match=r"remove (this folder|it), then --resume"):
        load()
    (path / name).write_bytes(whole)
    load()


def test_a_checkpoint_of_an_older_version_tells_no_hashes(make_model, tmp_path):
    path = save_checkpoint(tmp_path, 2, OneProcess(make_model("qwen2")).state())
    state = json.loads((path / "state.json").read_text())
    del state["sha256"]
    (path / "state.json").write_text(json.dumps(state))
    assert load_checkpoint(path)[0] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("null", "it holds no object"), ("[]", "it holds no object"), ("{}", "its step is None"), ("", "it is damaged"),
        ('{"step": 6.5}', "its step is 6.5"), ('{"step": true}', "its step is True"),
        ('{"step": 999}', "it is of step 999"),
    ],
)  # fmt: skip
def test_what_a_checkpoint_says_of_itself_is_checked(make_model, tmp_path, text, says):
    path = save_checkpoint(tmp_path, 6, OneProcess(make_model("qwen2")).state())
    (path / "state.json").write_text(text)
    for read in (load_checkpoint, saved_digest, refuse_other_draws):
        with pytest.raises(FileFailed, match=rf"step-000006/state\.json cannot be read: {says}.*; remove this folder"):
            read(path)


def test_checkpoints_are_ordered_by_their_steps_and_copies_are_none(make_model, tmp_path):
    """Of a million steps the name is longer; a copy was taken for the newest, and others were deleted for it."""
    state = OneProcess(make_model("qwen2")).state()
    for step in (999_990, 1_000_000):
        newest = save_checkpoint(tmp_path, step, state)
    for name in ("step-000001.bak", "step-1000000-good", "step-final", "step-2.tar"):
        shutil.copytree(newest, tmp_path / name)
    assert newest_checkpoint(tmp_path) == newest
    save_checkpoint(tmp_path, 1_000_001, state, num_kept=1)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step-1000001", "step-000001.bak", "step-1000000-good", "step-final", "step-2.tar")
    }


def test_damaged_lines_of_metrics_are_named_unless_they_are_behind_the_checkpoint(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    zeros = "\0" * 100  # as a power loss leaves them
    path.write_text(f'{{"step": 1}}\n{{"step": 2}}\n{zeros}\n')
    assert [line["step"] for line in drop_lines_after(path, 2)] == [1, 2] and not caplog.records
    for damaged in (zeros, "[]", "{}", '{"step": "2"}'):
        path.write_text(f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n')
        with pytest.raises(FileFailed, match=r"metrics\.jsonl cannot be read: line 2 is damaged; remove that line"):
            drop_lines_after(path, 3)
    path.unlink()
    assert drop_lines_after(path, 3) == [] and "lacks 3 of the 3 steps that are done" in caplog.text


def test_json_files_are_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "before.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(json_files, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(FileFailed, match=r"before\.json cannot be written"):
        write_json(path, {"a": 2})
    assert read_json(path, {"a": int}, "") == {"a": 1}
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FileFailed, match=r"before\.json cannot be read: it is damaged .*; write it anew"):
        read_json(path, {}, "write it anew")
