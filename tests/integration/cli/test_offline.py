"""`lockstep generate`: answers survive a kill, and equal the answers of an uninterrupted run."""

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from lockstep.integration.cli import main as cli
from lockstep.integration.cli.arguments.settings import read_settings
from lockstep.integration.cli.offline import answer_file
from lockstep.integration.cli.offline import job as offline
from lockstep.integration.cli.offline.answer_file import AnswerFile
from lockstep.integration.cli.offline.job import OfflineJob, generate, read_prompts
from lockstep.integration.failures import FileFailed
from lockstep.integration.grpo.tasks.warm_start import ModelSpec, build_model
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import GRAMMAR_SETTINGS
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support import prepared_python
from lockstep.tests.support.full_disks import no_file_above

ENGINE = EngineConfig(kv_cache=256, max_num_seqs=4)
SAMPLING = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, restore_threads):
    """Use one thread, here and in the processes started here: these models are too small for several."""
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    """Save a small random model with its tokenizer."""
    from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(ModelSpec(64, 96, 2, 4, 2, 32), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_job(model_folder, tmp_path):
    """Make a function that makes a job on an input file of JSON values: make_job(lines, sampling=...). Its output is
    answers.jsonl."""

    def make(records: list[object], **changes: object) -> OfflineJob:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = {"sampling": SAMPLING, "engine": ENGINE, **changes}
        return OfflineJob(model_folder, str(file), str(tmp_path / "answers.jsonl"), **settings)

    return make


def answers_of(job: OfflineJob) -> list[dict]:
    """Read the answers of a job, in the order of the input."""
    answers = [json.loads(line) for line in Path(job.output).read_text().splitlines()]
    return sorted(answers, key=lambda answer: (answer["index"], answer["sample"]))


SUMS = [{"prompt": f"{a}+{a + 7}="} for a in range(10, 22)]


def test_answers_carry_what_the_engine_gave(make_job):
    job = make_job([{"prompt": "12+34=", "id": "first"}, {"prompt": [1, 2, 3]}])
    assert generate(job).num_written == 2
    text, ids = answers_of(job)
    engine = Engine(job.model, job.engine)
    [expected] = engine.generate("12+34=", SamplingParams(max_new_tokens=6, ignore_eos=True, sampling_seed=0))
    assert (text["id"], text["prompt"], ids["prompt"]) == ("first", "12+34=", [1, 2, 3])
    assert "id" not in ids
    assert text["num_prompt_tokens"] == expected.num_prompt_tokens
    assert text["text"] == engine.tokenizer.decode(text["token_ids"], skip_special_tokens=True)
    assert len(text["token_ids"]) == len(text["logprobs"]) == text["num_completion_tokens"] == 6
    assert text["finish_reason"] == {"type": "length", "length": 6}
    assert len(text["weight_digest"]) == 64
    assert text["weight_version"] == expected.weight_version


def test_samples_of_a_prompt_differ_and_answers_do_not_depend_on_their_neighbours(make_job, tmp_path):
    job = make_job([*SUMS, SUMS[0]], sampling=SamplingParams(max_new_tokens=6, ignore_eos=True, n=2))
    assert generate(job).num_written == 26
    answers = answers_of(job)
    assert len({tuple(answer["token_ids"]) for answer in answers}) > 13
    alone = make_job(SUMS[:1])
    os.rename(job.output, tmp_path / "both.jsonl")
    generate(alone)
    assert answers_of(alone)[0]["logprobs"] == answers[0]["logprobs"]


def test_greedy_answers_are_those_of_the_engine(make_job):
    job = make_job(SUMS, sampling=SamplingParams(max_new_tokens=5, temperature=0.0))
    generate(job)
    completions = Engine(job.model, job.engine).generate([s["prompt"] for s in SUMS], job.sampling)
    assert [a["text"] for a in answers_of(job)] == [c.text for c in completions]
    assert [a["temperature"] for a in answers_of(job)] == [0.0] * len(SUMS)
    assert [tuple(a["logprobs"]) for a in answers_of(job)] == [c.logprobs for c in completions]


def test_a_second_run_answers_only_what_is_missing(make_job):
    job = make_job(SUMS)
    generate(job)
    whole = answers_of(job)
    lines = Path(job.output).read_text().splitlines(keepends=True)
    Path(job.output).write_text("".join(lines[:5]) + lines[5][:40])  # as a kill may leave it
    tally = generate(job)
    assert (tally.num_before, tally.num_written) == (5, len(SUMS) - 5)
    assert Path(job.output).read_text().startswith("".join(lines[:5]))
    resumed = answers_of(job)
    for answer in (*whole, *resumed):
        answer.pop("num_cached_tokens")  # the first request computed the prefix, and their order may differ
    assert resumed == whole
    assert generate(job).num_written == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingParams(max_new_tokens=7)}, "line 1: made from other --sampling settings"),
        (
            {"engine": EngineConfig(kv_cache=256, max_num_seqs=4, seed=1)},
            "line 1: made from other --engine settings",
        ),
    ],
)
def test_changed_settings_are_refused_by_name(make_job, changes, message):
    generate(make_job(SUMS[:2]))
    with pytest.raises(ValueError, match=message):
        generate(make_job(SUMS[:2], **changes))


