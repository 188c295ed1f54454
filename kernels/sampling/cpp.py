"""ctypes bindings of sampling.cpp: log-probabilities and draws on a CPU, from logits in float32 and bfloat16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from ..machine import native

SOURCE = "sampling/sampling.cpp"
BLOCK = 256  # tokens whose exponentials are added in float32, from a row's first token on


class _Rows(ctypes.Structure):
    """The C++ struct `Rows` of sampling.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperatures")),
        *((name, ctypes.c_int64) for name in ("R", "V", "stride", "is_bf16", "temperature_stride", "threads")),
    ]


class _Draws(ctypes.Structure):
    """The C++ struct `Draws` of sampling.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("seeds", "positions", "top_k", "top_p", "min_p")),
        *((name, ctypes.c_void_p) for name in ("reshaped", "reshaped_row", "allowed", "allowed_row")),
        ("allowed_width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_ids", "logprobs", "chances")),
    ]


class _Parts(ctypes.Structure):
    """The C++ struct `Parts` of sampling.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("largest", "seeds", "positions", "is_greedy")),
        ("first_id", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    ]


def serves(logits: Tensor) -> bool:
    """Return whether this path serves these logits."""
    on_cpu = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    return on_cpu and native.load(SOURCE) is not None


def scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log-probabilities of logits [R, V] at temperatures float32 [R] or [1] -> float32 [R, V]."""
    out = torch.empty(logits.shape, dtype=torch.float32, device="cpu")
    with_rows = _rows(logits := _dense(logits), temperatures := temperatures.contiguous())
    native.run(_function("lockstep_logprobs", 1), with_rows, out.data_ptr())
    return out


def selected(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of token_ids int64 [R], each below V -> float32 [R], and stats for the gradient."""
    out, stats = (torch.empty(size, dtype=torch.float32, device="cpu") for size in ((len(logits),), (len(logits), 2)))
    with_rows = _rows(logits := _dense(logits), temperatures := temperatures.contiguous())
    token_ids = token_ids.contiguous()
    native.run(_function("lockstep_selected", 3), with_rows, token_ids.data_ptr(), out.data_ptr(), stats.data_ptr())
    return out, stats


