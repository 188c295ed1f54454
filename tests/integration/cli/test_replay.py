"""`lockstep replay` on files of receipts: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.integration.cli import main as cli
from lockstep.integration.cli.replay import num_blocks
from lockstep.integration.grpo.results.samples import SampleFiles, packed, sample_path
from lockstep.integration.grpo.results.weights_kept import WeightsKept
from lockstep.integration.replay.digest_index import IndexedWeights, add_to_index
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import sealed
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a model's folder, a file of receipts with digests, and one of the samples."""
    from lockstep.tests.support.random_models import random_model

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("replay")
    module = random_model("qwen3").train()
    service = RolloutService(Engine(module, EngineConfig(kv_cache="64 blocks", k_blocks=2)))
    service.commit_in_place("1", source=module.named_parameters())
    module.save_pretrained(folder / "model")
    for kind in ("tokens", "digests"):
        object.__setattr__(service.engine.config, "receipts", kind)
        answers = service.engine.generate([[1, 2, 3], [9] * 20], SamplingParams(max_new_tokens=12, n=2))
        lines = [json.dumps({"answer": {"receipt": answer.receipt}}) for answer in answers]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
    rows = [
        {"prompt_ids": answer.prompt_ids, "token_ids": answer.token_ids, "logprobs": answer.logprobs}
        for answer in answers
    ]
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield folder
    torch.set_num_threads(num_threads)


def replay(*arguments: object) -> int:
    return cli.main(["replay", *map(str, arguments), "--quiet"])


def receipts(path: Path) -> list[dict]:
    return [json.loads(line)["answer"]["receipt"] for line in path.read_text().splitlines()]


def test_samples_of_a_file_are_proven(made, capsys):
    assert replay(made / "tokens.jsonl", "--weights", made / "model") == 0
    assert capsys.readouterr().out == ("4 of 4 samples proven equal, 0 differ, 0 unproven; 48 tokens drawn again\n")


def test_a_changed_sample_is_named_with_what_was_claimed_and_what_comes_out(made, tmp_path, capsys):
    one = receipts(made / "tokens.jsonl")[1]
    changed = {**one, "output": [*one["output"][:5], one["output"][5] ^ 1, *one["output"][6:]]}
    path = tmp_path / "changed.jsonl"
    path.write_text(json.dumps([sealed(changed)]))
    assert replay(path, "--weights", made / "model", "--json") == 1
    [verdict] = json.loads(capsys.readouterr().out)["verdicts"]
    assert (verdict["status"], verdict["what"], verdict["position"]) == ("differs", "token", 5)
    assert verdict["claimed"]["token_id"] == one["output"][5] ^ 1
    assert verdict["found"] == {
        "token_id": one["output"][5], "bits": one["logprobs"][5], "logprob": verdict["found"]["logprob"]
    }  # fmt: skip
    assert replay(path, "--weights", made / "model") == 1
    text = capsys.readouterr().out
    assert f"token differs at output position 5: claimed token {one['output'][5] ^ 1} with" in text


def test_digests_are_proven_beside_the_file_of_the_samples_only(made, capsys):
    path = made / "digests.jsonl"
    assert replay(path, "--weights", made / "model") == 3
    assert "has digests in the place of tokens: give the file that has the sample" in capsys.readouterr().out
    assert replay(path, "--weights", made / "model", "--samples", made / "samples.jsonl") == 0


def test_a_receipt_that_claims_more_tokens_than_there_can_be_takes_no_memory(made, tmp_path, capsys):
    one, other = receipts(made / "digests.jsonl")[0], receipts(made / "tokens.jsonl")[1]
    huge = sealed({**one, "output": {**one["output"], "num": 10**15}})
    path = tmp_path / "huge.jsonl"
    path.write_text("\n".join(json.dumps(receipt) for receipt in (huge, other)))
    assert replay(path, "--weights", made / "model") == 3
    assert "1 of 2 samples proven equal, 0 differ, 1 unproven" in capsys.readouterr().out


