"""The score of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Score:
    """The reward of one completion, and whether it is a success."""

    total: float  # what is trained on
    components: Mapping[str, float] = field(default_factory=dict)  # by name, where the reward has several
    is_success: bool | None = None  # None: the reward does not say