BOOLEANS = SamplingParams(
    json_schema={"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}}
)
OTHERS = {  # of each grammar setting, a value that is not its default
    "grammar_any_whitespace": True, "jump_forward_max_rollback": 5, "jump_forward_max_blocks": 5, "block_size": 32,
}  # fmt: skip


def test_engine_settings_that_change_results_are_those_of_the_hash():
    plain, constrained = OfflineJob("m", sampling=SAMPLING), OfflineJob("m", sampling=BOOLEANS)
    # As older versions have written it: settings that they did not know are left out at their defaults.
    old = [None, True, None, 0]
    assert (
        plain.hashes["engine"]
        == constrained.hashes["engine"]
        == offline._hash(dict(zip(("dtype", "invariant", "max_model_len", "seed"), old, strict=True)))
    )

    def is_other(job: OfflineJob, **setting: object) -> bool:
        return replace(job, engine=EngineConfig(**setting)).hashes["engine"] != job.hashes["engine"]

    assert is_other(plain, k_blocks=2) and not is_other(plain, num_scheduler_steps=1)
    for name, value in {**OTHERS, "jump_forward": "exact"}.items():
        assert is_other(constrained, **{name: value}) and not is_other(plain, **{name: value}), name
    named = replace(constrained, sampling=replace(BOOLEANS, jump_forward="text"))
    assert not is_other(named, jump_forward="exact") and is_other(named, block_size=32)


def test_every_setting_that_a_receipt_has_of_a_grammar_is_in_the_hash(model_folder):
    pytest.importorskip("xgrammar")
    [answer] = Engine(model_folder, replace(ENGINE, receipts="tokens")).generate(["1+1="], BOOLEANS)
    assert {*answer.receipt["grammar"]} - {"mode", "jumps"} == {*OTHERS} == {*answer_file.GRAMMAR_SETTINGS}
    assert answer_file.GRAMMAR_SETTINGS == GRAMMAR_SETTINGS


@pytest.mark.parametrize(
    ("first", "second", "sampling"),
    [({}, {"k_blocks": 2}, SAMPLING), ({"jump_forward": "exact"}, {"grammar_any_whitespace": True}, BOOLEANS)],
)
def test_a_file_is_not_continued_under_settings_that_change_bits_or_texts(make_job, first, second, sampling):
    if sampling is BOOLEANS:
        pytest.importorskip("xgrammar")
    generate(make_job(SUMS[:1], engine=replace(ENGINE, **first), sampling=sampling))
    with pytest.raises(ValueError, match=r"made from other --engine settings .*k_blocks.*grammar_any_whitespace"):
        generate(make_job(SUMS[:2], engine=replace(ENGINE, **second), sampling=sampling))
    assert generate(make_job(SUMS[:2], engine=replace(ENGINE, **first), sampling=sampling)).num_written == 1


@pytest.mark.parametrize("number", ["99", None])
def test_answers_drawn_by_another_definition_are_refused(make_job, number):
    job = make_job(SUMS[:2])
    generate(job)
    answers = [json.loads(line) for line in Path(job.output).read_text().splitlines()]
    for answer in answers:
        answer["made_from"] = {**answer["made_from"], "draws": number}
        if number is None:  # as they were written before definitions had numbers
            del answer["made_from"]["draws"]
    Path(job.output).write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    with pytest.raises(ValueError, match="line 1: made from draws by another definition"):
        generate(make_job(SUMS[:3]))


def test_a_changed_or_shortened_input_is_refused_by_line(make_job):
    generate(make_job(SUMS[:2], engine=EngineConfig(kv_cache=256, max_num_seqs=1, max_num_batched_tokens=64)))
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2: input line 2: made from another prompt"):
        generate(make_job([SUMS[0], SUMS[5]]))
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2: answers sample 0 of input line 2"):
        generate(make_job(SUMS[:1]))


def test_changed_weights_are_refused(make_job, tmp_path):
    job = make_job(SUMS[:2])
    generate(job)
    module = transformers.AutoModelForCausalLM.from_pretrained(job.model)
    module.model.norm.weight.data[0] += 1
    other = tmp_path / "other"
    module.save_pretrained(other)
    transformers.AutoTokenizer.from_pretrained(job.model).save_pretrained(other)
    with pytest.raises(ValueError, match="line 1: made from other weights"):
        generate(OfflineJob(**{**vars(make_job(SUMS[:3])), "model": str(other)}))


def folder_of(base: str, folder: Path, name: str, old: str, new: str) -> str:
    """Copy a model's folder, with a change of one of its files."""
    shutil.copytree(base, folder)
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'),
        ("tokenizer.json", '"unk_token": "<unk>"', '"unk_token": "<pad>"'),
        ("generation_config.json", '"eos_token_id": 2', '"eos_token_id": 5'),
    ],
)
def test_another_configuration_or_tokenizer_is_refused_also_where_no_answer_is_missing(
    make_job, tmp_path, name, old, new
):
    job = make_job(SUMS[:2])
    generate(job)
    other = replace(job, model=folder_of(job.model, tmp_path / "other", name, old, new))
    with pytest.raises(ValueError, match="line 1: made from another configuration or tokenizer of the model"):
        generate(other)
    lines = [json.loads(line) for line in Path(job.output).read_text().splitlines()]
    for line in lines:  # as an older version wrote them
        del line["made_from"]["model"]
    Path(job.output).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="an older version did not write which"):
        generate(job)


