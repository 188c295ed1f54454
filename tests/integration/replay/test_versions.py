"""Proofs of samples of several weights: spans, kept KV, and weights found in folders by their digests."""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lockstep.integration.replay.digest_index import FILE, IndexedWeights, add_to_index, read_index
from lockstep.integration.replay.folders import FolderWeights, model_folder, weight_folders
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import sealed
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

ASKED = RequestOptions(return_receipt=True)
PROMPTS = [[3, 17, 90, 4, 55], [(7 * i) % 250 for i in range(50)], [250]]


class Trainer:
    """A module whose weights change from version to version, and the folders of all versions."""

    def __init__(self, module, folder: Path, tokenizer=None, **config: object) -> None:
        self.module, self.folder, self.version = module.train(), folder, 0
        settings = {"kv_cache": "64 blocks", "max_num_seqs": 8, "speculation": "off", **config}
        self.service = RolloutService(Engine(module, EngineConfig(**settings), tokenizer=tokenizer))
        self._generator = torch.Generator().manual_seed(5)
        self.commit()

    def commit(self, **options: object) -> None:
        """Change the weights a little, if they are not the first, and publish and save them as the next version."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                if self.version:
                    parameter += 0.01 * torch.randn(parameter.shape, generator=self._generator)
        self.version += 1
        source = self.module.named_parameters()
        self.service.commit_in_place(str(self.version), source=source, **options)
        self.module.save_pretrained(self.folder / f"v{self.version}")

    def step(self, num_tokens: int) -> None:
        """Run steps until each live sequence has so many output tokens; all are live."""
        engine = self.service.engine
        while any(r.sequence.num_output_tokens < num_tokens for r in self.live()) or not self.live():
            assert engine.step() == []

    def live(self) -> list:
        return self.service.engine.parts.sequences.requests()

    def finish(self) -> list[dict]:
        engine, found = self.service.engine, []
        while engine.has_work:
            found += engine.step()
        return [completion.receipt for completion in sorted(found, key=lambda c: c.id)]


def prover_of(folder: Path) -> RolloutService:
    return RolloutService(Engine(folder, EngineConfig(kv_cache="64 blocks")))


@pytest.fixture
def trainer(make_model, tmp_path, restore_threads):
    torch.set_num_threads(1)
    return Trainer(make_model("qwen3"), tmp_path / "weights")


def add_all(trainer: Trainer, num_tokens: int = 16) -> None:
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=num_tokens, sampling_seed=number)
        trainer.service.engine.add(prompt, params, options=ASKED, rid=f"r{number}")


def proven(trainer: Trainer, receipts: list[dict], paths=None):
    service = prover_of(trainer.folder / "v1")
    digests = {span["digest"] for receipt in receipts for span in receipt["spans"]}
    return service.replay(receipts, weights=FolderWeights(service, paths or [trainer.folder], digests))


@pytest.mark.parametrize("how", ["kept", "recomputed", "retracted", "kept, then recomputed"])
def test_spans_of_several_versions_are_proven_each_with_its_weights(trainer, how):
    add_all(trainer)
    engine = trainer.service.engine
    trainer.step(4)
    for num_tokens in (7, 11):
        if how == "retracted":
            engine.pause_generation("retract")
        trainer.commit(keep_running=how == "kept" or (how != "recomputed" and num_tokens == 7))
        engine.continue_generation()
        trainer.step(num_tokens)
    receipts = trainer.finish()
    assert all(len(receipt["spans"]) == 3 for receipt in receipts)
    kept = [[len(span["kept_kv"]) for span in receipt["spans"]] for receipt in receipts]
    assert kept == {"kept": [[0, 1, 2]] * 3, "kept, then recomputed": [[0, 1, 0]] * 3}.get(how, [[0, 0, 0]] * 3)
    report = proven(trainer, receipts)
    assert report.num("equal") == 3, list(report.lines())
    assert sum(v.num_tokens for v in report.verdicts) == 48
    for receipt in receipts:
        for span in receipt["spans"]:
            span["kept_kv"] = [] if span["kept_kv"] or how in ("recomputed", "retracted") else span["kept_kv"]
        receipt["spans"][-1]["digest"] = receipt["spans"][0]["digest"]
    other = proven(trainer, [sealed(receipt) for receipt in receipts])
    assert [v.status for v in other.verdicts] == ["differs"] * 3
    assert all(v.position >= 4 for v in other.verdicts)


def test_a_prompt_half_read_before_a_commit_is_proven(make_model, tmp_path, restore_threads):
    torch.set_num_threads(1)
    trainer = Trainer(make_model("qwen3"), tmp_path / "weights", chunked_prefill_size=16)
    engine = trainer.service.engine
    engine.add(PROMPTS[1], SamplingParams(max_new_tokens=5), options=ASKED)
    engine.step()
    trainer.commit(keep_running=True)
    [receipt] = trainer.finish()
    assert [kept["end"] for kept in receipt["spans"][0]["kept_kv"]] == [16]
    assert proven(trainer, [receipt]).num("equal") == 1


@pytest.mark.parametrize("mode", ["exact", "text"])
def test_forced_text_half_scored_before_a_commit_that_keeps_kv_is_proven(
    make_model, tmp_path, restore_threads, bpe_tokenizer, mode
):
    torch.set_num_threads(1)
    settings = {"chunked_prefill_size": 16, "max_num_batched_tokens": 16}
    trainer = Trainer(
        make_model("qwen3", vocab_size=1024, eos_token_id=0), tmp_path / "weights", bpe_tokenizer, **settings
    )
    bpe_tokenizer.save_pretrained(trainer.folder / "v1")
    engine, text = trainer.service.engine, "the quick brown fox jumps over the lazy dog and runs away" * 2
    params = SamplingParams(regex=f"[a-z]{text}[0-9]", jump_forward=mode, max_new_tokens=200, sampling_seed=1)
    engine.add("pp", params, options=ASKED)
    while not trainer.live() or not trainer.live()[0].record.scored:
        engine.step()
    trainer.commit(keep_running=True)
    [receipt] = trainer.finish()
    assert [span["version"] for span in receipt["spans"]] == ["1", "2"]
    assert [len(span["kept_kv"]) for span in receipt["spans"]] == [0, 1]
    if mode == "exact":  # jumps of the mode text are proven for one version
        report = proven(trainer, [receipt])
        assert report.num("equal") == 1, list(report.lines())


def test_a_span_whose_weights_are_not_at_hand_is_not_proven_and_its_digest_is_said(trainer):
    add_all(trainer)
    trainer.step(4)
    trainer.commit()
    receipts = trainer.finish()
    shutil.rmtree(trainer.folder / "v2")
    report = proven(trainer, receipts)
    assert report.exit_code == 3
    assert all(receipts[0]["spans"][1]["digest"] in verdict.what for verdict in report.verdicts)


def save_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Write the present weights as the job's checkpoints have them."""
    folder.mkdir(parents=True)
    save_file(dict(trainer.module.named_parameters()), folder / "model.safetensors")
    save_file({"moment": torch.zeros(2)}, folder / "optimizer.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": 1}))


