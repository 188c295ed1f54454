"""Rows of a micro-batch whose samples begin alike, as those of a group do: what they have in common is computed once.

Tree training, as it is called where samples branch often; here the log-probabilities are those of the samples one by
one, bit for bit. Gradients are the same sums in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....kernels.attention.shared_rows import SharedRows
from ....rollout.model.hosted_model import HostedModel
from ....rollout.model.operations.carried import PACKING, SHARED_ROWS

_PROMPT, _ANSWERS = (1, 2, 3, 4, 5, 6), ((7, 8, 9), (7, 10), (11, 12, 13, 14))  # of a trial


class RowTree:
    """The rows of sequences so far. With `shares`, sequences that begin alike have a row in common for each token of
    their common beginning; else each has rows of its own."""

    def __init__(self, *, shares: bool) -> None:
        self.token_ids: list[int] = []  # of each row
        self.positions: list[int] = []
        self.sequences: list[list[int]] = []  # the rows of each
        self._shares = shares
        self._after: dict[tuple[int, int], int] = {}  # rows by the row before and the token

    def num_new(self, token_ids: Sequence[int]) -> int:
        """Return the number of rows that a sequence would add."""
        return len(token_ids) - len(self._known(token_ids))

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add a sequence. Returns its rows, as many as it has tokens."""
        rows = self._known(token_ids)
        for position in range(len(rows), len(token_ids)):
            row, token = len(self.token_ids), token_ids[position]
            if self._shares:
                self._after[rows[-1] if rows else -1, token] = row
            self.token_ids.append(token)
            self.positions.append(position)
            rows.append(row)
        self.sequences.append(rows)
        return rows

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """Return the rows that are there of a sequence, from its first token on."""
        rows: list[int] = []
        before = -1
        for token in token_ids if self._after else ():
            row = self._after.get((before, token))
            if row is None:
                break
            rows.append(row)
            before = row
        return rows

    def packing(self, device: torch.device) -> dict[str, object]:
        """Return the keyword that tells a hosted module of the sequences."""
        starts = [0, *accumulate(map(len, self.sequences))]  # of the tokens of all sequences
        if len(self.token_ids) < starts[-1]:
            return {SHARED_ROWS: SharedRows.of(self.sequences, device)}
        return {PACKING: torch.tensor(starts, dtype=torch.int32, device=device)}


def why_no_shared_prefixes(hosted: HostedModel) -> str | None:
    """Return why sequences cannot have rows in common in a model's forward; None: they can.

    It is tried: small sequences that begin alike must have the same logits with common rows and without. Call it before
    the model is sharded; it leaves the model as it was.
    """
    module = hosted.trained_module
    longest = hosted.max_model_len
    sequences = [[token % hosted.vocab_size for token in (*_PROMPT, *answer)][:longest] for answer in _ANSWERS]
    flags = [(part, part.training) for part in module.modules()]
    try:
        module.train()
        with torch.no_grad(), hosted.training_numerics():
            alone, common = (_logits(module, sequences, hosted.device, shares=shares) for shares in (False, True))
    except ValueError as error:
        return str(error)
    finally:
        for part, training in flags:
            part.training = training
    if hosted.numerics.guarantee is not None and not torch.equal(alone, common):
        return f"{type(module).__name__} computes other numbers where sequences have rows in common"
    return None


def _logits(
    module: PreTrainedModel, sequences: Sequence[Sequence[int]], device: torch.device, *, shares: bool
) -> Tensor:
    """Return the logits of all tokens of sequences [L, V], from a forward in which they share rows or do not."""
    tree = RowTree(shares=shares)
    rows = [row for sequence in sequences for row in tree.add(sequence)]
    logits: Tensor = module(
        input_ids=torch.tensor([tree.token_ids], device=device),
        position_ids=torch.tensor([tree.positions], device=device),
        use_cache=False,
        **tree.packing(device),
    ).logits[0]
    return logits[torch.tensor(rows, device=device)]
