"""The process that an engine belongs to, and its forks, which may not use it."""

from __future__ import annotations

import os

from ..errors import ForkedProcess


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of it: no thread of the engine runs here, and locks may stay held."""
        return os.getpid() != self._id

    def check(self) -> None:
        """Raise ForkedProcess in a fork, before any lock is taken. Asked several times a step: calls nothing else."""
        if os.getpid() != self._id:
            raise ForkedProcess(
                f"this engine belongs to process {self._id}, and this is a fork of it ({os.getpid()}): use it "
                'there, and start processes that need none of it with the method "spawn"'
            )