def selected_gradient(logits: Tensor, token_ids: Tensor, temperatures: Tensor, stats: Tensor, grad: Tensor) -> Tensor:
    """Compute the gradient of logits [R, V], in their dtype, from grad [R] of `selected` and its stats."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    with_rows = _rows(logits := _dense(logits), temperatures := temperatures.contiguous())
    token_ids, grad = token_ids.contiguous(), grad.float().contiguous()
    pointers = (token_ids.data_ptr(), grad.data_ptr(), stats.data_ptr(), out.data_ptr())
    native.run(_function("lockstep_selected_gradient", 4), with_rows, *pointers)
    return out


def draw(
    logits: Tensor,
    temperatures: Tensor,
    noise_keys: tuple[Tensor, Tensor],
    filters: tuple[Tensor, Tensor, Tensor],
    reshaped: tuple[Tensor, Tensor] | None,
    allowed: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens: int64 [R], their log-probabilities and chances float32 [R]; see `draws.draw_tokens`.

    noise_keys: seeds and positions, int64 [R]; filters: top_k int64, top_p float64, min_p float32 [R].
    """
    num_rows, vocab_size = logits.shape
    logits = _dense(logits)
    reshaped_row, rows = _places(reshaped, num_rows)
    allowed_row, masks = _places(allowed, num_rows)
    if rows is not None:
        rows = rows.float().contiguous()
    if masks is not None:  # padded to whole words of 16 tokens; tokens after a mask's end are not allowed
        missing = -(-vocab_size // 16) * 2 - masks.shape[1]
        masks = torch.nn.functional.pad(masks, (0, missing)).contiguous()
    columns = [each.contiguous() for each in (*noise_keys, *filters)]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    logprobs, chances = torch.empty(2, num_rows, dtype=torch.float32, device="cpu")
    draws = _Draws(
        *(each.data_ptr() for each in columns),
        *(None if each is None else each.data_ptr() for each in (rows, reshaped_row, masks, allowed_row)),
        *(0 if masks is None else masks.shape[1] // 2,),
        *(token_ids.data_ptr(), logprobs.data_ptr(), chances.data_ptr()),
    )
    with_rows = _rows(logits, temperatures := temperatures.contiguous())
    kept = (draws, columns, temperatures)
    native.run(_function("lockstep_draw", 1), with_rows, ctypes.addressof(draws), kept=kept)
    return token_ids, logprobs, chances


def draw_parts(
    logits: Tensor,
    temperatures: Tensor,
    noise_keys: tuple[Tensor, Tensor],
    is_greedy: Tensor,
    largest: Tensor,
    first_id: int,
) -> Tensor:
    """Draw from a part of each row -> float64 [R, 4 + blocks]: see `parts.draw_part`."""
    logits = _dense(logits)
    out = torch.empty(len(logits), 4 + -(-logits.shape[1] // BLOCK), dtype=torch.float64, device="cpu")
    columns = [column.contiguous() for column in (largest, *noise_keys, is_greedy.long())]
    parts = _Parts(*(column.data_ptr() for column in columns), first_id, out.data_ptr())
    with_rows = _rows(logits, temperatures := temperatures.contiguous())
    kept = (parts, columns, temperatures)
    native.run(_function("lockstep_draw_parts", 1), with_rows, ctypes.addressof(parts), kept=kept)
    return out


def logprobs_of_parts(blocks: Tensor, largest: Tensor, logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log-probabilities float32 [R] of tokens with these logits float32 [R].

    blocks: sums float64 [R, B] of whole rows; largest: their largest logits float32 [R].
    """
    blocks, largest, logits = (each.contiguous() for each in (blocks, largest, logits))
    out = torch.empty(len(blocks), dtype=torch.float32, device="cpu")
    pointers = (blocks.data_ptr(), largest.data_ptr(), logits.data_ptr(), out.data_ptr())
    native.run(_function("lockstep_logprobs_of_parts", 4), _rows(blocks, temperatures.contiguous()), *pointers)
    return out


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Compute the noise float64 [V] of tokens int64 [V] in one row, for a comparison with `noise.gumbel_noise`."""
    out, token_ids = torch.empty(len(token_ids), dtype=torch.float64, device="cpu"), token_ids.contiguous()
    numbers, pointer = [ctypes.c_int64] * 2, ctypes.c_void_p
    noise = native.function(SOURCE, "lockstep_gumbel", [*numbers, pointer, ctypes.c_int64, pointer])
    assert noise is not None, native.why_unavailable(SOURCE)
    noise(seed, position, token_ids.data_ptr(), len(token_ids), out.data_ptr())
    return out


def weights(z: Tensor) -> Tensor:
    """Compute the filters' weights of float32 z [N], for a comparison with `reference.weights`."""
    out, z = torch.empty_like(z), z.contiguous()
    pointer = ctypes.c_void_p
    function = native.function(SOURCE, "lockstep_weights", [pointer, ctypes.c_int64, pointer])
    assert function is not None, native.why_unavailable(SOURCE)
    function(z.data_ptr(), len(z), out.data_ptr())
    return out


def _places(subset: tuple[Tensor, Tensor] | None, num_rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the index of each row's replacement in the subset (-1: none), and the subset's values. None: no subset."""
    if subset is None:
        return None, None
    rows, values = subset
    places = torch.full((num_rows,), -1, dtype=torch.int64, device="cpu")
    return places.index_put((rows,), torch.arange(len(rows), device="cpu")), values


def _dense(logits: Tensor) -> Tensor:
    """Return the logits with each row contiguous; the stride between rows may be any."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _rows(logits: Tensor, temperatures: Tensor) -> _Rows:
    return _Rows(
        *(logits.data_ptr(), temperatures.data_ptr(), *logits.shape, logits.stride(0)),
        *(logits.dtype == torch.bfloat16, int(len(temperatures) > 1), torch.get_num_threads()),
    )


_functions: dict[str, Callable[..., None]] = {}


def _function(name: str, num_pointers: int) -> Callable[..., None]:
    """Return the exported function that takes rows and this number of pointers."""
    if name not in _functions:
        library = native.load(SOURCE)
        assert library is not None, native.why_unavailable(SOURCE)
        arguments: list[type] = [ctypes.POINTER(_Rows), *[ctypes.c_void_p] * num_pointers]
        result = ctypes.c_int64 if name == "lockstep_draw" else None  # the one that may find no memory
        _functions[name] = library.function(name, arguments, result)
    return _functions[name]