def test_a_complete_output_is_not_taken_for_answers_of_other_weights(make_job, tmp_path):
    job = make_job(SUMS[:2])
    generate(job)
    shutil.copytree(job.model, tmp_path / "other")
    module = transformers.AutoModelForCausalLM.from_pretrained(job.model)
    module.model.norm.weight.data[0] += 1
    module.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="line 1: made from other weights"):
        generate(replace(job, model=str(tmp_path / "other")))


def test_answers_that_a_small_pool_cut_or_refused_are_computed_again_when_a_run_goes_on(make_job, tmp_path):
    records = [*SUMS[:2], {"prompt": [5] * 10}, {"prompt": [6] * 40}]
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    job = make_job(records, sampling=sampling, engine=replace(ENGINE, kv_cache=2))
    assert generate(job).num_ignored == 1
    assert [answer["finish_reason"]["type"] for answer in answers_of(job)] == [*["length"] * 3, "ignored"]
    assert sum("message" in answer["finish_reason"] for answer in answers_of(job)) == 4
    larger = replace(job, engine=ENGINE)
    tally = generate(larger)
    assert (tally.num_before + tally.num_written, tally.num_ignored) == (4, 0) and tally.num_before == 0
    at_once = replace(larger, output=str(tmp_path / "at_once.jsonl"))
    generate(at_once)
    assert [(a["index"], a["token_ids"]) for a in answers_of(larger)] == [
        (a["index"], a["token_ids"]) for a in answers_of(at_once)
    ]
    assert generate(larger).num_written == 0
    assert not list(tmp_path.glob(".*.partial"))


def test_a_long_file_of_answers_is_read_and_copied_line_by_line(tmp_path):
    name, made_from = tmp_path / "answers.jsonl", dict.fromkeys(answer_file._MADE_FROM, "x")
    with open(name, "w") as file:
        for index in range(200):
            reason = {"type": "stop" if index % 2 else "abort"}
            answer = {"index": index, "sample": 0, "finish_reason": reason, "made_from": made_from}
            print(json.dumps({**answer, "text": "t" * 50_000}), file=file)
        file.write('{"index": 200, "sam')
    tracemalloc.start()
    try:
        answers = AnswerFile(str(name))
        assert len(answers.answers) == 200
        answers.drop_unfinished()
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    answers.append([{"index": 200}])
    answers.close()
    assert [json.loads(line)["index"] for line in name.read_text().splitlines()] == [*range(1, 200, 2), 200]