def test_the_wrong_version_is_named(trainer, tmp_path):
    [answer] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    run, digest = tmp_path / "run", answer.receipt["spans"][0]["digest"]
    save_checkpoint(trainer, run / "checkpoints" / "step-000001")
    add_to_index(run, [IndexedWeights("checkpoints/step-000001", digest, "float32", "1")])
    trainer.commit()
    other, unnamed = copy.deepcopy(answer.receipt), copy.deepcopy(answer.receipt)
    other["spans"][0]["version"], unnamed["spans"][0]["version"] = "2", "default"
    service = prover_of(trainer.folder / "v2")
    receipts = [answer.receipt, sealed(other), sealed(unnamed)]
    report = service.replay(receipts, weights=FolderWeights(service, [run], [digest]))
    # An engine that loaded the folder itself claims no version: "default" says that nobody has named its weights.
    assert [v.status for v in report.verdicts] == ["equal", "differs", "equal"]
    assert report.verdicts[1].what == "version: claimed '2', but weights of its digest were 1"


def test_the_name_of_a_checkpoint_is_no_evidence_of_its_only_version(trainer, tmp_path):
    first = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    save_checkpoint(trainer, tmp_path / "ck" / "step-000002")
    trainer.service.commit_in_place("2", source=trainer.module.named_parameters())  # a step that has changed nothing
    second = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    trainer.commit()
    [third] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    trainer.commit()
    receipts = [answer.receipt for answer in (*first, *second)]
    digest = receipts[0]["spans"][0]["digest"]
    assert digest == receipts[1]["spans"][0]["digest"]
    for folder in ("ck", "ck/step-000002", "ck"):  # the last time with the index
        service = prover_of(trainer.folder / "v3")
        weights = FolderWeights(service, [tmp_path / folder], [digest])
        report = service.replay([*receipts, third.receipt], weights=weights)
        assert [v.status for v in report.verdicts] == ["equal", "equal", "unproven"], list(report.lines())
        assert report.verdicts[2].what.endswith("are at hand; those of versions 2 are")
    assert [entry.version for entry in read_index(tmp_path / "ck")] == [None]


