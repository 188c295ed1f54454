"""The text of an answer to `lockstep ctl`, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence


def results_of(answer: object) -> list[Mapping[str, object]]:
    """Return the result of each worker from a router's answer; [] from an engine's answer."""
    results = answer.get("results") if isinstance(answer, dict) else None
    return [one for one in results if isinstance(one, dict) and "worker" in one] if isinstance(results, list) else []


def message_of(status: object, answer: object) -> str:
    """Return the message of an error answer."""
    if isinstance(answer, dict):
        error = answer.get("error")
        found = error.get("message") if isinstance(error, dict) else answer.get("message") or error
        if found:
            return str(found)
    return answer if isinstance(answer, str) and answer else f"status {status}"


def in_words(value: object, indent: str = "") -> str:
    """Format plain values as lines `name value`, with an object's members indented below its name."""
    if isinstance(value, Mapping):
        width = max((len(str(name)) for name, item in value.items() if not _is_deep(item)), default=0)
        return "\n".join(
            f"{indent}{name}\n{in_words(item, indent + '  ')}"
            if _is_deep(item)
            else f"{indent}{name:{width}}  {_word(item)}"
            for name, item in value.items()
        )
    if isinstance(value, list):
        return "\n".join(f"{indent}-\n{in_words(item, indent + '  ')}" if _is_deep(item) else f"{indent}{_word(item)}"
                         for item in value)  # fmt: skip
    return f"{indent}{_word(value)}"


def by_worker(results: Sequence[Mapping[str, object]], show: Callable[[object], str]) -> str:
    """Format the results of a router's workers: each worker's address, and below it its answer."""
    told = []
    for one in results:
        body = one.get("body")
        if one.get("success"):
            said = "done" if body in (None, "", {}) else show(body).rstrip()
        else:
            said = f"failed: {one.get('error') or message_of(one.get('status_code'), body)}"
        told.append(f"{one['worker']}\n{textwrap.indent(said, '  ')}")
    return "\n".join(told)


def _is_deep(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)


def _word(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def report(answer: object) -> str:
    """Format an answer as its message, with its report below."""
    if not isinstance(answer, dict):
        return in_words(answer) if answer is not None else "done"
    lines = [str(answer["message"])] if answer.get("message") else []
    rest = answer.get("report")
    if rest is None:
        rest = {name: item for name, item in answer.items() if name not in ("message", "success", "status", "report")}
    return "\n".join([*lines, *([in_words(rest)] if rest else [])]) or "done"


def _of_ranks(answer: Mapping[str, object]) -> dict[str, object]:
    """Return the digest of each rank's weights, and the tensors that differ from the published ones."""
    ranks = answer.get("rank_results") or [answer]
    found: dict[str, object] = {}
    for one in ranks if isinstance(ranks, list) else []:
        suffix = f" {one['rank']}" if "rank" in one else ""
        found[f"rank{suffix} digest"] = one.get("rank_digest")
        if one.get("differing"):
            found[f"rank{suffix} differs in"] = one["differing"]
    return found


def checksum(answer: object) -> str:
    """Format an answer of /weights_checker: digests, bytes, tensors, seconds."""
    if not isinstance(answer, dict) or "model_digest" not in answer:
        return report(answer)
    tensors = answer.get("tensors") or {}
    lines = {
        "model digest": answer["model_digest"],
        **_of_ranks(answer),
        "bytes": answer.get("num_bytes"),
        "tensors": len(tensors),
        "seconds": answer.get("seconds"),
    }
    return in_words(lines)
