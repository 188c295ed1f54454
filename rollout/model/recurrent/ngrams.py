"""Embeddings of n-grams, and the dilated convolution behind them (the per-layer embeddings of Qwen 4).

Their own code looks at neighbouring rows, which may be of other sequences. Ours finds the tokens, or the inputs, before
each row in its sequence and in a state. Modules are recognised by the results of their code on a trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.layers.activation import silu
from ....kernels.recurrent.windows import causal_windows
from ..operations.row_positions import RowCache
from .delta_rule import UNLIKE
from .rows import RecurrentRows, rows_of

Forward = Callable[..., Any]

SHORT_CONV = "_short_conv"  # the method of a layer that convolves
_NGRAMS = ("ngram_embedding", "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets", "eos_token_id")


def ngram_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an embedding of n-grams with its sequences' states; None for any other module."""
    if not hasattr(module, "layer_idx") or not all(hasattr(module, name) for name in _NGRAMS):
        return None
    if not _is_like(lambda rows, trial: _embedded(module, trial, rows), _own_ngrams, module):
        return None
    return lambda input_ids, past_key_values: _embedded(module, input_ids, _rows(module, input_ids, past_key_values))


def short_conv_of(module: nn.Module) -> Forward | None:
    """Return what replaces the dilated convolution of a layer; None for any other module."""
    convolution = getattr(module, "conv1d", None)
    if not hasattr(type(module), SHORT_CONV) or not hasattr(module, "layer_idx"):
        return None
    if not isinstance(convolution, nn.Conv1d) or convolution.bias is not None:
        return None
    if not _is_like(lambda rows, trial: _convolved(convolution, trial, rows), _own_convolution, module):
        return None
    return lambda hidden, past_key_values: _convolved(convolution, hidden, _rows(module, hidden, past_key_values))


def _rows(module: nn.Module, x: Tensor, cache: RowCache | None) -> RecurrentRows:
    return rows_of(module, x.shape[0], x.shape[1], x.device, {} if cache is None else cache.keywords)


def _windows(x: Tensor, rows: RecurrentRows, lags: list[int], name: str) -> list[Tensor]:
    """Return the inputs [R, C] at these lags before each row, and keep the last ones of each sequence."""
    slots = rows.slots(name)
    taps, final = causal_windows(x, rows.cu_seqlens, max(lags) + 1, slots, lags)
    rows.leave(name, final)
    return taps


def _embedded(module: Any, input_ids: Tensor, rows: RecurrentRows) -> Tensor:
    """Embed the n-grams that end with each token of input_ids [B, T] -> [B, T, D]."""
    eos, sizes, offsets = module.eos_token_id, module.ngram_heads_vocab_sizes, module.ngram_heads_offsets
    found = _windows(input_ids.long().flatten()[:, None] + 1, rows, list(range(module.ngram_size)), "ngrams")
    tokens = [torch.where(tap == 0, eos, tap - 1)[:, 0] for tap in found]  # a state of zeros: there is no token
    is_over = torch.zeros_like(tokens[0], dtype=torch.bool)
    mixed, blocks = tokens[0] * module.layer_multipliers[0], []
    for lag in range(1, module.ngram_size):
        is_over = is_over | (tokens[lag] == eos)  # nothing before an end of text belongs to the n-gram
        mixed = mixed ^ (torch.where(is_over, eos, tokens[lag]) * module.layer_multipliers[lag])
        heads = slice((lag - 1) * module.heads_per_ngram, lag * module.heads_per_ngram)
        blocks.append(torch.remainder(mixed[:, None], sizes[heads]) + offsets[heads])
    ids = torch.cat(blocks, dim=-1).view(*input_ids.shape, -1)
    embedded: Tensor = module.ngram_embedding(ids)
    return embedded.flatten(-2)


def _convolved(convolution: nn.Conv1d, hidden: Tensor, rows: RecurrentRows) -> Tensor:
    """Convolve hidden [B, T, C] with taps that lie `dilation` rows apart, and apply silu."""
    weight, [dilation], [width] = convolution.weight, convolution.dilation, convolution.kernel_size
    lags = [tap * dilation for tap in range(width)]
    total: Tensor | None = None
    for tap, inputs in reversed(list(enumerate(_windows(hidden.flatten(0, 1), rows, lags, "dilated")))):
        part = weight[:, 0, width - 1 - tap].float() * inputs.float()
        total = part if total is None else total + part
    assert total is not None
    return silu(total.to(hidden.dtype)).view(hidden.shape)


# -- the trial ---------------------------------------------------------------------------------------------------------


def _own_ngrams(module: Any) -> tuple[Tensor, Tensor]:
    generator, eos = torch.Generator().manual_seed(0), module.eos_token_id
    ids = torch.randint(min(64, module.unigram_vocab_size), (1, 40), generator=generator)
    ids[0, [3, 9, 10, 20]] = eos
    ids = ids.to(module.layer_multipliers.device)
    return ids, type(module).forward(module, ids, None)


def _own_convolution(module: Any) -> tuple[Tensor, Tensor]:
    weight, generator = module.conv1d.weight, torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 40, len(weight), generator=generator, dtype=torch.float32).to(weight.device, weight.dtype)
    return hidden, getattr(type(module), SHORT_CONV)(module, hidden, None)


def _is_like(
    ours: Callable[[RecurrentRows, Tensor], Tensor],
    own: Callable[[nn.Module], tuple[Tensor, Tensor]],
    module: nn.Module,
) -> bool:
    """Return whether ours gives what a module's own code gives for one sequence."""
    try:
        with torch.no_grad():
            trial, expected = own(module)
            starts = torch.tensor([0, trial.shape[1]], dtype=torch.int32, device=trial.device)
            found = ours(RecurrentRows(starts, 0, None), trial)
    except UNLIKE:
        return False
    tolerance = 1e-4 if found.dtype == torch.float32 else 3e-2
    return found.shape == expected.shape and torch.allclose(found, expected, atol=tolerance, rtol=tolerance)
