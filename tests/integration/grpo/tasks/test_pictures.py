"""The job trains a model of images and text on pictures of its rows: the gap is 0.0, and its samples can be proven."""

from __future__ import annotations

import base64
import json
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL.Image")
from PIL import Image

from lockstep.integration.cli import replay
from lockstep.integration.grpo.job import GrpoJob
from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.results.run_folder import prepare_folder
from lockstep.integration.grpo.results.sample_images import images_path, read_images
from lockstep.integration.grpo.results.samples import read_samples, sample_path
from lockstep.integration.grpo.settings.config import JobConfig, load_config
from lockstep.integration.grpo.tasks.picture_reader import PictureReader
from lockstep.integration.grpo.tasks.pictures import opened, placed
from lockstep.integration.grpo.tasks.problems import load_problems
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.images.pictures import pixels_of, sent_picture
from lockstep.integration.ranks import Ranks, process_group
from lockstep.rollout.media.reader import images_digest
from lockstep.tests.optional_packages import needs_transformers

EXAMPLE = Path(__file__).parents[4] / "examples/pictures"
SMALL = ["rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=3", "data.num_heldout=4"]
RANKS = Ranks(0, 1, torch.device("cpu"))
STEPS = ("reward_mean", "loss", "grad_norm", "weight_digest", "logprob_gap")


@pytest.fixture(autouse=True)
def _modules_that_take_features_of_images() -> None:
    needs_transformers(5, 23)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model and the rows of the example."""
    needs_transformers(5, 23)
    folder = tmp_path_factory.mktemp("pictures")
    given, sys.argv = sys.argv, ["make.py", str(folder)]
    try:
        runpy.run_path(str(EXAMPLE / "make.py"), run_name="__main__")
    finally:
        sys.argv = given
    return folder


@pytest.fixture
def run(example: Path, tmp_path: Path, restore_threads: None) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Yield a function that runs the job of the example in this process, and returns its metrics."""
    torch.set_num_threads(1)

    def job(name: str, *settings: str, resume: bool = False) -> list[dict[str, Any]]:
        config = config_of(example, tmp_path, f"run.name={name}", *settings)
        check_job(config, 1, resume=resume)
        prepare_folder(config.folder, resume=resume)
        with closing(GrpoJob(config, RANKS, resume=resume)) as made:
            made.run()
        lines = (config.folder / "metrics.jsonl").read_text().splitlines()
        return [{key: line[key] for key in STEPS} for line in map(json.loads, lines) if "logprob_gap" in line]

    with process_group(RANKS, 60):
        yield job


def config_of(example: Path, runs: Path, *settings: str) -> JobConfig:
    own = [
        f"model.path={example}/model",
        f"data.path={example}/rows.jsonl",
        f"reward={EXAMPLE}/reward.py:names_the_colour",
    ]
    return load_config(EXAMPLE / "config.toml", [*own, f"run.dir={runs}", *SMALL, *settings])


