"""A jump: tokens that a grammar forces, which need no step of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Jump:
    """Tokens that replace the last ones of a sequence. Example: `Jump(1, (17, 4))` replaces one token by two."""

    num_rolled_back: int
    token_ids: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.token_ids)

    @property
    def num_gained(self) -> int:
        """Tokens that need no step of their own."""
        return max(len(self.token_ids) - self.num_rolled_back, 0)


NO_JUMP = Jump(0, ())
