"""Compile the Triton kernels for a Hopper GPU on a machine without one.

    python -m lockstep.tests.support.triton.gpu_compilation DIR LAUNCH...

The launch code of kernels/*/triton_*.py runs unchanged, on tensors of the CPU: it chooses tiles and options, and Triton
chooses the specialisations of a binary. Only the launch itself is left out. For each binary of each launch, a line of
JSON is written to stdout: launch, module, kernel, and binary, whose code is in DIR/BINARY.ptx and DIR/BINARY.cubin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from lockstep.kernels.attention import triton_gradients, triton_selection
from lockstep.kernels.attention import triton_kernels as triton_attention
from lockstep.kernels.attention.step import RowLayout, ScoreRule
from lockstep.kernels.layers import triton_head_norms, triton_rms_norm, triton_rotary, triton_swiglu
from lockstep.kernels.linear import triton_grouped
from lockstep.kernels.linear import triton_kernels as triton_linear
from lockstep.kernels.recurrent import triton_kernels as triton_recurrent
from lockstep.kernels.sampling import triton_draws as triton_sampling
from lockstep.kernels.sampling import triton_logprobs, triton_noise, triton_scan
from lockstep.kernels.sha256 import triton_kernels as triton_sha256

# modules with INTERPRETED
MODULES = (
    triton_attention, triton_gradients, triton_grouped, triton_head_norms, triton_linear, triton_recurrent,
    triton_rms_norm, triton_rotary, triton_scan, triton_sha256, triton_swiglu,
)  # fmt: skip


class Hopper:
    """A driver with the methods that Triton's compiler calls."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def linear(dtype: torch.dtype, row_counts: tuple[int, ...], has_bias: bool = False) -> None:
    weight, bias = torch.zeros(128, 256, dtype=dtype), torch.zeros(128, dtype=dtype)
    for count in row_counts:
        triton_linear.product(torch.zeros(count, 256, dtype=dtype), weight, bias if has_bias else None)


def joined(dtype: torch.dtype, row_counts: tuple[int, ...], has_bias: bool = False) -> None:
    """Launch the products of an 8B model's layers that share their input."""
    for count in row_counts:
        x = torch.zeros(count, 256, dtype=dtype)
        layers = [(torch.zeros(n, 256, dtype=dtype), torch.zeros(n, dtype=dtype) if has_bias else None)
                  for n in (4096, 1024, 1024)]  # fmt: skip
        triton_linear.products(x, layers)
        triton_linear.gated_product(x, *layers[1:])


def experts(dtype: torch.dtype, has_bias: bool = False) -> None:
    """Launch the products of 16 experts, with few routes and with many, with weights in both orders."""
    weights = torch.zeros(16, 256, 128, dtype=dtype)
    biases = torch.zeros(16, 256, dtype=dtype) if has_bias else None
    for count in (1, 32, 1000):
        x, chosen = torch.zeros(count, 128, dtype=dtype), torch.zeros(count * 4, dtype=torch.int64)
        routes = triton_grouped.Routes(chosen, 16)
        routes.product(x, weights, biases, gated=True)
        routes.product(x, torch.zeros(16, 128, 256, dtype=dtype).transpose(1, 2), biases)
        out = routes.product(x, weights, biases)
        for shares in (torch.zeros(count, 4), torch.zeros(count, 4, dtype=dtype)):
            triton_grouped.routed_sum(out, shares, dtype)


