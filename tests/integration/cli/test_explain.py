"""`lockstep explain`: its exit codes, its text and its JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.integration.cli import main as cli
from lockstep.integration.explain.runs import run_way
from lockstep.integration.explain.sequence import TokenSequence, sequence_of
from lockstep.integration.explain.ways import Way
from lockstep.integration.grpo.results.samples import SampleFiles, packed
from lockstep.tests.support import prepared_python
from lockstep.tests.support.random_models import random_model

SEQUENCE = TokenSequence(tuple(range(1, 21)), tuple(range(30, 40)))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("explain") / "model"
    random_model("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logprobs(model) -> list[float]:
    return list(run_way(Way(), SEQUENCE, model).logprobs.values())


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "sequence.json"
    SEQUENCE.save(path)
    return path


def explained(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["explain", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_equal_ways_are_said_to_be_equal(model, file, capsys):
    code, out, err = explained(capsys, file, "--model", model)
    assert code == 0
    assert "73 operations at 29 positions" in out
    assert "equal      every operation at every position, bit for bit" in out
    assert "running decode" in err


@pytest.mark.parametrize("family", ["deepseek_v4", "inkling2", "minimax", "zaya"])
def test_ways_of_families_whose_layers_have_other_parts_are_equal(tmp_path, file, capsys, family):
    random_model(family).save_pretrained(tmp_path / "model")
    code, out, _ = explained(capsys, file, "--model", tmp_path / "model")
    assert code == 0 and "equal      every operation at every position, bit for bit" in out


def test_the_first_operation_row_and_element_are_named(model, file, capsys):
    code, out, _ = explained(capsys, file, "--model", model, "--way", "decode", "--way", "decode,k_blocks=2")
    assert code == 1
    [parts] = [line for line in out.splitlines() if line.startswith("parts")]
    assert parts.split(maxsplit=1)[1] == "layer 0, self_attn.o_proj"
    assert "row 0 (token 1), element 0: " in out
    assert " apart\n" in out
    assert " of 29 rows differ, by up to " in out
    assert "at last    log-probability" in out
    code, out, _ = explained(capsys, file, "--model", model, "--way", "decode", "--way", "decode,k_blocks=2", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["equal"] is False
    assert found["first"]["operation"] == {"layer": 0, "name": "self_attn.o_proj", "what": "result"}
    assert found["first"]["first"] != found["first"]["second"]
    assert len(found["operations"]) == 73


def test_reported_log_probabilities_are_compared_with_the_first_way(model, logprobs, tmp_path, capsys):
    path = tmp_path / "claimed.json"
    TokenSequence(SEQUENCE.prompt_ids, SEQUENCE.token_ids, tuple(logprobs)).save(path)
    code, out, _ = explained(capsys, path, "--model", model)
    assert code == 0
    assert "reported   all 10 log-probabilities are the first way's, bit for bit" in out
    wrong = [*logprobs[:4], logprobs[4] + 0.25, *logprobs[5:]]
    TokenSequence(SEQUENCE.prompt_ids, SEQUENCE.token_ids, tuple(wrong)).save(path)
    code, out, _ = explained(capsys, path, "--model", model)
    assert code == 1
    assert "1 of 10 log-probabilities part, the first at token 24 (34)" in out
    assert "+0.25 nats" in out
    assert explained(capsys, path, "--model", model, "--tolerance", "0.3")[0] == 0


def test_the_temperature_of_the_command_goes_before_that_of_the_file(model, tmp_path, capsys):
    own = list(
        run_way(Way(), TokenSequence(SEQUENCE.prompt_ids, SEQUENCE.token_ids, temperature=0.5), model).logprobs.values()
    )
    row = {"prompt_ids": SEQUENCE.prompt_ids, "token_ids": SEQUENCE.token_ids, "logprobs": own}
    for name, values in (("plain", {}), ("other", {"temperature": 2.0})):
        (tmp_path / name).write_text(json.dumps({**row, **values}))
        code, out, _ = explained(capsys, tmp_path / name, "--model", model, "--temperature", "0.5")
        assert code == 0 and "all 10 log-probabilities are the first way's, bit for bit" in out
    assert explained(capsys, tmp_path / "other", "--model", model)[0] == 1


@pytest.mark.parametrize(
    "known",
    [
        {"temperature": 0.5},
        {"receipt": {"settings": {"temperature": (0.5).hex()}}},
        {"receipts": [{"settings": {"temperature": (0.5).hex()}}]},
    ],
    ids=lambda known: next(iter(known)),
)
def test_the_temperature_of_a_sample_is_its_own_or_its_receipts(model, tmp_path, capsys, known):
    sequence = TokenSequence(SEQUENCE.prompt_ids, SEQUENCE.token_ids, temperature=0.5)
    own = list(run_way(Way(), sequence, model).logprobs.values())
    row = {"prompt_ids": SEQUENCE.prompt_ids, "token_ids": SEQUENCE.token_ids, "logprobs": own}
    (tmp_path / "row").write_text(json.dumps({**row, **known}))
    code, out, _ = explained(capsys, tmp_path / "row", "--model", model)
    assert code == 0 and "is assumed" not in out
    (tmp_path / "row").write_text(json.dumps(row))
    code, out, _ = explained(capsys, tmp_path / "row", "--model", model)
    assert code == 1 and "temperature 1 is assumed of its log-probabilities" in out


def test_a_greedy_sample_and_one_with_the_default_settings_are_of_temperature_1():
    row = {"prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0]}
    for known in ({"temperature": 0}, {"temperature": 1e-9}, {"receipt": {"settings": {"max_new_tokens": 4}}}):
        sequence = sequence_of({**row, **known}, "row")
        assert sequence.temperature == 1.0 and sequence.is_temperature_known
    assert not sequence_of({**row, "receipt": {"settings": {"temperature": []}}}, "row").is_temperature_known
    with pytest.raises(ValueError, match="temperature must be above 0"):
        sequence_of({**row, "temperature": -1.0}, "row")


def test_another_engines_answer_brings_its_own_sequence(model, logprobs, tmp_path, capsys):
    pairs = list(zip(SEQUENCE.token_ids, logprobs, strict=True))
    triples = [[value + (0.125 if token == 33 else 0.0), token, None] for token, value in pairs]
    prompt = [[None, SEQUENCE.prompt_ids[0], None], *([-1.0, token, None] for token in SEQUENCE.prompt_ids[1:])]
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"meta_info": {"output_token_logprobs": triples, "input_token_logprobs": prompt}}))
    code, out, _ = explained(capsys, "--scores", path, "--model", model)
    assert code == 1
    assert "scores     1 of 10 log-probabilities part, the first at token 23 (33)" in out
    code, out, _ = explained(capsys, "--scores", path, "--model", model, "--json")
    assert [gap["difference"] for gap in json.loads(out)["scores"]][3] == 0.125


def test_a_sample_of_a_run_is_explained(model, logprobs, tmp_path, capsys):
    other = {"prompt_ids": [1], "token_ids": [2], "logprobs": [0.0], "prompt": "", "text": "", "sample": 0, "reward": 0}
    row = {"prompt_ids": SEQUENCE.prompt_ids, "token_ids": SEQUENCE.token_ids, "logprobs": logprobs}
    SampleFiles(tmp_path, 0, 0).write(2, [packed([other, {**other, **row}])])
    code, out, _ = explained(capsys, tmp_path, "--sample", 1, "--model", model, "--way", "decode", "--way", "prefill")
    assert code == 0
    assert f"sample 1 of step 2 of {tmp_path}" in out


def test_changed_weights_are_found_between_two_folders(model, file, tmp_path, capsys):
    changed = random_model("qwen3")
    with torch.no_grad():
        weight = changed.model.layers[1].mlp.up_proj.weight
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf))
    changed.save_pretrained(tmp_path / "changed")
    ways = ["--way", "decode", "--way", f"decode,model={tmp_path / 'changed'}"]
    code, out, _ = explained(capsys, file, "--model", model, *ways)
    assert code == 1
    assert "parts      layer 1, mlp.up_proj" in out
    assert ", element 3: " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FILE"], "--model is missing"),
        (["runs/none"], "there is no file or folder runs/none"),
        (["--model", "MODEL"], "there is no sequence"),
        (["FILE", "--model", "MODEL", "--way", "decode"], "--way stands twice, not 1 times"),
        (["FILE", "--model", "MODEL", "--way", "decode", "--way", "wrong"], "'wrong' is none of"),
        (["FILE", "--model", "nowhere"], "holds no config.json"),
        (["--text", "1 + 2", "--model", "nowhere"], "there is no model folder 'nowhere': download a model of the Hub"),
        (["nothing.json", "--model", "MODEL"], "nothing.json cannot be read"),
        (["DEEP", "--model", "MODEL"], "cannot be read as JSON"),
        (["NULL", "--model", "MODEL"], "logprobs must be a list of numbers"),
        (["FILE", "--model", "MODEL", "--sample", "3"], "has samples 0 to 0, not 3"),
        (["EMPTY", "--model", "MODEL"], "EMPTY is empty"),
        (["LIST", "--model", "MODEL", "--sample", "1"], "sample 1 is no JSON object"),
        (["--text", "a b", "--model", "MODEL"], "needs a tokenizer"),
        (["FILE", "--text", "a", "--model", "MODEL"], "--text takes the place of SOURCE"),
        (["FILE", "--model", "MODEL", "--at-least", "0"], "--at-least must be at least 1"),
        (["FILE", "--model", "MODEL", "--at-least", "9" * 30], "at least 1 and below 2**62, not 99"),
        (["FILE", "--model", "MODEL", "--tolerance", "nan"], "--tolerance must be a number from 0 on, not nan"),
        (["FILE", "--model", "MODEL", "--tolerance", "-1"], "--tolerance must be a number from 0 on, not -1"),
        (["FILE", "--model", "MODEL", "--temperature", "inf"], "--temperature must be above 0"),
        (["FILE", "--model", "MODEL", "--step", "3"], "--step is of the folder of a run"),
        (["FILE", "--model", "MODEL", "--temperature", "0"], "--temperature must be above 0, not 0.0"),
        (["LONG", "--model", "MODEL"], "the sequence has 605 tokens, and the model's context has 512"),
        (["FILE", "--model", "MODEL", "--scores", "OTHER"], "the scores are behind another prompt, of 2 tokens"),
        (["FILE", "--model", "MODEL", "--way", "decode", "--way", "transformers,attention=none"], "attention=none"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments, said, model, file, tmp_path, capsys):
    paths = {"FILE": str(file), "MODEL": str(model)}
    files = {
        "DEEP": "[" * 100_000,
        "EMPTY": "",
        "LIST": "{}\n[]\n",
        "NULL": '{"prompt_ids":[1],"token_ids":[2],"logprobs":[null]}',
        "LONG": json.dumps({"prompt_ids": [1] * 600, "token_ids": [2] * 5}),
        "OTHER": json.dumps({"prompt_ids": [1, 2], "token_ids": SEQUENCE.token_ids, "logprobs": [-1.0] * 10}),
    }
    for name, text in files.items():
        paths[name] = str(tmp_path / name)
        (tmp_path / name).write_text(text)
    given = [paths.get(word, word) for word in arguments]
    try:
        code = cli.main(["explain", *given])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_text_is_scored_from_its_second_token_on(bpe_tokenizer, tmp_path, capsys):
    random_model("qwen3", vocab_size=1000).save_pretrained(tmp_path)
    bpe_tokenizer.save_pretrained(tmp_path)
    ways = ["--way", "prefill", "--way", "trainer"]
    code, out, _ = explained(capsys, "--text", "the name of the value", "--model", tmp_path, *ways)
    assert code == 0
    num = len(bpe_tokenizer("the name of the value")["input_ids"])
    assert f"sequence   text: 1 tokens and {num - 1} after them" in out


@pytest.mark.parametrize("way", ["decode", "trainer", "transformers"])
def test_tokens_beyond_the_vocabulary_are_refused(way, model, tmp_path, capsys):
    TokenSequence((1, 2), (3, 256, 4)).save(tmp_path / "x")
    code, _, err = explained(capsys, tmp_path / "x", "--model", model, "--way", way, "--way", "decode")
    assert code == 2
    assert "256" in err.splitlines()[-1]


@pytest.fixture
def checkpoint(model, tmp_path) -> Path:
    """Return a checkpoint of a run that began with the model's folder: weights without a configuration."""
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    shutil.copy(model / "model.safetensors", folder)
    (folder / "state.json").write_text("{}")
    (tmp_path / "run" / "engine.json").write_text(json.dumps({"format": 1, "model": str(model)}))
    return folder


