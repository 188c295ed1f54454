"""Tests of prompts that are conversations."""

from __future__ import annotations

import json

import pytest

from lockstep.integration.grpo.settings.sections import DataSettings
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.grpo.tasks.chat import ChatPrompts
from lockstep.integration.grpo.tasks.problems import Problem, load_problems

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "({{ m.role }}){{ m.content }}\n{% endfor %}{% if add_generation_prompt %}(assistant){{ mood }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def tokenizer():
    made = build_tokenizer()
    made.chat_template = TEMPLATE
    return made


def rows(tmp_path, *lines, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_messages_become_the_tokens_of_the_chat_template_with_what_stands_before_them(tmp_path, tokenizer):
    shown = rows(tmp_path, {"prompt": "1+1?", "answer": 2}, name="shown.jsonl")
    path = rows(tmp_path, {"prompt": QUESTION, "answer": 4}, {"prompt": "3+3?", "answer": "6"},
                {"prompt": [{"role": "system", "content": "own"}, *QUESTION], "answer": 4})  # fmt: skip
    data = DataSettings(path=path, system_prompt="be brief", few_shot_path=shown, chat_template_kwargs={"mood": "!"})
    problems = ChatPrompts(data, tokenizer).written(load_problems(path))
    before = "(user)1+1?\n(assistant)2\n"
    assert [problem.prompt for problem in problems] == [
        f"<bos>(system)be brief\n{before}(user)2+2?\n(assistant)!",
        f"<bos>(system)be brief\n{before}(user)3+3?\n(assistant)!",
        f"<bos>(system)own\n{before}(user)2+2?\n(assistant)!",
    ]
    for problem in problems:
        ids = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
        assert problem.model_input == ids and ids.count(tokenizer.bos_token_id) == 1
    assert problems[0].whole_row() == {"prompt": QUESTION, "answer": 4}
    whole = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"},
             {"role": "assistant", "content": "2"}, *QUESTION]  # fmt: skip
    encoded = tokenizer.apply_chat_template(whole, add_generation_prompt=True, mood="!", return_dict=True)
    assert problems[0].model_input == list(encoded["input_ids"])


def test_a_system_message_comes_first_wherever_it_comes_from(tmp_path, tokenizer):
    tokenizer.chat_template = (  # as Qwen3.5 has it
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + TEMPLATE
    )
    own = [{"role": "system", "content": "own"}, *QUESTION]
    path = rows(tmp_path, {"prompt": own, "answer": 4}, {"prompt": QUESTION, "answer": 4})
    shown = rows(
        tmp_path, {"prompt": [{"role": "system", "content": "its"}, *QUESTION], "answer": 4}, name="shown.jsonl"
    )
    before, question = "(user)2+2?\n(assistant)4\n", "(user)2+2?\n(assistant)"
    for job, system in (("", ""), ("job's", "(system)job's\n")):
        data = DataSettings(path=path, system_prompt=job, few_shot_path=shown)
        first, second = ChatPrompts(data, tokenizer).written(load_problems(path))
        assert first.prompt == f"<bos>(system)own\n{before}{question}"
        assert second.prompt == f"<bos>{system}{before}{question}"


def test_text_stays_text_unless_it_is_to_be_a_message(tokenizer):
    plain = Problem("3+3?", "6")
    assert ChatPrompts(DataSettings(path="p"), tokenizer).written([plain]) == [plain]
    assert plain.model_input == "3+3?" and plain.whole_row() == {"prompt": "3+3?", "answer": "6"}
    [message] = ChatPrompts(DataSettings(path="p", chat=True), tokenizer).written([plain])
    assert message.prompt == "<bos>(user)3+3?\n(assistant)"


def test_what_the_template_or_the_file_refuses_is_named(tmp_path, tokenizer):
    tool = rows(tmp_path, {"prompt": [{"role": "tool", "content": "x"}], "answer": "y"})
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template refuses it: no tools"):
        ChatPrompts(DataSettings(path=tool), tokenizer).written(load_problems(tool))
    with pytest.raises(ValueError, match="messages need a chat template"):
        ChatPrompts(DataSettings(path=tool), build_tokenizer()).written(load_problems(tool))
    shown = rows(tmp_path, {"prompt": "1+1?"}, name="shown.jsonl")
    with pytest.raises(ValueError, match=r"shown.jsonl:1: a row that is shown needs an answer"):
        ChatPrompts(DataSettings(path=tool, few_shot_path=shown, answer_field=""), tokenizer)
    for prompt, why in (
        ([], "holds no message"),
        (["hello"], "message 0 must be an object with role and content, not a string"),
        ([{"role": "user"}], "message 0 must be an object with role and content"),
        ([*QUESTION, {"role": "assistant", "content": "4"}], "the last message is the assistant's"),
    ):
        with pytest.raises(ValueError, match=why):
            load_problems(rows(tmp_path, {"prompt": prompt, "answer": "4"}))
    with pytest.raises(ValueError, match="field 'answer' is missing"):
        load_problems(shown)
    assert load_problems(shown, answer_field="")[0].answer == ""
    assert DataSettings(chat=True).faults() == [("chat", "needs data.path, data.sources or data.reasoning_gym")]
