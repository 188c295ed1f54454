"""Lone surrogates in the texts of a body: halves of a pair, which JSON can write and which are no characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from ....rollout.giving_way import give_way
from .errors import BadField

_WINDOW = 1 << 18  # bytes that a pattern searches at a time
_ENTRIES_A_SLICE = 1 << 12
# Escapes that may be a lone surrogate: a first half without a second one, the reverse, or any behind a backslash.
_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD].)|[89a-fA-F](?<=\\\\u[dD].))"
)


def may_have_surrogates(data: bytes) -> bool:
    """Return whether a body may have one: whether it has an escape of the kind."""
    for at in range(0, len(data), _WINDOW):
        give_way()
        if _SURROGATE.search(data, at, at + _WINDOW + 16):
            return True
    return False


def refuse_surrogates(values: dict[str, object]) -> None:
    """Refuse a text that has half of a surrogate pair. Raises BadField naming the field of the body."""
    for name, value in values.items():
        _check_text(name, "a key")
        walks: list[Iterator[object]] = [iter([value])]
        while walks:
            give_way()
            for item in islice(walks[-1], _ENTRIES_A_SLICE):
                if isinstance(item, str):
                    _check_text(item, name)
                elif isinstance(item, dict):
                    walks += [iter(item), iter(item.values())]
                    break
                elif isinstance(item, list):
                    walks.append(iter(item))
                    break
            else:
                if walks[-1].__length_hint__() == 0:  # type: ignore[attr-defined]  # of lists' and dicts' iterators
                    walks.pop()


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadField(where, "has a lone surrogate, which is no character") from None
