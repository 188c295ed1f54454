"""Open the channel of this rank: the controller's side or a follower's."""

from __future__ import annotations

from .channel import RankChannel
from .controller_channel import ControllerChannel
from .follower_channel import FollowerChannel
from .mesh import Mesh


def open_channel(mesh: Mesh, timeout_s: float) -> RankChannel:
    """Connect this rank with the other ranks of its replica. A collective of the replica.

    timeout_s: a rank that gives no sign of life for so long is lost.
    """
    if mesh.is_controller:
        return ControllerChannel(mesh, timeout_s)
    return FollowerChannel(mesh, timeout_s)