def test_a_sample_longer_than_a_small_pool_is_proven_by_steps(tmp_path):
    from lockstep.tests.support.random_models import random_model

    module = random_model("lfm2", max_position_embeddings=2048)  # whose samples are proven by the engine's own steps
    module.save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="128 blocks", receipts="tokens")))
    service.name_weights()
    [answer] = service.engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1100, ignore_eos=True))
    service.close()
    assert answer.num_completion_tokens == 1100
    (tmp_path / "long.json").write_text(json.dumps(answer.receipt))
    assert replay(tmp_path / "long.json", "--weights", tmp_path / "model") == 0
    assert replay(tmp_path / "long.json", "--weights", tmp_path / "model", "--engine", "kv_cache=64 blocks") == 3


def test_another_guarantee_is_said_first(made, tmp_path, capsys):
    one = receipts(made / "tokens.jsonl")[0]
    path = tmp_path / "other.json"
    path.write_text(json.dumps(sealed({**one, "guarantee": {**one["guarantee"], "isa": "amx"}})))
    assert replay(path, "--weights", made / "model") == 3
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("this machine's guarantee is another one: isa: amx there, ")
    assert replay(path, "--weights", made / "model", "--anyway") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl"], "none.jsonl cannot be read"),
        (["{made}/samples.jsonl"], "holds no receipts"),
        (["{made}/tokens.jsonl"], "--weights is needed"),
        (["{made}"], "has no samples"),
        (["{made}/tokens.jsonl", "--weights", "{made}/none"], "is no folder of weights"),
        (["{made}/tokens.jsonl", "--weights", "{made}/circle"], "is no folder of weights"),
        (["{made}/tokens.jsonl", "--weights", "{made}/model", "--engine", "k_blocks=0"], "k_blocks must be"),
        (["{made}/tokens.jsonl", "--step", "0"], "--step must be at least 1"),
        (["{made}/tokens.jsonl", "--step", "3", "--weights", "{made}/model"], "--step is of the folder of a run"),
    ],
)
def test_mistakes_are_named(made, arguments, said, capsys):
    try:
        code = replay(*(argument.format(made=made) for argument in arguments))
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and said in capsys.readouterr().err


