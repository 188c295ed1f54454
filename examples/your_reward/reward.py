"""A reward of your own: a function of text that returns a number. `config.toml` names it as `reward:right_digits`."""

from __future__ import annotations


def right_digits(prompt: str, completion: str, answer: str) -> float:
    """Return the share of the answer's digits that are right, counted from the ones upwards; 0 for another length.

    It must be a pure function of its arguments: a run that is resumed scores the same completions again.
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