@pytest.mark.parametrize("other", ["trainer", "decode,tp=2"])
def test_a_checkpoint_of_a_run_has_the_configuration_of_its_model(model, checkpoint, file, capsys, other):
    ways = ("--way", f"decode,model={model}", "--way", other)
    code, out, err = explained(capsys, file, "--model", checkpoint, *ways)
    assert (code, "lockstep-explain" in out + err) == (0, False), err


def test_a_checkpoint_whose_run_names_no_model_is_refused(checkpoint, file, capsys):
    (checkpoint.parent.parent / "engine.json").unlink()
    code, _, err = explained(capsys, file, "--model", checkpoint)
    assert code == 2 and f"model folder {str(checkpoint)!r} holds no config.json" in err
    (checkpoint.parent.parent / "engine.json").write_text("{}")
    code, _, err = explained(capsys, file, "--model", checkpoint)
    assert code == 2 and "engine.json does not say what the run's engines are" in err


def test_sigterm_ends_it_with_all_that_it_has_begun(tmp_path):
    """While it reads its sequence; ranks and temporary folders of later moments end by the same exception."""
    path = tmp_path / "sequence"
    os.mkfifo(path)
    code = (
        "from lockstep.integration.cli import main as cli\n"
        f"try:\n    cli.main(['explain', {str(path)!r}, '--model', 'none'])\nfinally:\n    print('cleaned up')"
    )
    explain = prepared_python.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with explain:
        with open(path, "w"):  # which waits until it is read
            explain.send_signal(signal.SIGTERM)
        # Closed, since Python hears of a signal only when a call returns that has begun just before it.
        said, _ = explain.communicate(timeout=60)
    assert (explain.returncode, said) == (143, "cleaned up\n")