@pytest.mark.parametrize("is_file", [True, False])
def test_pictures_are_upright_as_the_server_sees_them(is_file: bool, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.linear_gradient("L").resize((6, 4)).save(tmp_path / "turned.png", exif=exif)
    data = f"data:image/png;base64,{base64.b64encode((tmp_path / 'turned.png').read_bytes()).decode()}"
    [served] = pixels_of([sent_picture(data, "url", HttpConfig())], HttpConfig())
    found = opened(str(tmp_path / "turned.png") if is_file else Image.open(tmp_path / "turned.png"))
    assert (found.size, found.mode, found.tobytes()) == ((4, 6), "RGB", served.tobytes())


def test_a_run_has_no_gap_keeps_its_images_and_its_samples_are_proven(run, tmp_path, capsys):
    settings = ("run.checkpoint_every=1", "checkpoints.keep=0", "run.rollouts_keep=2", "rollout.temperature=0.8")
    lines = run("kept", "run.num_steps=3", *settings)
    assert [line["logprob_gap"] for line in lines] == [0.0] * 3 and len({line["weight_digest"] for line in lines}) == 3
    folder = tmp_path / "kept"
    assert not images_path(sample_path(folder, 1)).exists() and not sample_path(folder, 1).exists()
    rows = read_samples(folder, 3)
    assert {row["temperature"] for row in rows} == {0.8}
    kept = {images_digest(one) for one in read_images(images_path(sample_path(folder, 3)))}
    assert {digest for row in rows for digest in row["images"]} == kept and len(kept) == 4
    assert replay.run([str(folder), "--step", "3", "--quiet"]) == 0
    assert "16 of 16 samples proven equal" in capsys.readouterr().out
    receipts = tmp_path / "receipts.jsonl"
    receipts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [str(receipts), "--weights", str(folder), "--quiet"]
    assert replay.run([*given, "--images", str(images_path(sample_path(folder, 3)))]) == 0 < replay.run(given) == 3
    capsys.readouterr()
    images_path(sample_path(folder, 3)).unlink()
    assert replay.run([str(folder), "--step", "3", "--quiet"]) == 3
    assert "which are not at hand" in capsys.readouterr().out
    assert (folder / "model/processor_config.json").is_file()
    read = PictureReader(str(folder / "model"))("<image> what", [Image.new("RGB", (16, 16))])
    assert read["input_ids"].shape == (1, 5)


def test_a_resumed_run_is_the_whole_one(run):
    whole = run("whole", "run.num_steps=4", "run.checkpoint_every=2")
    run("parts", "run.num_steps=2", "run.checkpoint_every=2")
    assert run("parts", "run.num_steps=4", "run.checkpoint_every=2", resume=True) == whole


def test_a_run_ahead_is_the_one_without(run, tmp_path):
    settings = "run.num_steps=4", "train.learning_rate=3e-2", "engine.max_num_seqs=6"
    plain = run("plain", *settings)
    assert run("ahead", *settings, "rollout.ahead=2") == plain
    lines = (tmp_path / "ahead/metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("verified_tokens", 0) for line in lines) > 0


def test_a_run_of_the_example_learns_to_name_colours(run):
    more = ["rollout.prompts_per_step=16", "rollout.group_size=8", "rollout.max_new_tokens=1", "run.num_steps=25"]
    lines = run("learns", *more)
    assert {line["logprob_gap"] for line in lines} == {0.0}
    first, last = (sum(line["reward_mean"] for line in part) / 3 for part in (lines[:3], lines[-3:]))
    assert last > first + 0.4, [line["reward_mean"] for line in lines]


def test_the_token_of_images_is_never_drawn(run, example, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(example / "model", model)
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    [head] = [name for name in tensors if name.endswith("lm_head.weight")]
    tensors[head] = tensors[head] * 0.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    lines = run("banned", "run.num_steps=1", f"model.path={model}", "rollout.max_new_tokens=30")
    rows = read_samples(tmp_path / "banned", 1)
    drawn = [token for row in rows for token in row["token_ids"]]
    assert len(drawn) > 100 and 1 not in drawn and 2 in drawn and lines[0]["logprob_gap"] == 0.0
    assert rows[0]["logprobs"][0] == pytest.approx(-torch.tensor(12.0).log().item()), "of the whole vocabulary"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engines=separate", "sync=tensor"], 'engines must be "local" for prompts with pictures'),
        (["rollout.max_new_tokens=60"], r"rows.jsonl:\d+: the prompt has 7 tokens"),
    ],
)
def test_jobs_that_cannot_train_on_pictures_are_refused_before_the_start(example, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        check_job(config_of(example, tmp_path, *settings), 1)


def test_rows_without_pictures_beside_others_need_a_trainer_that_shards_nothing(example, tmp_path):
    rows = [json.loads(line) for line in (example / "rows.jsonl").read_text().splitlines()]
    rows[7] |= {"prompt": "what colour ?", "images": []}
    path = example / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = f"data.path={path}", "trainer=fsdp2"
    check_job(config_of(example, tmp_path, *settings), 1)
    with pytest.raises(ValueError, match=r"for rows with and without pictures on 2 ranks, as .*mixed.jsonl:8 is"):
        check_job(config_of(example, tmp_path, *settings), 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "images": ["no.png"]}, "rows.jsonl:1: there is no picture .*no.png"),
        ({"prompt": "a", "images": 3}, "field 'images' must be a path or a list of paths, not a number"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "the messages have places for 1 pictures, and there are 0",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}], "images": ["a.png"]},
            "field 'images' has pictures, and the messages name their own",
        ),
    ],
)
def test_rows_whose_pictures_do_not_fit_are_named(tmp_path, row, message):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"answer": "b", **row}) + "\n")
    with pytest.raises(ValueError, match=message):
        load_problems(tmp_path / "rows.jsonl", images_field="images")


def test_pictures_of_messages_and_of_a_field_stand_in_their_places(tmp_path):
    for name in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    content = [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}, {"type": "image", "path": "b.png"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": "x"}))
    [problem] = load_problems(tmp_path / "rows.jsonl")
    paths = (str(tmp_path / "a.png"), str(tmp_path / "b.png"))
    assert problem.pictures == paths
    assert [part.get("image") for part in problem.messages[0]["content"]] == [None, *paths]
    [message] = placed([{"role": "user", "content": "what"}], ["c"])
    assert message["content"] == [{"type": "image", "image": "c"}, {"type": "text", "text": "what"}]
