"""A padded batch of TRL's as one packed row, and back: the rows of its scored tokens.

Letters: B sequences, T tokens with padding, N tokens without, M scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a padded batch without the padding, one sequence after another."""

    input_ids: Tensor  # int64 [1, N]
    position_ids: Tensor  # int64 [1, N], from 0 in each sequence
    cu_seq_lens: Tensor  # int32 [B + 1]: first token of each sequence, and the end
    logit_rows: Tensor  # int64 [M]: the token before each scored one
    targets: Tensor  # int64 [M]: the scored tokens
    is_scored: Tensor  # bool [B, T - 1]: whether the token after this place is scored; M are

    def model_inputs(self) -> dict[str, object]:
        """Return the keyword arguments with which a transformers causal LM computes logits [1, M, V].

        Where no token is scored they ask for the first row: a loss of nothing still has gradients, of zero.
        """
        rows = self.logit_rows if len(self.logit_rows) else self.logit_rows.new_zeros(1)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "logits_to_keep": rows,
            "use_cache": False,
        }

    def padded(self, values: Tensor) -> Tensor:
        """Put a value of each scored token [M] in its place in the padded batch [B, T - 1], zeros elsewhere.

        The result depends on `values` for autograd also where no token is scored.
        """
        return values.new_zeros(self.is_scored.shape).masked_scatter(self.is_scored, values)

    def sequences(self) -> Iterator[SequenceRows]:
        """Yield the sequences of the batch."""
        token_ids = self.input_ids[0].tolist()
        bounds = self.cu_seq_lens.tolist()
        first = 0
        for number, num_scored in enumerate(self.is_scored.sum(1).tolist()):
            ids = token_ids[bounds[number] : bounds[number + 1]]
            yield SequenceRows(ids, num_scored, slice(first, first + num_scored))
            first += num_scored


@dataclass(frozen=True)
class SequenceRows:
    """One sequence of a batch."""

    token_ids: list[int]
    num_scored: int  # of its last tokens
    places: slice  # of these, among the scored tokens of the batch

    @property
    def prompt(self) -> bytes:
        """A key of the tokens that are not scored."""
        return sequence_key(self.token_ids[: len(self.token_ids) - self.num_scored], 0)

    @property
    def key(self) -> bytes:
        """See `sequence_key`."""
        return sequence_key(self.token_ids, self.num_scored)


def sequence_key(token_ids: Sequence[int], num_scored: int) -> bytes:
    """Return a key of a sequence's tokens and of the number of last ones that are scored."""
    return torch.tensor([num_scored, *token_ids]).numpy().tobytes()


def pack_rows(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> PackedRows:
    """Pack a batch that is padded on both sides.

    input_ids, attention_mask, labels: [B, T]; labels are -100 where a token is not scored. Raises ValueError for a
    sequence that is empty, that has a gap, or whose scored tokens have no token before them.
    """
    mask = attention_mask.bool()
    padding = torch.zeros_like(mask[:, :1])
    num_runs = (mask & ~torch.cat([padding, mask[:, :-1]], 1)).sum(1)
    if bad := (num_runs != 1).nonzero().flatten().tolist():
        raise ValueError(f"attention_mask: rows {bad[:5]} are empty, or have padding between their tokens")
    is_scored = labels[:, 1:] != -100
    if bool((is_scored & ~(mask[:, 1:] & mask[:, :-1])).any()):
        raise ValueError("labels: padding is scored, or the first token of a sequence, which has none before it")
    place = (mask.flatten().cumsum(0) - 1).view(mask.shape)  # in the packed row
    lengths = mask.sum(1)
    return PackedRows(
        input_ids=input_ids[mask][None],
        position_ids=(mask.cumsum(1) - 1)[mask][None],
        cu_seq_lens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
        logit_rows=place[:, :-1][is_scored],
        targets=labels[:, 1:][is_scored],
        is_scored=is_scored,
    )