def test_digests_are_kept_beside_the_folders_and_checked_when_they_are_used(trainer):
    [first] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    trainer.commit()
    receipts = [first.receipt]
    loaded: list[Path] = []

    def report_of(start: str):
        service = prover_of(trainer.folder / start)
        digests = [receipts[0]["spans"][0]["digest"]]
        weights = FolderWeights(service, [trainer.folder], digests, loaded.append)
        return service.replay(receipts, weights=weights)

    assert report_of("v2").num("equal") == 1 and [path.name for path in loaded] == ["v1"]
    assert [entry.folder for entry in read_index(trainer.folder)] == ["v1"]
    assert report_of("v2").num("equal") == 1 and len(loaded) == 1
    shutil.rmtree(trainer.folder / "v1")
    shutil.copytree(trainer.folder / "v2", trainer.folder / "v1")
    [verdict] = report_of("v2").verdicts
    assert verdict.status == "unproven"
    assert "v1 holds weights of digest" in verdict.what and verdict.what.endswith("now: remove digests.json")
    (trainer.folder / FILE).write_text("{}")
    with pytest.raises(ValueError, match="is no index of digests"):
        report_of("v2")


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])  # proven by prefills, and by the engine's steps
def test_a_damaged_folder_leaves_the_samples_of_others_proven_and_its_own_copies_are_tried(
    make_model, tmp_path, restore_threads, family
):
    torch.set_num_threads(1)
    trainer, receipts = Trainer(make_model(family), tmp_path / "weights"), []
    for _ in range(3):
        [answer] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
        receipts.append(answer.receipt)
        trainer.commit()
    digests = [receipt["spans"][0]["digest"] for receipt in receipts]
    shutil.copytree(trainer.folder / "v3", trainer.folder / "later")
    for version, digest in enumerate(digests[:2], start=1):
        add_to_index(trainer.folder, [IndexedWeights(f"v{version}", digest, "float32", str(version))])
    add_to_index(trainer.folder, [IndexedWeights("v3", digests[2], "float32", "3")])
    damaged = [trainer.folder / f"v{version}" / "model.safetensors" for version in (2, 3)]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:1000])
    service = prover_of(trainer.folder / "v4")
    report = service.replay(receipts, weights=FolderWeights(service, [trainer.folder], digests))
    assert [v.status for v in report.verdicts] == ["equal", "unproven", "equal"], list(report.lines())
    assert "cannot be loaded: " in report.verdicts[1].what and str(damaged[0].parent) in report.verdicts[1].what


def receipts_of_two_versions(trainer) -> tuple[list, list[str]]:
    """Return a receipt of one sample by each of two versions of the weights, and their digests."""
    receipts = []
    for _ in range(2):
        [answer] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
        receipts.append(answer.receipt)
        trainer.commit()
    return receipts, [receipt["spans"][0]["digest"] for receipt in receipts]


def test_the_weights_that_an_engine_began_with_are_loaded_again_from_their_folder(trainer):
    receipts, digests = receipts_of_two_versions(trainer)
    for number in range(2):  # whichever is proven first
        own, other = trainer.folder / f"v{number + 1}", trainer.folder / f"v{2 - number}"
        service = prover_of(own)
        weights = FolderWeights(service, [other], digests, origin=own)
        service.replay([receipts[1 - number]], weights=weights)
        assert service.replay(receipts, weights=weights).num("equal") == 2
        service = prover_of(own)
        weights = FolderWeights(service, [other], digests)
        service.replay([receipts[1 - number]], weights=weights)
        assert [v.status for v in service.replay([receipts[number]], weights=weights).verdicts] == ["unproven"]


