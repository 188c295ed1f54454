"""KV of earlier weights that commits have kept, as answers and receipts have it."""

from __future__ import annotations

from typing import NamedTuple


class KeptKV(NamedTuple):
    """Rows of a sequence whose KV a commit of other weights has left as it was, up to row `end` - 1."""

    version: str  # of the weights that computed them
    digest: str | None
    end: int


class KVStart(NamedTuple):
    """The kept KV under which the output tokens from `start` on were drawn; later rows are of each token's weights."""

    start: int
    kept: tuple[KeptKV, ...]  # one run of rows after another, from row 0
