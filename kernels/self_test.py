"""The start-up self-test: it finds a matrix product and an attention that keep a row's bits for any neighbours.

A library's product keeps that promise on some processors, at some thread counts, for some shapes. So candidates are
tried on the model's own shapes, one after the other, and the first that passes is used; the last one, one row at a
time, cannot fail.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from .attention import cpp as attention_kernel
from .attention.packed import varlen_attention
from .attention.paged import AttentionPath, PagedStep, attention_path, paged_attention
from .linear import linear as linear_kernel
from .linear.linear import LinearMethod, Product, block_partials, native_path, product_of
from .machine import kept_checks, native
from .machine.gpu import triton_serves

logger = logging.getLogger(__name__)

BATCH_ROWS = 192  # size of the batch whose rows are the reference
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 33)
ODD_OFFSET = 37  # start of the rows of the second try: another place in memory and in the batch
MAX_SHAPES = 6
TRITON_METHODS: tuple[LinearMethod, ...] = ("triton", "triton_fixed")
MAX_WEIGHTS = 1 << 21  # most elements of a tried weight: a wider layer is tried with fewer columns


@dataclass(frozen=True)
class Guarantee:
    """The operations that passed the self-test."""

    linear: LinearMethod  # pass it, with row_multiple, to `invariant_linear`
    row_multiple: int
    attention: AttentionPath  # pass it as `path` to the attention functions
    invariant: bool  # False: no candidate passed, and results may depend on batch mates
    reason: str  # for people
    seconds: float
    native_path: str = ""  # the ISA level of the native product, if it was chosen

    @property
    def choices(self) -> str:
        """Return the chosen operations as text: equal text means equal bits."""
        product = f"{self.linear} ({self.native_path})" if self.native_path else self.linear
        return f"{product}, rows padded to {self.row_multiple}, {self.attention} attention"


@dataclass(frozen=True)
class Candidate:
    method: LinearMethod
    row_multiple: int
    product: Product


@dataclass(frozen=True, order=True)
class Cut:
    """A layer (out_features, in_features) that ranks may divide.

    "columns": each rank computes some of the outputs; "blocks": each sums some of `num_parts` blocks of the inputs.
    Any number of ranks that divides `num_parts` may do so.
    """

    out_features: int
    in_features: int
    along: Literal["columns", "blocks"]
    num_parts: int


_known: dict[tuple[Any, ...], Guarantee] = {}
_KIND = "self-test"  # of kept checks
_FIELDS = [one.name for one in fields(Guarantee)]


def self_test(
    linear_shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    candidates: Sequence[Candidate] | None = None,
    cuts: Iterable[Cut] = (),
) -> Guarantee:
    """Find the first product and attention that are invariant for layers (out_features, in_features) on this machine,
    and for `cuts` of them: a rank's part of a layer has the bits that one rank computes for the whole.

    Takes a fraction of a second: at most MAX_SHAPES distinct shapes (`representative_shapes`) and as many cuts each
    way, none with more than MAX_WEIGHTS weights. The answer is remembered per (shapes, cuts, dtype, device, threads),
    and where it is a guarantee of a CPU it is kept on disk for other processes (`kept_checks`); the caller's own
    `candidates` are tried anew each time. It depends on the number of parts and not on the number of ranks, so that
    ranks, and trainers that hold whole layers, make the same choice.
    """
    shapes = tuple(sorted(set(linear_shapes)))
    wrong = [shape for shape in shapes if len(shape) != 2 or min(shape) < 1]
    if wrong:
        raise ValueError(f"linear_shapes holds {wrong}, which are no pairs of positive sizes")
    cuts = tuple(sorted(set(cuts)))
    key = (shapes, cuts, dtype, str(device), torch.get_num_threads(), _libraries(device))
    if candidates is None and key in _known:
        return _known[key]
    if candidates is None and device.type == "cpu" and (found := kept_checks.kept(_KIND, key, _FIELDS)) is not None:
        _known[key] = Guarantee(**found)
        logger.info("invariance self-test, kept from an earlier process: %s", _known[key].reason)
        return _known[key]
    started = time.perf_counter()
    tried = representative_shapes(shapes)
    product, product_reason = _first_invariant_product(
        candidates or default_candidates(device, dtype), tried, representative_cuts(cuts), dtype, device
    )
    attention, attention_reason = _first_invariant_attention(dtype, device, has_cuts=bool(cuts))
    seconds = time.perf_counter() - started
    guarantee = Guarantee(
        linear=product.method if product else "library",
        row_multiple=product.row_multiple if product else 1,
        attention=attention or attention_path(device, dtype),
        invariant=product is not None and attention is not None,
        reason=f"{dtype} on {device}, {torch.get_num_threads()} threads: {product_reason}; {attention_reason}",
        seconds=seconds,
        native_path=native_path(dtype) if product and product.method == "native" else "",
    )
    log = logger.info if guarantee.invariant else logger.warning
    log("invariance self-test, %.2f s: %s", seconds, guarantee.reason)
    if candidates is None:
        _known[key] = guarantee
        if guarantee.invariant and device.type == "cpu":
            kept_checks.keep(_KIND, key, asdict(guarantee))
    return guarantee


def _libraries(device: torch.device) -> tuple[str, ...]:
    """Return the native sources of operations that this process has no library of: what was found with one that could
    not be compiled, for want of memory or disk, says nothing of a process that has it."""
    sources = (linear_kernel.SOURCE, attention_kernel.SOURCE) if device.type == "cpu" else ()
    return tuple(source for source in sources if native.load(source) is None)


def default_candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """List candidates from the fastest to the one that cannot fail.

    The order depends on the device, the dtype and the processor's features alone: two processes of one machine make the
    same choice. On a CPU with vectors our product is first: in bfloat16 it is as fast as the library's or up to twice
    as fast, in float32 about as fast, and its bits do not depend on the number of threads.
    """
    found = [Candidate(method, 1, product_of(method)) for method in TRITON_METHODS if triton_serves(device)]
    found += [Candidate("padded", multiple, product_of("padded", multiple)) for multiple in (4, 8, 16)]
    on_cpu = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if on_cpu and native.load(linear_kernel.SOURCE) is not None:
        own = Candidate("native", 1, product_of("native"))
        found = [*found, own] if native_path(dtype) == "plain" else [own, *found]
    return [*found, Candidate("rows", 1, product_of("rows"))]


def representative_shapes(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Choose at most MAX_SHAPES shapes: the extremes in K and in N and the odd ones, with N cut to MAX_WEIGHTS / K.

    The cut keeps N modulo 64, on which a library's handling of edges depends.
    """
    by_width = sorted(shapes, key=lambda shape: (shape[1], shape[0]))
    by_columns = sorted(shapes)
    odd = sorted(shapes, key=lambda shape: shape[1] % 32 == 0 and shape[0] % 32 == 0)
    wanted = [*by_width[:1], *by_width[-1:], *odd[:1], *by_columns[-1:], *by_columns[:1], *odd[1:], *by_width]
    chosen: list[tuple[int, int]] = []
    for out_features, in_features in wanted:
        room = max(64, MAX_WEIGHTS // in_features // 64 * 64)
        columns = out_features if out_features <= room else room - 64 + out_features % 64
        shape = (columns, in_features)
        if shape not in chosen:
            chosen.append(shape)
    return chosen[:MAX_SHAPES]


def representative_cuts(cuts: Sequence[Cut]) -> list[Cut]:
    """Choose at most MAX_SHAPES cuts each way: the extremes and the odd ones, with columns cut to MAX_WEIGHTS / K."""
    chosen: list[Cut] = []
    for along in ("columns", "blocks"):
        group = [cut for cut in cuts if cut.along == along]
        by_part = sorted(group, key=lambda cut: cut.out_features if along == "columns" else cut.in_features)
        odd = [cut for cut in group if cut.out_features % 32 or cut.in_features // cut.num_parts % 32]
        wanted = [*by_part[:1], *by_part[-1:], *odd, *group]
        smaller = []
        for cut in wanted:
            room = max(64, MAX_WEIGHTS // cut.in_features // 64 * 64)
            if cut.out_features > room:
                columns = max(cut.num_parts, room // cut.num_parts * cut.num_parts)
                cut = Cut(columns, cut.in_features, cut.along, cut.num_parts)
            if cut not in smaller:
                smaller.append(cut)
        chosen += smaller[:MAX_SHAPES]
    return chosen


def first_cut_difference(
    product: Product, cuts: Iterable[Cut], dtype: torch.dtype, device: torch.device, batch_rows: int = BATCH_ROWS
) -> str | None:
    """Describe the first difference in bits between a rank's part of a layer and the whole, or return None.

    Columns: a slice of the weight gives the same columns as the whole product. Blocks: a partial product over one block
    is the same for operands that are views into the whole layer, views into a rank's part, or separate tensors.
    """
    generator = torch.Generator().manual_seed(2)
    for cut in cuts:
        weight = _noise((cut.out_features, cut.in_features), generator, dtype, device)
        x = _noise((batch_rows, cut.in_features), generator, dtype, device)
        compare = _column_difference if cut.along == "columns" else _block_difference
        for num_ranks in (n for n in range(2, cut.num_parts + 1) if cut.num_parts % n == 0):
            for count in (batch_rows, 1, 5):
                if difference := compare(product, x[:count], weight, num_ranks, cut.num_parts):
                    return f"{count} rows of {cut.in_features} -> {cut.out_features}: {difference}"
    return None


def _column_difference(product: Product, x: Tensor, weight: Tensor, num_ranks: int, _num_parts: int) -> str | None:
    if weight.shape[0] % num_ranks:
        return None  # this number of ranks cannot divide it
    whole = product(x, weight, None).chunk(num_ranks, dim=1)
    for rank in {0, 1, num_ranks - 1}:
        if not torch.equal(product(x, weight.chunk(num_ranks)[rank].clone(), None), whole[rank]):
            return f"columns of rank {rank} of {num_ranks} differ from those of the whole"
    return None


def _block_difference(product: Product, x: Tensor, weight: Tensor, num_ranks: int, num_parts: int) -> str | None:
    whole = block_partials(x, weight, product, num_parts).chunk(num_ranks)
    width = x.shape[1] // num_parts
    for rank in {0, 1, num_ranks - 1}:
        its_x, its_weight = (t.chunk(num_ranks, dim=1)[rank].contiguous() for t in (x, weight))
        if not torch.equal(block_partials(its_x, its_weight, product, num_parts // num_ranks), whole[rank]):
            return f"blocks of rank {rank} of {num_ranks} differ from those of the whole"
        alone = product(its_x[:, :width].contiguous(), its_weight[:, :width].contiguous(), None)
        if not torch.equal(alone, whole[rank][0]):
            return f"a block of rank {rank} of {num_ranks} differs from the same block alone"
    return None


def first_difference(
    product: Product,
    shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    batch_rows: int = BATCH_ROWS,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> str | None:
    """Describe the first difference in bits between a few rows and the same rows in a larger batch, or return None.

    Each count is tried twice: at the batch's start without a bias, and at ODD_OFFSET (if the batch is long
    enough) with one.
    """
    generator = torch.Generator().manual_seed(0)
    for out_features, in_features in shapes:
        weight = _noise((out_features, in_features), generator, dtype, device)
        x = _noise((batch_rows, in_features), generator, dtype, device)
        for bias, offset in ((None, 0), (_noise((out_features,), generator, dtype, device), ODD_OFFSET)):
            whole = product(x, weight, bias)
            for count in row_counts:
                rows = slice(offset, offset + count)
                if rows.stop <= batch_rows and not torch.equal(product(x[rows], weight, bias), whole[rows]):
                    layer = f"{in_features} -> {out_features}"
                    return f"{count} rows of {layer} differ from those of a batch of {batch_rows}"
    return None


def _noise(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32).sub_(0.5).to(device=device, dtype=dtype)


def _first_invariant_product(
    candidates: Sequence[Candidate],
    shapes: Sequence[tuple[int, int]],
    cuts: Sequence[Cut],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Candidate | None, str]:
    failures: list[str] = []
    for candidate in candidates:
        name = f"{candidate.method} product"
        if candidate.method == "padded":
            name += f" with rows padded to {candidate.row_multiple}"
        elif candidate.method == "native":
            name += f" ({native_path(dtype)})"
        # One equal call per row: a short test suffices, a long one would take seconds.
        rows: dict[str, Any] = {"batch_rows": 6, "row_counts": (1, 3)} if candidate.method == "rows" else {}
        difference = first_difference(candidate.product, shapes, dtype, device, **rows)
        if difference is None and candidate.method == "triton":
            difference = _first_tile_difference(shapes, dtype, device)
        if difference is None and cuts:
            num_rows = rows.get("batch_rows", BATCH_ROWS)
            difference = first_cut_difference(candidate.product, cuts, dtype, device, num_rows)
        if difference is None:
            refused = f" (refused: {'; '.join(failures)})" if failures else ""
            and_cuts = f" and {len(cuts)} cuts of layers" if cuts else ""
            return candidate, f"{name}, equal bits for {len(shapes)} layer shapes{and_cuts}{refused}"
        failures.append(f"{name}: {difference}")
    return None, f"no product is invariant ({'; '.join(failures)})"


def _first_tile_difference(shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> str | None:
    """Describe the first tile whose bits are other than those of the rest, or None: small shapes choose only some."""
    from .linear import triton_kernels  # imports Triton, which may not be installed

    return triton_kernels.first_tile_difference([width for _, width in shapes], dtype, device)


def _first_invariant_attention(
    dtype: torch.dtype, device: torch.device, *, has_cuts: bool
) -> tuple[AttentionPath | None, str]:
    preferred = attention_path(device, dtype)
    paths: list[AttentionPath] = [preferred, "torch"] if preferred != "torch" else ["torch"]
    for path in paths:
        if attention_is_invariant(path, dtype, device) and not (
            has_cuts and not heads_are_independent(path, dtype, device)
        ):
            tiles = ""
            if path == "triton" and dtype != torch.float32:
                agree = _tall_tiles_agree(dtype, device)
                tiles = ", prompts in tiles of 64 rows" if agree else ", tiles of 16 rows (taller ones have other bits)"
            return path, f"{path} attention, equal bits for chunks and whole{tiles}"
    return None, f"no attention is invariant (tried {', '.join(paths)})"


def _tall_tiles_agree(dtype: torch.dtype, device: torch.device) -> bool:
    from .attention import triton_kernels  # imports Triton, which may not be installed

    return triton_kernels.use_tall_tiles(dtype, device)


def heads_are_independent(path: AttentionPath, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a rank that holds some of the heads, down to one, computes the same bits as one with all."""
    length, generator = 70, torch.Generator().manual_seed(3)
    query, key, value = (_noise((length, n * 32), generator, dtype, device).view(length, n, 32) for n in (8, 2, 2))
    start = torch.tensor([0, length], dtype=torch.int32, device=device)
    whole = varlen_attention(query, key, value, start, scale=0.5, path=path)
    for heads in (slice(0, 4), slice(4, 6), slice(7, 8)):
        kv = slice(heads.start // 4, heads.start // 4 + 1)
        q, k, v = query[:, heads].contiguous(), key[:, kv].contiguous(), value[:, kv].contiguous()
        if not torch.equal(varlen_attention(q, k, v, start, scale=0.5, path=path), whole[:, heads]):
            return False
    return True


def attention_is_invariant(path: AttentionPath, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether packed attention and paged attention in chunks agree: 210 tokens, two heads a KV head, 48 wide."""
    length, block_size = 210, 16
    generator = torch.Generator().manual_seed(1)
    query, key, value = (_noise((length, n * 48), generator, dtype, device).view(length, n, 48) for n in (4, 2, 2))
    start = torch.tensor([0, length], dtype=torch.int32, device=device)
    whole = varlen_attention(query, key, value, start, scale=0.5, path=path)
    num_blocks = -(-length // block_size)
    ids = torch.randperm(num_blocks, generator=generator).to(device=device)
    position = torch.arange(length, device=device)
    caches = []
    for rows in (key, value):
        cache = rows.new_zeros(num_blocks, block_size, 2, 48)
        cache[ids[position // block_size], position % block_size] = rows
        caches.append(cache)
    begin = 0
    for count in (1, 2, 5, 16, 43, 126, 7, 8, 1, 1):
        end = begin + count
        step = PagedStep(
            ids.to(torch.int32)[None],
            torch.tensor([0, count], dtype=torch.int32, device=device),
            torch.tensor([end], dtype=torch.int32, device=device),
        )
        out = paged_attention(query[begin:end], caches[0], caches[1], step, scale=0.5, path=path)
        if not torch.equal(out, whole[begin:end]):
            return False
        begin = end
    assert begin == length
    return True