def test_a_run_that_renewed_answers_keeps_its_file_to_itself(tmp_path):
    made_from = dict.fromkeys(answer_file._MADE_FROM, "1")
    rows = [
        {"index": index, "sample": 0, "finish_reason": reason, "made_from": made_from}
        for index, reason in enumerate(({"type": "stop"}, {"type": "ignored"}, {"type": "length", "length": 3}))
    ]
    name = tmp_path / "answers.jsonl"
    name.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "link.jsonl").symlink_to(name)
    file = AnswerFile(str(tmp_path / "link.jsonl"))
    with open(name) as before:  # as a run that opened the file just before
        file.drop_unfinished()
        with pytest.raises(BlockingIOError):
            fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
    kept = [json.loads(line)["index"] for line in name.read_text().splitlines()]
    assert kept == [index for index, _ in file.answers] == [0, 2]
    with pytest.raises(ValueError, match="another run is writing to it"):
        AnswerFile(str(name))
    file.append([rows[1]])
    file.close()
    assert [json.loads(line)["index"] for line in name.read_text().splitlines()] == [0, 2, 1]


@pytest.mark.parametrize(
    "content", ['{"prompt": "1+1="}\n', '{"prompt": "1+1="}', "notes", '{"index": 0}\n', "[]\n", "[" * 100_000 + "\n"]
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, content):
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match="line 1: not an answer of lockstep generate"):
        AnswerFile(str(file))
    assert file.read_text() == content


def test_two_runs_cannot_share_an_output(tmp_path):
    name = str(tmp_path / "answers.jsonl")
    with open(name, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run is writing to it"):
            AnswerFile(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\nnonsense\n', r"line 2: not JSON .*; --text takes lines as prompts"),
        ('\n\n{"question": "a"}\n', "line 3: field 'prompt' is missing"),
        ('{"prompt": ""}\n[]\n', "line 1: field 'prompt' must be .*; line 2: must be a JSON object"),
        ('{"prompt": [1, -2]}\n', "line 1: field 'prompt' must be"),
        ('{"prompt": [1, true]}\n', "line 1: field 'prompt' must be"),
        ('{"prompt": "\\u00e9"}\n{"prompt": "bad \\ud800"}', r"line 2: field 'prompt' has '\\ud800', half of"),
        (b'{"prompt": "a"}\n\xff\n', "line 2: not UTF-8"),
        ('{"prompt": "a"}\n' + "[" * 100_000, "line 2: nested too deeply"),
        ("\n", "holds no prompt"),
    ],
)
def test_wrong_input_names_the_line(tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_prompts(OfflineJob("model", str(file)))


def test_an_input_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"--input nowhere\.jsonl: cannot be read"):
        read_prompts(OfflineJob("model", "nowhere.jsonl"))


def test_an_input_that_is_closed_or_an_output_that_is_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed: name a file with --input"):
        read_prompts(OfflineJob("model"))
    os.mkfifo(tmp_path / "fifo")
    for name in (tmp_path, tmp_path / "fifo", "/dev/null"):
        with pytest.raises(ValueError, match=f"--output {name}: is no regular file; --output - writes to standard"):
            AnswerFile(str(name))


def test_settings_that_are_nested_too_deeply_are_named_by_their_option():
    for item in ("stop=" + "[" * 100_000, '{"stop": ' + "[" * 100_000):
        with pytest.raises(ValueError, match=r"--sampling .* is nested too deeply"):
            read_settings("--sampling", [item])


def test_text_lines_are_prompts_as_they_stand(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO('{"prompt": 1}\n\n two \r\n\u2028x'.encode())))
    prompts = read_prompts(OfflineJob("model", as_text=True))
    assert [(p.index, p.prompt) for p in prompts] == [(0, '{"prompt": 1}'), (2, " two "), (3, "\u2028x")]


def test_a_token_id_beyond_the_vocabulary_names_its_line(make_job):
    with pytest.raises(ValueError, match="line 2: prompt token ids must be integers from 0 to"):
        generate(make_job([SUMS[0], {"prompt": [10**6]}]))


def test_token_ids_beyond_the_vocabulary_are_named_before_the_first_answer(make_job):
    job = make_job([*SUMS, {"prompt": [10**6]}, *SUMS, {"prompt": [1, 10**7]}])
    few = replace(job, engine=replace(ENGINE, max_num_seqs=1))
    with pytest.raises(ValueError, match=r"line 13: prompt token ids .*, not \[1000000\]; .*line 26: .*\[10000000\]$"):
        generate(few)
    assert Path(job.output).read_text() == ""