def test_by_default_a_damaged_file_of_a_run_is_named_and_the_search_goes_on(made, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    shutil.copytree(made / "model", run / "model")
    [receipt, *_] = receipts(made / "tokens.jsonl")
    elsewhere = sealed({**receipt, "spans": [{**span, "digest": "0" * 64} for span in receipt["spans"]]})
    texts = {"prompt": "", "text": "", "finish_reason": None}
    files = SampleFiles(run, num_kept=0, first_step=0)
    for step, one in ((1, receipt), (2, receipt), (3, elsewhere)):
        logprobs = np.array(one["logprobs"], np.uint32).view(np.float32).tolist()
        lists = {"prompt_ids": one["prompt"], "token_ids": one["output"], "logprobs": logprobs}
        files.write(step, [packed([{**texts, **lists, "reward": 0.0, "sample": 0, "receipts": [one]}])])
    add_to_index(run, [IndexedWeights("model", receipt["spans"][0]["digest"], "float32", "1")])
    assert replay(run) == 0
    assert capsys.readouterr().err.startswith(f"{run}: step 2, the newest whose weights it has\n")
    for step in (3, 2):  # the newest, and the one of which the run has the weights
        whole = sample_path(run, step).read_bytes()
        sample_path(run, step).write_bytes(whole[: len(whole) // 2])
    assert replay(run) == 0
    passed_over, another, chosen, *_ = capsys.readouterr().err.splitlines()
    assert passed_over == f"passed over: {sample_path(run, 3)} cannot be read: it is cut off"
    assert another.startswith(f"passed over: {sample_path(run, 2)} cannot be read")
    assert chosen == f"{run}: step 1, the newest whose weights it has"
    sample_path(run, 1).write_bytes(b"")
    assert replay(run) == 2
    assert f"{sample_path(run, 1)} cannot be read" in capsys.readouterr().err.splitlines()[-1]


def test_an_end_by_the_context_of_a_runs_engines_is_proven_with_the_same_context(made, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    service = RolloutService(Engine(made / "model", EngineConfig(kv_cache="64 blocks", max_model_len=16)))
    service.name_weights()
    options = RequestOptions(return_receipt=True)
    [answer] = service.engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=40), options=options)
    assert len(answer.token_ids) == 13
    row = {"prompt_ids": answer.prompt_ids, "token_ids": answer.token_ids, "logprobs": answer.logprobs, "prompt": "",
           "text": "", "finish_reason": "length", "reward": 0.0, "sample": 0, "receipts": [answer.receipt]}  # fmt: skip
    SampleFiles(run, num_kept=0, first_step=0).write(1, [packed([row])])
    assert replay(run, "--weights", made / "model") == 3
    assert "the context of its engine, 16 tokens (max_model_len), has ended it" in capsys.readouterr().out
    WeightsKept(run, "float32").write_engine(service.engine.config, {}, made / "model")
    assert replay(run, "--weights", made / "model") == 0


def test_a_damaged_checkpoint_is_named_in_one_line(made, tmp_path, capsys):
    [receipt, *_] = receipts(made / "tokens.jsonl")
    other = sealed({**receipt, "spans": [{**span, "digest": "0" * 64} for span in receipt["spans"]]})
    (tmp_path / "other.json").write_text(json.dumps(other))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "state.json"):
        (checkpoint / name).write_text("x")
    add_to_index(tmp_path / "run", [IndexedWeights("checkpoints/step-000001", "0" * 64, "float32", "1")])
    assert replay(tmp_path / "other.json", "--weights", tmp_path / "run", "--model", made / "model") == 3
    out = capsys.readouterr().out
    assert f"cannot be loaded: {checkpoint}/model.safetensors cannot be read: " in out and "1 unproven" in out


OF_A_GRAMMAR = {
    "mode": "off", "grammar_any_whitespace": False, "jump_forward_max_rollback": 8, "jump_forward_max_blocks": 4,
    "block_size": 16, "jumps": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 7), ("block_size", 2**40), ("block_size", True), ("grammar_any_whitespace", 7),
        ("jump_forward_max_rollback", 10**6), ("jump_forward_max_blocks", 0),
    ],
)  # fmt: skip
def test_settings_that_no_engine_has_leave_the_other_samples_proven(made, tmp_path, capsys, name, value):
    one, other, *_ = receipts(made / "tokens.jsonl")
    (tmp_path / "some.json").write_text(json.dumps([one, sealed({**other, "grammar": {**OF_A_GRAMMAR, name: value}})]))
    assert replay(tmp_path / "some.json", "--weights", made / "model", "--json") in (0, 3)
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["status"] == "equal"


def test_large_blocks_take_no_larger_pool():
    receipt = {"prompt": [1] * 100, "output": [2] * 50}
    assert [num_blocks([receipt], 512, size) for size in (16, 64, 4096)] == [64, 16, 5]
    assert [num_blocks([{**receipt, "output": [2] * 5000}], 4096, size) for size in (16, 4096)] == [260, 5]


def test_receipts_of_two_engines_are_not_proven_together(made, tmp_path, capsys):
    one = receipts(made / "tokens.jsonl")[0]
    other = sealed({**one, "guarantee": {**one["guarantee"], "k_blocks": 4}})
    path = tmp_path / "two.json"
    path.write_text(json.dumps([one, other]))
    assert replay(path, "--weights", made / "model") == 2
    assert "several engines (k_blocks 2 and 4)" in capsys.readouterr().err


def test_a_receipt_that_has_lost_its_hash_is_not_passed_over(made, tmp_path, capsys):
    rows = receipts(made / "tokens.jsonl")
    del rows[1]["sha256"]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert replay(tmp_path / "some.jsonl", "--weights", made / "model") == 1
    out = capsys.readouterr().out
    assert "its hash is not that of its content" in out and "3 of 4 samples proven equal, 1 differ" in out


MALFORMED = {
    "guarantee": [1, True, {"dtype": {}}, {"dtype": "float99"}, {"k_blocks": -1}],
    "grammar": [1, True, {"mode": "text", "jumps": [], "block_size": []}],
    "spans": [-1, True, "x", [1], [None], [{"kept_kv": None}], [{"digest": {}}]],
    "settings": [{"max_new_tokens": 12, "logit_bias": {"999999": "0x1p0"}}],
    "logprobs": [[float("nan")]],
    "id": [5],
}


