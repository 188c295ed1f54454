"""`lockstep generate` with conversations: what the model gets is what its chat template writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.integration.cli.main import main
from lockstep.integration.cli.offline.conversations import Conversations, read_conversations
from lockstep.integration.cli.offline.job import OfflineJob, generate
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer

TEMPLATE = (
    "{% if tone %}[{{ tone }}]{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "2+2?"}]
TURN = "<|im_start|>assistant\n"


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(TEMPLATE)


@pytest.fixture
def folder(make_model, tokenizer, tmp_path, restore_threads):
    torch.set_num_threads(1)
    folder = tmp_path / "model"
    make_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generated(
    folder: Path, *options: str, lines: list[object] | None = None, text: str = "", code: int = 0
) -> list[dict]:
    """Run the command, and return its answers in the order of the prompts."""
    output, given = folder.parent / "answers.jsonl", []
    if lines is not None or text:
        path = folder.parent / "prompts.jsonl"
        path.write_text(text or "".join(json.dumps(line) + "\n" for line in lines))
        given = ["--input", str(path)]
    common = ["--model", str(folder), "--output", str(output), "--engine", "kv_cache=64 blocks", "max_num_seqs=4"]
    assert main(["generate", *common, *given, "--sampling", "max_new_tokens=3", "ignore_eos=true", *options]) == code
    if code:
        return []
    return sorted(map(json.loads, output.read_text().splitlines()), key=lambda one: one["index"])


def prompt_tokens(tokenizer, answers):
    """Return how many tokens each prompt had."""
    return [one["num_prompt_tokens"] for one in answers]


def test_a_conversation_of_a_file_is_written_by_the_template(folder, tokenizer):
    (folder.parent / "chat.json").write_text(json.dumps(QUESTION))
    options = ["--messages", str(folder.parent / "chat.json"), "--system", "Be brief.",
               "--chat-template-kwargs", '{"tone": "calm"}']  # fmt: skip
    [answer] = generated(folder, *options)
    ids = tokenizer("[calm]" + said("system", "Be brief.") + said("user", "2+2?") + TURN, add_special_tokens=False)
    with_engine = Engine(str(folder))
    [expected] = with_engine.generate(
        [ids["input_ids"]], SamplingParams(max_new_tokens=3, ignore_eos=True, sampling_seed=answer["sampling_seed"])
    )
    with_engine.close()
    assert tuple(answer["token_ids"]) == expected.token_ids and tuple(answer["logprobs"]) == expected.logprobs
    assert answer["prompt"] == [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert generated(folder, *options) == [answer], "the second run has nothing to do"


def test_lines_may_be_conversations_texts_and_tokens(folder, tokenizer):
    own = [{"role": "system", "content": "Mine."}, *QUESTION]
    lines = [{"prompt": QUESTION}, {"messages": own, "id": 7}, {"prompt": "2+2?"}, {"prompt": [65, 66]}]
    answers = generated(folder, lines=lines)
    texts = [said("user", "2+2?") + TURN, said("system", "Mine.") + said("user", "2+2?") + TURN, "2+2?"]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert prompt_tokens(tokenizer, answers) == [*lengths, 2]
    assert answers[1]["id"] == 7 and answers[2]["prompt"] == "2+2?"


@pytest.mark.parametrize("options", [["--chat"], ["--system", "Be brief."]])
def test_text_becomes_a_users_message_where_that_is_asked_for(folder, tokenizer, options):
    [answer] = generated(folder, "--text", *options, text="2+2?\n")
    before = [] if options == ["--chat"] else [{"role": "system", "content": "Be brief."}]
    assert answer["prompt"] == [*before, *QUESTION]
    written = "".join(said(one["role"], one["content"]) for one in answer["prompt"]) + TURN
    assert prompt_tokens(tokenizer, [answer]) == [len(tokenizer(written, add_special_tokens=False)["input_ids"])]


def test_only_conversations_without_an_answer_are_written_by_the_template(folder, tokenizer):
    written: list[object] = []

    class Counted(Conversations):
        def token_ids(self, messages, tokenizer):
            written.append(messages)
            return super().token_ids(messages, tokenizer)

    path, output = folder.parent / "prompts.jsonl", folder.parent / "answers.jsonl"
    several = [[{"role": "user", "content": f"{number}+2?"}] for number in range(3)]
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in several))
    job = OfflineJob(
        str(folder), str(path), str(output), sampling=SamplingParams(max_new_tokens=3, ignore_eos=True, n=2),
        engine=EngineConfig(kv_cache="64 blocks", max_num_seqs=4), conversations=Counted(),
    )  # fmt: skip
    assert generate(job).num_written == 6 and written == several
    kept = [line for line in output.read_text().splitlines(keepends=True) if json.loads(line)["index"] != 1]
    output.write_text("".join(kept))
    written.clear()
    assert generate(job).num_written == 2 and written == [several[1]]
    assert generate(job).num_written == 0 and written == [several[1]]


def test_answers_of_other_variables_or_another_system_message_are_refused(folder, tokenizer, capsys):
    generated(folder, lines=[{"prompt": QUESTION}])
    for options in (["--system", "New."], ["--chat-template-kwargs", "tone=harsh"]):
        generated(folder, *options, lines=[{"prompt": QUESTION}], code=2)
        assert "input line 1: made from another prompt" in capsys.readouterr().err


def test_answers_by_another_template_are_refused(folder, capsys):
    generated(folder, lines=[{"prompt": QUESTION}])
    (folder / "chat_template.jinja").write_text("!" + TEMPLATE)
    generated(folder, lines=[{"prompt": QUESTION}, {"prompt": QUESTION}], code=2)
    assert "line 1: made from other weights, or by another chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user"}], "line 1: message 0 must be an object with role and content"),
        ([*QUESTION, {"role": "assistant", "content": "4"}], "line 1: the last message is the assistant's"),
        ([{"role": "tool", "content": "4"}], "line 1: the chat template refuses it: no tools here"),
        ([*QUESTION, 3], "line 1: message 1 must be an object"),
        ([{"role": "user", "content": "a\ud800"}], r"line 1: its text has '\ud800', half of a surrogate pair"),
        ([], "line 1: field 'prompt' must be a text, a list of token ids or a list of messages, and not empty"),
    ],
)
def test_wrong_messages_name_their_line(folder, capsys, prompt, message):
    generated(folder, lines=[{"prompt": prompt}], code=2)
    assert message in capsys.readouterr().err


def test_messages_of_a_model_without_a_template_are_refused(folder, tokenizer, capsys):
    (folder / "chat_template.jinja").unlink()
    generated(folder, lines=[{"prompt": QUESTION}], code=2)
    assert "line 1: messages need a chat template, and the tokenizer of" in capsys.readouterr().err


def test_files_of_messages(tmp_path):
    path = tmp_path / "chat.json"
    for content in (QUESTION, [QUESTION, QUESTION]):
        path.write_text(json.dumps(content))
        assert read_conversations(str(path)) == ([QUESTION] if content == QUESTION else [QUESTION] * 2)
    for content, why in (("{}", "must be a list of messages"), ("[]", "must be a list of messages"), ("[", "not JSON"),
                         ("[" * 100_000, "not JSON")):  # fmt: skip
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"--messages .*chat\.json: {why}"):
            read_conversations(str(path))
    with pytest.raises(ValueError, match=r"--messages .*nowhere\.json: cannot be read"):
        read_conversations(str(tmp_path / "nowhere.json"))


def test_an_answer_may_be_continued():
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert Conversations(template_kwargs={"continue_final_message": True}).opened(begun) == begun


def test_a_file_of_messages_takes_the_place_of_the_input(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--model", "m", "--messages", "chat.json", "--text"])
    assert "--messages takes the place of --input" in capsys.readouterr().err
