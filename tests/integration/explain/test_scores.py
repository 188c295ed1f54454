"""Log-probabilities of other engines: their shapes, and the token that parts first."""

import json

import pytest

from lockstep.integration.explain.recording import Recording
from lockstep.integration.explain.scores import gaps, read_scores, scores_of
from lockstep.integration.explain.sequence import TokenSequence, read_sequence

IDS, LOGPROBS = (7, 8, 9), (-0.5, -1.25, -2.0)
PAIRS = list(zip(IDS, LOGPROBS, strict=True))

SGLANG = {
    "text": "abc",
    "output_ids": [7, 8, 9],
    "meta_info": {
        "output_token_logprobs": [[value, token, None] for token, value in PAIRS],
        "input_token_logprobs": [[None, 1, None], [-3.0, 2, None]],
    },
}
VLLM_TOKENS = {
    "request_id": "generate-tokens-1",
    "prompt_token_ids": [1, 2],
    "choices": [
        {"index": 0, "token_ids": [0], "logprobs": {"content": [{"token_id": 0, "logprob": -9.0, "top_logprobs": []}]}},
        {
            "index": 1,
            "token_ids": list(IDS),
            "logprobs": {"content": [{"token_id": token, "logprob": value, "rank": 1} for token, value in PAIRS]},
        },
    ],
}
VLLM_CHAT = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "token_ids": list(IDS),
            "message": {"content": "abc"},
            "logprobs": {"content": [{"token": "x", "logprob": value, "bytes": [1]} for _, value in PAIRS]},
        }
    ],
}
VLLM_COMPLETIONS = {
    "choices": [
        {
            "prompt_token_ids": [1, 2],
            "logprobs": {"tokens": [f"token_id:{token}" for token in IDS], "token_logprobs": list(LOGPROBS)},
        }
    ]
}
LOCKSTEP = {"prompt_ids": [1, 2], "token_ids": list(IDS), "logprobs": list(LOGPROBS)}


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        (SGLANG, 0),
        ([{}, SGLANG], 1),
        (VLLM_TOKENS, 1),
        (VLLM_CHAT, 0),
        (VLLM_COMPLETIONS, 0),
        (LOCKSTEP, 0),
    ],
)
def test_scores_are_read_in_every_shape(answer, choice, tmp_path):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer, indent=1))
    scores = read_scores(path, choice)
    assert (scores.token_ids, scores.logprobs, scores.prompt_ids) == (IDS, LOGPROBS, (1, 2))


def test_lines_of_answers_are_read_by_their_number(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in (VLLM_COMPLETIONS, SGLANG)))
    assert read_scores(path, 1).logprobs == LOGPROBS


@pytest.mark.parametrize(
    ("answer", "choice", "said"),
    [
        ({}, 0, "has no log-probabilities"),
        ({"choices": [{"text": "x", "logprobs": None}]}, 0, "has no log-probabilities"),
        ({"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}]}, 0, "with their ids"),
        ({"choices": []}, 0, "choice 0 has another shape"),
        (SGLANG, 1, "one answer only"),
        ({"token_ids": [1, 2], "logprobs": [-1.0]}, 0, "1 log-probabilities of 2 tokens"),
        ({"meta_info": {"output_token_logprobs": [["x", 1]]}}, 0, "another shape"),
    ],
)
def test_other_shapes_are_refused_with_a_reason(answer, choice, said):
    with pytest.raises(ValueError, match="answer") as refusal:
        scores_of(answer, choice, "answer")
    assert said in str(refusal.value)


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "x").write_text("{")
    with pytest.raises(ValueError, match="x cannot be read as JSON"):
        read_scores(tmp_path / "x")


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_lines_whose_text_has_other_ends_of_lines_are_read(tmp_path, character):
    text = {"text": f"a{character}b"}
    for name, lines in (("answers", [SGLANG | text] * 2), ("sequences", [LOCKSTEP | text] * 2)):
        encoded = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in lines]
        (tmp_path / name).write_text("".join(one + "\r\n" for one in encoded), encoding="utf-8", newline="")
    assert read_scores(tmp_path / "answers", 1).token_ids == IDS
    assert read_sequence(tmp_path / "sequences", 1).token_ids == IDS


def test_every_token_has_its_gap():
    sequence = TokenSequence((1, 2), IDS)
    recording = Recording(logprobs={2: -0.5, 3: -1.25, 4: -2.25})
    found = gaps(recording, sequence, scores_of(SGLANG, 0, "answer"))
    assert [(gap.position, gap.token_id, gap.difference) for gap in found] == [(2, 7, 0.0), (3, 8, 0.0), (4, 9, 0.25)]
    assert [gap.ulps > 0 for gap in found] == [False, False, True]


def test_scores_of_other_tokens_are_refused():
    scores = scores_of(SGLANG, 0, "answer")
    with pytest.raises(ValueError, match="output token 1 is 8, in the sequence 5"):
        gaps(Recording(), TokenSequence(scores.prompt_ids, (7, 5, 9)), scores)
    with pytest.raises(ValueError, match=r"behind another prompt, of 2 tokens; that of the sequence has 1"):
        gaps(Recording(), TokenSequence((1,), (7, 8, 9)), scores)