def logits_in_places(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield one row, many rows, and rows that begin at an odd address with an odd stride."""
    yield from (torch.zeros(rows, 8192, dtype=dtype) for rows in (1, 32))
    yield torch.zeros(5, 5003, dtype=dtype)[1:]


def logprobs(dtype: torch.dtype) -> None:
    for logits in logits_in_places(dtype):
        ids, heat = torch.zeros(len(logits), dtype=torch.int64), torch.ones(len(logits))
        _, stats = triton_logprobs.selected(logits, ids, heat)
    triton_logprobs.scaled(logits, heat)
    triton_logprobs.selected_gradient(logits, ids, heat, stats, heat)


def draws(dtype: torch.dtype) -> None:
    for logits in logits_in_places(dtype):
        count = len(logits)
        numbers = [torch.zeros(count, dtype=torch.int64) for _ in range(3)]
        filters = (numbers[2], torch.ones(count, dtype=torch.float64), torch.zeros(count))
        triton_sampling.draw(logits, torch.ones(count), (numbers[0], numbers[1]), filters, None, None)
    triton_noise.noise(numbers[0], numbers[1], numbers[2])
    triton_sampling.weights(torch.zeros(40))


def norms(dtype: torch.dtype, width: int, weight_offset: float) -> None:
    weight, fused = torch.ones(width, dtype=dtype), torch.zeros(6, width + 3, dtype=dtype)
    for x in (torch.zeros(1, width, dtype=dtype), torch.zeros(32, width, dtype=dtype), fused[1:, 1 : width + 1]):
        triton_rms_norm.forward(x, weight, 1e-6, weight_offset, True)
        triton_rms_norm.forward_of_sum(x, x, weight, 1e-6, weight_offset, True)
    triton_rms_norm.backward(x, weight, 1e-6, weight_offset, x)


def activations(dtype: torch.dtype) -> None:
    for rows in (1, 32):
        gate = torch.zeros(rows, 96, dtype=dtype)
        triton_swiglu.forward(gate, gate)
        triton_swiglu.slopes(gate, gate, gate)


def rotations(dtype: torch.dtype) -> None:
    """Launch a decode, a chunk, and the trainer's forward and backward, of 32 and 8 heads."""
    caches = torch.zeros(2, 8, 16, 8, 128, dtype=dtype)
    for tokens in (1, 33):
        query, key = (torch.zeros(1, tokens, heads, 128, dtype=dtype).transpose(1, 2) for heads in (32, 8))
        angles, slots = torch.zeros(1, tokens, 128, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
        triton_rotary.rotary_into_cache(query, key, key, angles, angles, (caches[0], caches[1]), slots)
    for tokens in (1, 33):  # in one product, as a decode's are, and at an odd address
        rows = torch.zeros(1, tokens, 48 * 128 + 1, dtype=dtype)[..., tokens % 2 :][..., : 48 * 128]
        heads = [part.unflatten(-1, (-1, 128)).transpose(1, 2) for part in rows.split([4096, 1024, 1024], -1)]
        angles, weight = torch.zeros(1, tokens, 128, dtype=dtype), torch.zeros(128, dtype=dtype)
        triton_head_norms.normed_rotary_into_cache(
            *heads, (weight, weight), (1e-6, 0.0, True), angles, angles, (caches[0], caches[1]),
            torch.zeros(tokens, dtype=torch.int64),
        )  # fmt: skip
    triton_rotary.rotary(query, key, angles, angles)
    triton_rotary.rotary(query, key, angles, angles, back=True)


def attention(dtype: torch.dtype, width: int, rule: ScoreRule, has_sinks: bool = False, reach: int = 0) -> None:
    """Launch a decode of one sequence and of many, a chunk, and packed rows. reach: of a bias by distance, beside which
    each row has sinks of its own."""
    cache, sinks = torch.zeros(8, 16, 2, width, dtype=dtype), torch.zeros(8) if has_sinks else None
    bias = None
    for rows_each, num_sequences, num_blocks in ((1, 1, 1), (1, 33, 48), (48, 3, 5)):
        starts = torch.arange(num_sequences + 1, dtype=torch.int32) * rows_each
        tables = torch.zeros(num_sequences, num_blocks, dtype=torch.int32)
        contexts = torch.full((num_sequences + 1,), rows_each, dtype=torch.int32)[1:]
        query = torch.zeros(rows_each * num_sequences, 8, width, dtype=dtype)
        if reach:
            sinks, bias = torch.zeros(len(query), 8), torch.zeros(len(query), 8, reach, dtype=dtype)
        for sharing in (None, triton_attention.Sharing(3, 4)):
            layout = RowLayout(starts, contexts, tables)
            triton_attention.triton_attention(query, cache, cache, layout, rule, sinks, bias, sharing=sharing)
    packed = cache.flatten(0, 1)[: len(query)]
    triton_attention.triton_attention(query, packed, packed, RowLayout(starts, None, None), rule, sinks, bias)


def prompts(dtype: torch.dtype, width: int) -> None:
    """Launch packed rows in tall tiles."""
    tiling = triton_attention.tall_tiling(triton_attention.tiling_of(dtype, width))
    query, key = torch.zeros(96, 8, width, dtype=dtype), torch.zeros(96, 2, width, dtype=dtype)
    layout = RowLayout(torch.tensor([0, 40, 96], dtype=torch.int32), None, None)
    triton_attention.triton_attention(query, key, key, layout, PLAIN, None, tiling=tiling)


def gradients(dtype: torch.dtype, width: int, rule: ScoreRule, has_sinks: bool = False, reach: int = 0) -> None:
    """Launch the gradients of two packed sequences of 8 heads. reach: as in `attention`."""
    query, key = torch.zeros(96, 8, width, dtype=dtype), torch.zeros(96, 2, width, dtype=dtype)
    starts, sinks = torch.tensor([0, 40, 96], dtype=torch.int32), torch.zeros(8) if has_sinks else None
    bias = torch.zeros(96, 8, reach, dtype=dtype) if reach else None
    sinks = torch.zeros(96, 8) if reach else sinks
    layout = RowLayout(starts, None, None)
    triton_gradients.triton_gradients(query, key, key, sinks, bias, layout, rule, query, query)


def images(dtype: torch.dtype, width: int, rule: ScoreRule) -> None:
    """Launch a chunk and packed rows that see keys behind them, with the gradients of the latter."""
    cache, query = torch.zeros(8, 16, 2, width, dtype=dtype), torch.zeros(96, 8, width, dtype=dtype)
    key, starts = cache.flatten(0, 1)[:96], torch.tensor([0, 40, 96], dtype=torch.int32)
    ends, contexts = torch.tensor([40] * 40 + [56] * 56, dtype=torch.int32), torch.tensor([40, 56], dtype=torch.int32)
    tables = torch.zeros(2, 4, dtype=torch.int32)
    for sharing in (None, triton_attention.Sharing(3, 4)):
        layout = RowLayout(starts, contexts, tables, ends)
        triton_attention.triton_attention(query, cache, cache, layout, rule, None, sharing=sharing)
    packed = RowLayout(starts, None, None, ends)
    triton_attention.triton_attention(query, key, key, packed, rule, None)
    triton_gradients.triton_gradients(query, key, key, None, None, packed, rule, query, query)


def recurrences(dtype: torch.dtype, by_channel: bool) -> None:
    """Launch a decode of one sequence and of many, a chunk, and sequences that begin with zeros."""
    for lengths in ([1], [1] * 33, [48, 3], [5]):
        rows, starts = sum(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        key, value, beta = (
            torch.zeros(rows, 4, 128, dtype=dtype),
            torch.zeros(rows, 8, 128, dtype=dtype),
            torch.zeros(rows, 8),
        )
        g = torch.zeros(rows, 8, 128) if by_channel else beta
        initial = None if lengths == [5] else torch.zeros(len(lengths), 8, 128, 128)
        triton_recurrent.gated_delta_rule(key, key, value, g, beta, initial, starts, 0.1, 1e-6)
        x, weight = torch.zeros(rows, 515, dtype=dtype)[:, 3:], torch.zeros(512, 4, dtype=dtype)
        triton_recurrent.causal_conv(x, weight, None, None, starts, "silu")


def scans() -> None:
    """Launch a scan of 16 states a channel, as `recurrences`."""
    for lengths in ([1], [1] * 33, [48, 3], [5]):
        rows, starts = sum(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        key, value, a = torch.zeros(rows, 1, 16), torch.zeros(rows, 1, 1536), torch.zeros(1, 16, 1536)
        initial = None if lengths == [5] else torch.zeros(len(lengths), 1, 16, 1536)
        triton_recurrent.gated_delta_rule(key, key, value, a, value, initial, starts, 1.0, None, corrects=False)


def selections(dtype: torch.dtype) -> None:
    for rows, length, first in ((1, 64, 0), (3, 100, 1), (16, 4097, 3)):
        query, weight = torch.zeros(rows, 64, 128), torch.zeros(rows, 64)
        keys = torch.zeros(1000 * 128 + 3, dtype=dtype)[first : first + 128_000].view(1000, 128)
        places, counts = torch.zeros(rows, length, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
        triton_selection.triton_scores(query, weight, 0.1, keys, places, counts)


def digests(dtype: torch.dtype, cols: int) -> None:
    triton_sha256.triton_tile_hashes([(torch.zeros(1, 8, 2, cols, dtype=dtype), 1, cols)])


PLAIN, RICH = ScoreRule(0.1, None, None), ScoreRule(0.1, 4096, 30.0)
HALF, FULL = torch.bfloat16, torch.float32
LAUNCHES: dict[str, Callable[[], None]] = {
    "selections, bfloat16": lambda: selections(HALF),
    "selections, float32": lambda: selections(FULL),
    "linear, few rows, bfloat16": lambda: linear(HALF, (1, 2, 16, 100)),
    "linear, few rows, float16": lambda: linear(torch.float16, (1, 33), has_bias=True),
    "linear, many rows, bfloat16": lambda: linear(HALF, (128, 300)),
    "joined, few rows, bfloat16": lambda: joined(HALF, (1, 2, 33)),
    "joined, many rows, bfloat16": lambda: joined(HALF, (128, 300)),
    "joined, biases, float32": lambda: joined(FULL, (1, 33), has_bias=True),
    "experts, bfloat16": lambda: experts(HALF),
    "experts, biases, float32": lambda: experts(FULL, has_bias=True),
    "linear, float32": lambda: linear(FULL, (1, 2, 16, 300)),
    "linear, float64": lambda: linear(torch.float64, (3,)),
    "logprobs, bfloat16": lambda: logprobs(HALF),
    "logprobs, float32": lambda: logprobs(FULL),
    "draws, bfloat16": lambda: draws(HALF),
    "draws, float32": lambda: draws(FULL),
    "norms, bfloat16": lambda: norms(HALF, 4096, 0.0),
    "norms, float32": lambda: norms(FULL, 4096, 0.0),
    "norms of heads, bfloat16": lambda: norms(HALF, 128, 1.0),
    "rotations, bfloat16": lambda: rotations(HALF),
    "rotations, float32": lambda: rotations(FULL),
    "activations, bfloat16": lambda: activations(HALF),
    "activations, float32": lambda: activations(FULL),
    "attention, bfloat16": lambda: attention(HALF, 128, PLAIN),
    "attention, float32": lambda: attention(FULL, 128, PLAIN),
    "attention with everything, bfloat16": lambda: attention(HALF, 80, RICH, has_sinks=True),
    "attention with a bias, bfloat16": lambda: attention(HALF, 128, PLAIN, reach=1024),
    "attention of images, bfloat16": lambda: images(HALF, 128, RICH),
    "attention of images, float32": lambda: images(FULL, 128, PLAIN),
    "prompts, bfloat16": lambda: prompts(HALF, 128),
    "gradients, bfloat16": lambda: gradients(HALF, 128, PLAIN),
    "gradients, float32": lambda: gradients(FULL, 128, PLAIN),
    "gradients with everything, bfloat16": lambda: gradients(HALF, 80, RICH, has_sinks=True),
    "gradients with a bias, bfloat16": lambda: gradients(HALF, 128, PLAIN, reach=1024),
    "recurrences, bfloat16": lambda: recurrences(HALF, by_channel=False),
    "recurrences, float32": lambda: recurrences(FULL, by_channel=True),
    "scans, float32": scans,
    "digests, 64 bytes side by side": lambda: digests(FULL, 64),
    "digests, 4 bytes side by side": lambda: digests(FULL, 5),
    "digests, single bytes": lambda: digests(HALF, 5),
}


def compile_all(folder: Path, launches: list[str]) -> None:
    compiled: list[Any] = []
    triton.runtime.driver.set_active(Hopper())
    triton.runtime.JITFunction.__getitem__ = lambda kernel, grid: (
        lambda *args, **options: compiled.append(kernel.warmup(*args, grid=grid, **options))
    )
    for module in MODULES:
        assert not module.INTERPRETED.value, "TRITON_INTERPRET is set"
        module.INTERPRETED = triton.language.constexpr(True)  # for the launch code: it accepts tensors of the CPU
    for launch in launches:
        compiled.clear()
        LAUNCHES[launch]()
        for binary in {kernel.hash: kernel for kernel in compiled}.values():
            (folder / f"{binary.hash}.ptx").write_text(binary.asm["ptx"])
            (folder / f"{binary.hash}.cubin").write_bytes(binary.asm["cubin"])
            function = binary.src.fn
            names = {"module": ".".join(function.module.split(".")[-2:]), "kernel": function.__name__}
            print(json.dumps({"launch": launch, **names, "binary": binary.hash}))


if __name__ == "__main__":
    compile_all(Path(sys.argv[1]), sys.argv[2:])
