"""A reward function of your own: it takes text and returns a number. `config.toml` names it `reward:right_digits`."""

from __future__ import annotations


def right_digits(prompt: str, completion: str, answer: str) -> float:
    """Return the share of the answer's digits that are right, counted from the ones upwards; 0 for another length.

    It must be a pure function of its arguments, because a resumed run scores the same completions again.
    """
    final = completion.rpartition("=")[2].strip()  # the worked solution ends with "=" and the sum
    if len(final) != len(answer):
        return 0.0
    num_right = 0
    for digit, wanted in zip(reversed(final), reversed(answer), strict=True):
        if digit != wanted:
            break
        num_right += 1
    return num_right / len(answer)
