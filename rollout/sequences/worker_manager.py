"""The state of sequences that execution needs, on every rank: block tables and stage progress."""

from __future__ import annotations

from .block_tables import BlockTables
from .manager import SequenceManager
from .sequence import Sequence
from .step import ScheduledSequence


class WorkerSequenceManager(SequenceManager):
    """The manager on every rank: stage progress and block tables."""

    def __init__(self, num_stages: int = 1) -> None:
        super().__init__(num_stages)
        self.block_tables = BlockTables()

    def incarnation(self, id: str) -> int:
        """Return the number of preemptions of the live sequence of that id."""
        return self._incarnations[id]

    def next_row(self, id: str) -> int:
        """Return the first row of the sequence that has not gone through this stage."""
        return self.sequence(id).num_tokens_stage_processed

    def block_table(self, id: str) -> list[int]:
        return self.block_tables.blocks(id)

    def preempt(self, id: str) -> None:
        super().preempt(id)
        self.block_tables.cut(id, 0)

    def free(self, id: str) -> None:
        super().free(id)
        self.block_tables.drop(id)

    def _on_scheduled(self, item: ScheduledSequence) -> None:
        if item.id not in self._sequences:
            assert item.token_ids is not None, f"first sight of {item.id} without its tokens"
            sequence = Sequence(item.id, item.token_ids)
            if item.num_prompt_tokens is not None:  # an answer that goes on has output already
                sequence.num_prompt_tokens = item.num_prompt_tokens
            self._register(sequence, item.incarnation)
            self.block_tables.add(item.id)
        super()._on_scheduled(item)
        if item.num_blocks_kept is not None:
            self.block_tables.cut(item.id, item.num_blocks_kept)
        if item.new_blocks:
            self.block_tables.append(item.id, item.new_blocks)
