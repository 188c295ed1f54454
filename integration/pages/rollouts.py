"""The page of a step's samples: a file with the samples in it, or the same page that asks a server for them.

Samples are data in the page, never markup: JSON in which every `<`, `>` and `&` is written as an escape, and the script
shows texts as text alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...rollout.sampling_params import SamplingParams
from ...rollout.sequences.detokenizer import IncrementalDetokenizer, Tokenizer
from .policy import own_sources

_FILE = Path(__file__).with_name("rollouts.html")
_DATA = '<script type="application/json" id="data">null</script>'
_POLICY = "<!-- policy -->"
_DIGITS = 6  # significant ones of a log-probability


@cache
def template() -> str:
    """Read the page without samples. It asks the server that it comes from for them."""
    return _FILE.read_text(encoding="utf-8")


def static_page(data: Mapping[str, Any]) -> str:
    """Return the page with the samples of `page_data` in it. It needs no network, and its policy allows none."""
    text = template()
    assert text.count(_DATA) == 1 and text.count(_POLICY) == 1
    policy = f'<meta http-equiv="Content-Security-Policy" content="{own_sources(text)}">'
    values = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":
        values = values.replace(sign, f"\\u{ord(sign):04x}")
    return text.replace(_POLICY, policy).replace(_DATA, _DATA.replace("null", values))


def page_data(
    rows: Iterable[Mapping[str, Any]], *, title: str, step: int, steps: Sequence[int], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return what the page shows of a step's samples, as values of JSON.

    rows: lines of the step's file. steps: all whose samples are there. tokenizer: None to show the ids of tokens.
    """
    groups: list[dict[str, Any]] = []
    keys: list[tuple[object, ...]] = []
    samples = []
    for row in rows:
        key = (row.get("source"), row.get("prompt"), tuple(row["prompt_ids"]))
        # Samples of one prompt stand side by side; a prompt that comes again later is another group.
        if not keys or keys[-1] != key or row.get("sample") in groups[-1]["numbers"]:
            keys.append(key)
            groups.append({"source": row.get("source"), "prompt": row.get("prompt"), "answer": row.get("answer"),
                           "numbers": []})  # fmt: skip
        groups[-1]["numbers"].append(row.get("sample"))
        samples.append(_sample(row, len(groups) - 1, tokenizer))
    return {
        "title": title, "step": step, "steps": list(steps), "has_texts": tokenizer is not None,
        "groups": [{name: its[name] for name in ("source", "prompt", "answer")} for its in groups], "samples": samples,
    }  # fmt: skip


def _sample(row: Mapping[str, Any], group: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids, sampled = _tokens(row)
    logprobs = iter(row["logprobs"])
    forced = iter(row.get("forced") or ())
    return {
        "group": group,
        "number": row.get("sample"),
        "reward": row["reward"],
        "components": row.get("components") or {},
        "success": row.get("is_success"),
        "advantage": row["advantage"],
        "end": row.get("finish_reason"),
        "versions": [span[0] for span in row.get("weight_versions", ())],
        "ids": ids,
        "texts": token_texts(ids, row["prompt_ids"], tokenizer) if tokenizer is not None else None,
        # One a token; None of those that an environment wrote, and of all that follow where some are missing.
        "logprobs": [_rounded(next(logprobs, None)) if is_drawn else None for is_drawn in sampled],
        "forced": [index for index, is_drawn in enumerate(sampled) if is_drawn and next(forced, False)],
    }


def _tokens(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    """Return a sample's tokens, and whether each was sampled: of an episode all of them, with those of its further
    conversations, prompts included."""
    if (ids := row.get("episode_ids")) is None:
        return list(row["token_ids"]), [True] * len(row["token_ids"])
    shown, sampled = list(ids), _flags(row["runs"])
    for one in row.get("conversations", ()):
        shown += [*one["prompt_ids"], *one["episode_ids"]]
        sampled += [*[False] * len(one["prompt_ids"]), *_flags(one["runs"])]
    return shown, sampled


def _flags(runs: Sequence[int]) -> list[bool]:
    return [index % 2 == 0 for index, length in enumerate(runs) for _ in range(length)]


def token_texts(ids: Sequence[int], prompt_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text that each token adds. Together they are the text of all, special tokens included; a token that
    ends within a character adds nothing, and the one that completes it the whole."""
    params = SamplingParams(skip_special_tokens=False, no_stop_trim=True)
    growing = IncrementalDetokenizer(tokenizer, prompt_ids, params)
    texts, length = [], 0
    for token in ids:
        growing.append([token])
        text = growing.streamable_text
        texts.append(text[length:])
        length = len(text)
    if texts:
        texts[-1] += growing.text[length:]
    return texts


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