def test_malformed_receipts_are_named_and_the_others_are_proven(made, tmp_path, capsys):
    good = receipts(made / "tokens.jsonl")
    wrong = [{**good[0], name: value} for name, values in MALFORMED.items() for value in values]
    wrong = [one if one["logprobs"] != good[0]["logprobs"] else sealed(one) for one in wrong]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, [*wrong, *good])))
    assert replay(path, "--weights", made / "model", "--json") == 1  # several have the number of one, and so no chain
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] == len(good) and report["unproven"] == len(wrong)
    said = {"settings": "settings", "logprobs": "Out of range float values"}
    named = [said.get(name, f"{name} is no ") for name, values in MALFORMED.items() for _ in values]
    assert all(name in one["what"] for name, one in zip(named, report["verdicts"], strict=False)), report["verdicts"]


def test_characters_that_would_forge_a_line_or_cannot_be_written_are_escaped(made, tmp_path, capsys):
    one = receipts(made / "tokens.jsonl")[0]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(sealed({**one, "id": "x\n1 of 1 samples proven equal\ud800", "seed": one["seed"] ^ 1})))
    assert replay(path, "--weights", made / "model") == 1
    first, last = capsys.readouterr().out.splitlines()
    assert r"sample 0 (x\n1 of 1 samples proven equal\ud800): " in first and last.startswith("0 of 1 samples")


def test_samples_that_no_receipt_is_of_are_passed_over(made, tmp_path, capsys):
    rows = [json.loads(line) for line in (made / "samples.jsonl").read_text().splitlines()]
    other = [{**rows[0], "logprobs": [value]} for value in (None, "x", 1e300)] + [{**rows[0], "token_ids": [None, "x"]}]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("\n".join(map(json.dumps, [*other, *rows])))
    first, *rest = receipts(made / "digests.jsonl")
    shorter = sealed({**first, "output": {**first["output"], "num": 3}})
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, [shorter, *rest])))
    assert replay(path, "--weights", made / "model", "--samples", samples) == 1  # the changed one breaks the chain
    assert "3 of 4 samples proven equal, 0 differ, 1 unproven" in capsys.readouterr().out


def test_a_receipt_proves_no_other_sample_beside_it(made, tmp_path, capsys):
    one, other, *_ = receipts(made / "tokens.jsonl")
    row = {"prompt_ids": one["prompt"], "token_ids": [1, 2, 3], "logprobs": [-0.1] * 3, "receipts": [one]}
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, [row, other])))
    assert replay(tmp_path / "some.jsonl", "--weights", made / "model") == 1
    out = capsys.readouterr().out
    assert "the sample beside it is another one: it does not have the receipt's output" in out
    assert "1 of 2 samples proven equal" in out


@pytest.mark.parametrize("rest", [b'{"answer": {"receipt": {"format": 1, "sp', '{"text": "日'.encode()[:-1]])
def test_a_last_line_that_its_writer_did_not_end_is_passed_over(made, tmp_path, capsys, caplog, rest):
    path, whole = tmp_path / "some.jsonl", (made / "tokens.jsonl").read_bytes()
    path.write_bytes(whole + rest)
    assert replay(path, "--weights", made / "model") == 0
    assert "4 of 4 samples proven equal" in capsys.readouterr().out
    assert f"{path}, line 5: is passed over: its writer did not end it" in caplog.text
    for data in (whole + rest + b"\n", rest, rest + b"\n" + whole):
        path.write_bytes(data)
        assert replay(path, "--weights", made / "model") == 2
        assert f"error: {path}" in capsys.readouterr().err


def test_receipts_that_are_not_there_are_counted(made, tmp_path, capsys):
    rows = receipts(made / "tokens.jsonl")
    del rows[1:3]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert replay(tmp_path / "some.jsonl", "--weights", made / "model") == 0  # a choice of samples is no fault
    assert "2 receipts that the same engine made in between are not among these" in capsys.readouterr().out


def test_an_option_has_its_whole_name(made, capsys):
    with pytest.raises(SystemExit):
        replay(made / "tokens.jsonl", "--weight", made / "model")
    assert "unrecognized arguments: --weight" in capsys.readouterr().err
