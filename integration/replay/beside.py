"""Samples that stand beside receipts in a file, compared with them.

A receipt proves the tokens that it holds itself. Where the object around it has tokens or log-probabilities too, which
is what a trainer reads, these must be the receipt's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...rollout.proving.claim import Verdict, unproven
from ...rollout.receipt import float_bits, is_in_full
from .reading import receipts_with_objects

_PROMPTS = ("prompt_ids", "prompt_token_ids")
_OUTPUTS = ("token_ids", "output_ids", "response_token_ids")
_LOGPROBS = "logprobs"  # a list of numbers; OpenAI's is an object
_TURNS = "receipts"  # of the turns of one sample, in their order


def others_beside(values: Iterable[Any]) -> dict[int, Verdict]:
    """Return verdicts on the samples beside receipts, by the receipts' numbers in `receipts_in`: of those alone that
    are not the receipt's."""
    found: dict[int, Verdict] = {}
    turns: dict[int, tuple[dict[str, Any], list[int], list[dict[str, Any]]]] = {}  # by the object around them
    for number, (receipt, around) in enumerate(receipts_with_objects(values)):
        if not is_in_full(receipt) or not around:
            continue
        if any(receipt is one for one in _list(around[0], _TURNS)):
            _, numbers, receipts = turns.setdefault(id(around[0]), (around[0], [], []))
            numbers.append(number)
            receipts.append(receipt)
        elif verdict := _other(receipt, around):
            found[number] = verdict
    for row, numbers, receipts in turns.values():
        if len(receipts) == len(row[_TURNS]) and (verdict := _others_in(row, receipts)):
            found |= dict.fromkeys(numbers, verdict)
    return found


def _other(receipt: Mapping[str, Any], around: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Compare a receipt with the objects around it, the innermost first: an answer, or its `meta_info` and the
    answer."""
    for one in around[: 1 + (around[0] is around[-1].get("meta_info"))]:
        prompts = [_list(one, name) for name in _PROMPTS if _has(one, name)]
        outputs = [_list(one, name) for name in _OUTPUTS if _has(one, name)]
        is_whole = bool(prompts)  # else it may be the last piece of a stream
        if any(prompt != receipt["prompt"] for prompt in prompts):
            return _differs("prompt")
        for output in outputs:
            if output != (receipt["output"] if is_whole else _end(receipt["output"], len(output))):
                return _differs("output")
        if outputs and _has(one, _LOGPROBS):
            claimed = receipt["logprobs"] if is_whole else _end(receipt["logprobs"], len(one[_LOGPROBS]))
            if _bits(one[_LOGPROBS]) != claimed:
                return _differs("log-probabilities")
    return None


def _others_in(row: Mapping[str, Any], receipts: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Compare the receipts of the turns of a sample with its drawn tokens, which are theirs one after another."""
    if not _has(row, "token_ids"):
        return None
    output, bits, at = row["token_ids"], _bits(_list(row, _LOGPROBS)), 0
    has_bits, has_gap = _has(row, _LOGPROBS), False
    is_single = "num_turns" not in row and len(receipts) == 1
    if is_single and _has(row, "prompt_ids") and row["prompt_ids"] != receipts[0]["prompt"]:
        return _differs("prompt")
    for receipt in receipts:
        start = _find(receipt["output"], output, at)
        if start is None:
            return _differs("output")
        has_gap, at = has_gap or start > at, start + len(receipt["output"])
        if has_bits and (bits is None or bits[start:at] != receipt["logprobs"]):
            return _differs("log-probabilities")
    if has_bits and (bits is None or len(bits) != len(output)):
        return _differs("log-probabilities")
    if not has_gap and at == len(output):
        return None
    if is_single:
        return _differs("output")
    return unproven("the sample beside it has tokens that none of its receipts is of")


def _find(part: list[Any], whole: list[Any], start: int) -> int | None:
    """Return where a list first stands in another one, from `start` on; None: it does not."""
    ends = range(start, len(whole) - len(part) + 1)
    return next((at for at in ends if whole[at : at + len(part)] == part), None)


def _differs(what: str) -> Verdict:
    return Verdict("differs", f"the sample beside it is another one: it does not have the receipt's {what}")


def _has(one: Mapping[str, Any], name: str) -> bool:
    return isinstance(one.get(name), list)


def _list(one: Mapping[str, Any], name: str) -> list[Any]:
    value = one.get(name)
    return value if isinstance(value, list) else []


def _end(values: list[Any], num: int) -> list[Any]:
    return values[max(len(values) - num, 0) :]


def _bits(values: list[Any]) -> list[int] | None:
    """Return the bits of log-probabilities; None: they are none."""
    try:
        return float_bits(values)
    except (TypeError, OverflowError):
        return None