def test_a_prompt_beyond_the_context_is_answered_as_ignored(make_job):
    job = make_job([{"prompt": [1] * 5000}, SUMS[0]])
    assert generate(job).num_ignored == 1
    ignored, answered = answers_of(job)
    assert ignored["finish_reason"]["type"] == "ignored"
    assert answered["finish_reason"]["type"] == "length"


def test_a_first_step_that_only_ignores_prompts_is_written(make_job):
    job = make_job([{"prompt": [1] * 5000}])
    assert generate(job).num_ignored == 1
    assert [answer["finish_reason"]["type"] for answer in answers_of(job)] == ["ignored"]


def wait_until(is_true, process: subprocess.Popen, seconds: float = 60.0) -> None:
    """Check repeatedly until it holds. Fails when the deadline passes or the process ends first."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "timed out"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
            pytest.fail("the process ended too early")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)],
)
def test_a_killed_run_resumes_and_ends_with_the_answers_of_an_uninterrupted_one(make_job, tmp_path, kill, code):
    records = [{"prompt": f"{a}+{b}="} for a in range(10, 30) for b in range(10, 20)]
    job = make_job(records, sampling=SamplingParams(max_new_tokens=16, ignore_eos=True))
    command = [
        sys.executable,
        "-m",
        "lockstep.integration.cli",
        "generate",
        "--model",
        job.model,
        "--input",
        job.input,
    ]
    command += ["--output", job.output, "--sampling", '{"max_new_tokens": 16, "ignore_eos": true}']
    command += ["--engine", "kv_cache=256", "max_num_seqs=4"]
    output = Path(job.output)
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job may ignore it
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 8, process)
    process.send_signal(kill)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    if kill == signal.SIGINT:
        assert errors.splitlines()[-1].startswith("lockstep: interrupted")
    kept = output.read_bytes()
    num_kept = kept.count(b"\n")
    assert 8 <= num_kept < len(records)
    tally = generate(job)  # the same settings, given as values
    assert (tally.num_before, tally.num_written) == (num_kept, len(records) - num_kept)
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    resumed = [(a["index"], a["token_ids"], a["logprobs"]) for a in answers_of(job)]
    uninterrupted = OfflineJob(**{**vars(job), "output": str(tmp_path / "again.jsonl")})
    generate(uninterrupted)
    assert resumed == [(a["index"], a["token_ids"], a["logprobs"]) for a in answers_of(uninterrupted)]


def test_standard_input_to_standard_output(model_folder):
    done = prepared_python.run(
        [sys.executable, "-m", "lockstep.integration.cli", "generate", "--model", model_folder, "--text",
         "--sampling", "max_new_tokens=3", "n=2", "--engine", "kv_cache=64", "max_num_seqs=4"],
        input="1+1=\n2+2=\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((a["index"], a["sample"], a["prompt"]) for a in answers) == [
        (0, 0, "1+1="), (0, 1, "1+1="), (1, 0, "2+2="), (1, 1, "2+2="),
    ]  # fmt: skip
    assert "4 answers written" in done.stderr
    assert "KV pool: 64 blocks" in done.stderr


def test_the_module_imports_nothing_heavy():
    assert offline.STANDARD == "-"
    code = "import sys, lockstep.integration.cli.offline.job; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_answers_that_do_not_fit_on_the_disk_are_one_error_with_the_next_step(tmp_path):
    file = AnswerFile(str(tmp_path / "answers.jsonl"))
    with no_file_above(100):
        for finish in (partial(file.append, [{"index": 0, "text": "x" * 200}]), file.close):
            with pytest.raises(FileFailed, match=r"jsonl cannot be written: File too large; .* the same command again"):
                finish()
    assert AnswerFile(str(tmp_path / "answers.jsonl")).answers == {}


def test_answers_have_the_receipts_that_the_engines_settings_ask_for(make_job, model_folder, capsys, monkeypatch):
    job = make_job(SUMS[:2], engine=replace(ENGINE, receipts="tokens"))
    generate(job)
    assert all("receipt" in json.loads(line) for line in Path(job.output).read_text().splitlines())
    assert cli.main(["replay", job.output, "--weights", model_folder, "--quiet"]) == 0
    assert "2 of 2 samples proven equal" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ValueError, match="standard output is closed: name a file with --output"):
        AnswerFile("-")