def test_a_folder_whose_weights_were_replaced_is_not_taken_for_what_it_held_before(trainer):
    [first] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    trainer.commit()
    [second] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    receipts = [first.receipt, second.receipt]
    digests = [receipt["spans"][0]["digest"] for receipt in receipts]
    for version, digest in enumerate(digests, start=1):  # as a run does: its best model first, then a checkpoint
        shutil.copytree(trainer.folder / f"v{version}", trainer.folder / "best", dirs_exist_ok=True)
        names = ["best", f"v{version}"]
        add_to_index(trainer.folder, [IndexedWeights(name, digest, "float32", str(version)) for name in names])
    report = proven(trainer, receipts)
    assert report.num("equal") == 2, list(report.lines())
    shutil.rmtree(trainer.folder / "v1")
    service = prover_of(trainer.folder / "v2")
    verdicts = service.replay(receipts, weights=FolderWeights(service, [trainer.folder], digests)).verdicts
    assert [v.status for v in verdicts] == ["unproven", "equal"]
    assert verdicts[0].what.endswith("v1 had them, and is there no more")


def test_weights_that_came_after_the_index_are_found_all_the_same(trainer):
    receipts, digests = receipts_of_two_versions(trainer)
    add_to_index(trainer.folder, [IndexedWeights("v1", digests[0], "float32")])
    shutil.rmtree(trainer.folder / "v1")
    (trainer.folder / "v2").rename(trainer.folder / "v1")  # its files are older than the index
    loaded: list[Path] = []
    for said in ("v1 had them, and holds others now", "are at hand"):
        service = prover_of(trainer.folder / "v3")
        weights = FolderWeights(service, [trainer.folder], digests, loaded.append)
        verdicts = service.replay(receipts, weights=weights).verdicts
        assert [v.status for v in verdicts] == ["unproven", "equal"]
        assert verdicts[0].what.endswith(said)
    assert [path.name for path in loaded] == ["v3", "v1"]  # the second time the index knows both


def test_the_last_entry_of_a_folder_in_the_index_is_the_one_that_was_added_last(tmp_path):
    one, two = (IndexedWeights("best", digest, "float32", version) for digest, version in (("a", "1"), ("b", "2")))
    for entry in (one, two, one):
        add_to_index(tmp_path, [entry])
    assert read_index(tmp_path) == [two, one]


def test_writers_of_one_index_lose_no_entry_of_each_other(tmp_path):
    def write(who: int) -> None:
        for number in range(20):
            add_to_index(tmp_path, [IndexedWeights(f"{who}-{number}", "d", "float32")])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert len(read_index(tmp_path)) == 80 and [path.name for path in tmp_path.iterdir()] == [FILE]


def test_folders_of_weights_are_found(trainer, tmp_path):
    trainer.commit()
    assert [folder.name for folder in weight_folders(trainer.folder)] == ["v1", "v2"]
    assert [folder.name for folder in weight_folders(trainer.folder / "v2")] == ["."]
    assert model_folder([trainer.folder]) == (trainer.folder / "v1").resolve()
    with pytest.raises(ValueError, match="holds no weights"):
        weight_folders(tmp_path)
    with pytest.raises(ValueError, match="no folder of weights"):
        weight_folders(tmp_path / "none")


def test_weights_behind_a_link_out_of_the_folder_are_proven_and_kept_in_its_index(trainer, tmp_path):
    [first] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    trainer.commit()
    run, loaded = tmp_path / "run", []
    run.mkdir()
    (run / "model").symlink_to(trainer.folder / "v1")
    digests = [first.receipt["spans"][0]["digest"]]
    for _ in range(2):
        service = prover_of(trainer.folder / "v2")
        weights = FolderWeights(service, [run], digests, loaded.append)
        assert service.replay([first.receipt], weights=weights).num("equal") == 1
    elsewhere = (trainer.folder / "v1").resolve()
    assert loaded == [elsewhere] and [entry.folder for entry in read_index(run)] == [str(elsewhere)]


def test_a_trainer_that_has_moved_on_can_prove_no_sample_of_before_and_keeps_its_weights(trainer):
    [first] = trainer.service.engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6), options=ASKED)
    trainer.commit()
    before = {name: tensor.clone() for name, tensor in trainer.module.named_parameters()}
    assert trainer.service.replay([first.receipt]).num("unproven") == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.module.named_parameters())
