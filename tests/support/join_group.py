"""Joining a weight group in one call, as a trainer's script does."""

from __future__ import annotations

from typing import Any

from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.weight_group import WeightGroup


def join_group(*arguments: Any, **settings: Any) -> WeightGroup:
    """Join the group of `Rendezvous(...)` and return it when all ranks are there. Blocks; raises as both methods do."""
    return Rendezvous(*arguments, **settings).join()
