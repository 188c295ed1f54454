"""The sources of drafts of an engine, and the history of its samples, for its user."""

from __future__ import annotations

from pathlib import Path

from ..loop.parts import Parts
from ..speculation.added_source import AddedSource
from ..speculation.history_file import read_histories, write_histories
from ..speculation.proposer import Proposer
from ..speculation.speculation import DEPTH, Speculation
from .driver import Driver


class EngineDrafts:
    """Sources and history of drafts of one engine, which change how many steps an output takes, and no bit of it.

    Every method may be called from any thread, on the controller of a replica.
    """

    def __init__(self, parts: Parts, driver: Driver) -> None:
        self._speculation, self._driver = parts.speculation, driver
        self._vocab_size = parts.model.vocab_size

    @property
    def keeps_history(self) -> bool:
        """Whether samples of earlier are a source of drafts, so that they can be saved and loaded."""
        return self._speculation is not None and self._speculation.keeps_history

    def add_source(self, proposer: Proposer, depth: int = DEPTH) -> None:
        """Ask a proposer for drafts, too, from the next step on. depth: the most tokens of its drafts.

        Sources are asked in the order of what was accepted lately. One that raises is asked no more, and `state()`
        says why. Raises ValueError for a name that another source has, a depth out of range, or an engine without
        speculation.
        """
        speculation = self._need()
        self._driver.control("add_draft_source", lambda: speculation.add_source(AddedSource(proposer), depth))

    def save_history(self, path: str | Path) -> int:
        """Write the samples that are kept of ended prompts to a file, whole or not at all; returns the number of
        prompts. Raises OSError, and ValueError where no history is kept."""
        speculation = self._need_history()
        histories = self._driver.control("save_draft_history", speculation.samples.histories)
        write_histories(Path(path), histories)
        return len(histories)

    def load_history(self, path: str | Path) -> int:
        """Add the samples of a file that `save_history` wrote, as many as fit; returns its number of prompts.

        Raises OSError, and ValueError naming the file where it is another one, or where no history is kept.
        """
        speculation = self._need_history()
        histories = read_histories(Path(path), self._vocab_size, speculation.samples.max_bytes)
        self._driver.control("load_draft_history", lambda: speculation.samples.add_histories(histories))
        return len(histories)

    def _need(self) -> Speculation:
        if self._speculation is None:
            raise ValueError('this engine has no drafts: EngineConfig.speculation is "off"')
        return self._speculation

    def _need_history(self) -> Speculation:
        speculation = self._need()
        if not speculation.keeps_history:
            raise ValueError("this engine keeps no history of samples: it is no source of EngineConfig.speculation")
        return speculation
