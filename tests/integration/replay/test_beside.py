"""Samples beside receipts: those of other tokens or log-probabilities are told from the receipt's."""

from __future__ import annotations

import pytest

from lockstep.integration.replay.beside import others_beside
from lockstep.integration.replay.reading import receipts_in
from lockstep.rollout.receipt import float_bits, sealed

LOGPROBS = [-0.5, -1.25, -0.0, -3.0]


def receipt(prompt: list[int], output: list[int], logprobs: list[float] = LOGPROBS) -> dict:
    bits = float_bits(logprobs[: len(output)])
    return sealed({"prompt": prompt, "output": output, "logprobs": bits, "spans": [], "seed": 1})


ONE = receipt([1, 2], [7, 8, 9, 7])
ROW = {"prompt_ids": [1, 2], "token_ids": [7, 8, 9, 7], "logprobs": LOGPROBS, "receipt": ONE}
GENERATED = {"text": "x", "output_ids": [7, 8, 9, 7], "meta_info": {"id": "a", "receipt": ONE}}
CHOICE = {
    "prompt_token_ids": [1, 2], "token_ids": [7, 8, 9, 7], "response_token_ids": [7, 8, 9, 7],
    "logprobs": {"content": []}, "receipt": ONE,
}  # fmt: skip
CHUNK = {"choices": [{"token_ids": [9, 7], "logprobs": None, "receipt": ONE}]}


@pytest.mark.parametrize("row", [ONE, ROW, GENERATED, CHOICE, CHUNK, {"sample": ROW}, {**ROW, "receipt": [ONE]}])
def test_samples_of_their_receipts_are_no_others(row):
    assert receipts_in([row]) == [ONE] and others_beside([row]) == {}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({**ROW, "token_ids": [1, 2, 3]}, "output"),
        ({**ROW, "token_ids": [7, 8, 9]}, "output"),
        ({**ROW, "token_ids": [9, 7], "logprobs": LOGPROBS[2:]}, "output"),
        ({**ROW, "prompt_ids": [1, 3]}, "prompt"),
        ({**ROW, "logprobs": [*LOGPROBS[:2], 0.0, -3.0]}, "log-probabilities"),
        ({**ROW, "logprobs": [None] * 4}, "log-probabilities"),
        ({**ROW, "logprobs": []}, "log-probabilities"),
        ({**GENERATED, "output_ids": [7, 8, 9, 6]}, "output"),
        ({**CHOICE, "response_token_ids": [7]}, "output"),
        ({**CHUNK["choices"][0], "token_ids": [8, 7]}, "output"),
    ],
)
def test_another_sample_beside_a_receipt_is_named(row, what):
    found = others_beside([ROW, row, GENERATED])
    assert list(found) == [1] and found[1].status == "differs"
    assert found[1].what == f"the sample beside it is another one: it does not have the receipt's {what}"


FIRST, SECOND = receipt([1, 2], [7, 8]), receipt([1, 2, 7, 8, 50], [9, 7], LOGPROBS[2:])
TURNS = {
    "prompt_ids": [1, 2], "token_ids": [7, 8, 9, 7], "logprobs": LOGPROBS, "num_turns": 2,
    "receipts": [FIRST, SECOND],
}  # fmt: skip


def test_the_receipts_of_turns_are_of_the_tokens_of_their_sample_one_after_another():
    assert others_beside([TURNS]) == {}
    other = [
        {**TURNS, "token_ids": [7, 8, 9, 6]},
        {**TURNS, "logprobs": [*LOGPROBS[:3], -4.0]},
        {**TURNS, "receipts": [SECOND, FIRST]},
        {**TURNS, "token_ids": [7, 8, 5, 9, 7], "logprobs": [*LOGPROBS[:2], -1.0, *LOGPROBS[2:]]},
    ]
    found = others_beside([*other, TURNS])
    assert [found[number].status for number in range(8)] == ["differs"] * 6 + ["unproven"] * 2 and len(found) == 8
    assert "has tokens that none of its receipts is of" in found[6].what
    single = {**ROW, "receipts": [ONE]}
    del single["receipt"]
    assert others_beside([single]) == {}
    longer = {**single, "token_ids": [*ROW["token_ids"], 3], "logprobs": [*LOGPROBS, -1.0]}
    assert [verdict.status for verdict in others_beside([longer]).values()] == ["differs"]
    assert "prompt" in others_beside([{**single, "prompt_ids": [2, 1]}])[0].what
