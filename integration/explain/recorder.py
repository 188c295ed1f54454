"""A recorder of every operation of a module: what the modules inside it get and give, and its attention's inputs.

It reads the rows of one sequence from forwards of any kind: whole, in steps beside other sequences, packed. Letters: N
rows of a forward, B batch, T tokens, H heads, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...rollout.model.operations.fused_layers import observing
from ...rollout.sharding.division import Division
from ...rollout.sharding.pp_cut import PassedLayer
from .recording import Operation, Recording, Rows

_IN_A_LAYER = re.compile(r"^(?:.*?\.)?(\d+)(?:\.(.*))?$")  # the first number of a module's name is its layer's
_EAGER = "eager_attention_forward"  # the global name of the plain attention in transformers' modeling files


class Recorder:
    """A reader of the rows of one sequence: those of the next forward that `own` names, or all."""

    def __init__(self, module: PreTrainedModel, division: Division | None = None) -> None:
        """Prepare to record a module, or a rank's part of it with its division."""
        self.recording = Recording()
        self._module, self._division = module, division
        self._places = {id(part): name for name, part in module.named_modules()}
        self._head = module.get_output_embeddings()
        self._own: tuple[int, int] | None = None  # first row and end of the sequence's rows; None: all
        self._depth = 0  # of entered forwards of the whole module and of its base
        self._num_rows = 0  # of the forward
        self._rows: list[int] = []  # of the sequence, in the forward, and ...
        self._positions: list[int] = []  # ... their positions
        self._kept: list[int] = []  # the rows of the forward that have logits
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # tensors of this forward by identity, with recorded copies
        self._axes: dict[Operation, int] = {}  # of the rows in tensors of four dimensions

    def own(self, first: int, num: int) -> None:
        """Record these rows of the forwards to come; none if `num` is 0."""
        self._own = (first, first + num)

    @contextmanager
    def recording_on(self) -> Iterator[Recording]:
        """Record all forwards of the module in the context. Changes no result; removes its hooks at the end."""
        pooling = _of_entries(self._module)
        with ExitStack() as entered:
            for root in dict.fromkeys((self._module, self._module.base_model)):
                entered.callback(root.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            for part in self._module.modules():
                if part in (self._module, self._module.base_model) or part in pooling or isinstance(part, PassedLayer):
                    continue
                entered.callback(part.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                entered.callback(part.register_forward_hook(self._after).remove)
            for root in dict.fromkeys((self._module.base_model, self._module)):
                entered.callback(root.register_forward_hook(self._end, always_call=True).remove)
            entered.enter_context(self._attention_watched())
            yield self.recording

    # -- forwards of the whole module ---------------------------------------------------------------------------------

    def _begin(self, root: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        ids = inputs[0] if inputs else named.get("input_ids")
        ids = named["inputs_embeds"] if ids is None else ids
        self._num_rows = ids.shape[1]
        positions = named.get("position_ids")
        listed = list(range(self._num_rows)) if positions is None else positions[0].tolist()
        first, end = (0, self._num_rows) if self._own is None else self._own
        self._rows, self._positions = list(range(first, end)), listed[first:end]
        self._kept = _kept_rows(named.get("logits_to_keep", 0), self._num_rows)
        self._seen = {}

    def _end(self, root: nn.Module, inputs: object, out: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if isinstance(logits := getattr(out, "logits", None), Tensor):
            self._add(Operation(None, "logits"), logits, self._kept)
        self._seen = {}

    # -- modules ------------------------------------------------------------------------------------------------------

    @observing
    def _before(self, part: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        kept = self._kept if part is self._head else None
        for tensor in (inputs or tuple(named.values()))[:1]:
            self._add(self._operation(part, "input"), tensor, kept)

    @observing
    def _after(self, part: nn.Module, inputs: object, out: object) -> None:
        kept = self._kept if part is self._head else None
        for index, tensor in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if index and isinstance(tensor, Tensor) and tensor.dim() > 3:
                continue  # weights of an attention: [1, H, T, T]
            self._add(self._operation(part, f"result {index}" if index else "result"), tensor, kept, part)

    def _operation(self, part: nn.Module, what: str) -> Operation:
        name = self._places[id(part)]
        if (found := _IN_A_LAYER.match(name)) is None:
            return Operation(None, name, what)
        return Operation(int(found[1]), found[2] or "", what)

    def _add(
        self, operation: Operation, tensor: object, kept: list[int] | None = None, part: nn.Module | None = None
    ) -> None:
        """Record a tensor [1, N, ...], [N, ...] or [1, H, N, D] of a forward, unless it has no such rows.

        kept: the rows of the forward that the tensor has, if not all.
        """
        if not self._depth or not self._rows or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        by_row = self._by_row(operation, tensor, self._num_rows if kept is None else len(kept))
        if by_row is None:
            return
        rows, positions = self._rows, self._positions
        if kept is not None:
            at = {row: index for index, row in enumerate(kept)}
            both = [(at[row], position) for row, position in zip(rows, positions, strict=True) if row in at]
            rows, positions = [row for row, _ in both], [position for _, position in both]
        if rows:
            self._put(operation, tensor, by_row, rows, positions, part)

    def _by_row(self, operation: Operation, tensor: Tensor, num_rows: int) -> Tensor | None:
        """Return a tensor's rows first. None: it has not so many, or that cannot be told from its shape."""
        by_row = tensor[0] if tensor.dim() > 2 and len(tensor) == 1 else tensor
        if by_row.dim() == 3:
            axes = [axis for axis in (0, 1) if by_row.shape[axis] == num_rows]
            if len(axes) == 1:
                self._axes[operation] = axes[0]
            axis = self._axes.get(operation) if axes else None
            return None if axis is None else by_row.transpose(0, axis)
        return by_row if by_row.dim() == 2 and len(by_row) == num_rows else None

    def _put(
        self, operation: Operation, tensor: Tensor, by_row: Tensor, rows: list[int], positions: list[int],
        part: nn.Module | None = None,
    ) -> None:  # fmt: skip
        index = torch.tensor(rows, device=by_row.device)
        values = by_row.detach().index_select(0, index).cpu()
        seen = self._seen.get(id(tensor))
        if seen is not None and _same(seen[1], values):
            values = seen[1]  # the result of one is the input of the next: kept once
        else:
            self._seen[id(tensor)] = (tensor, values)  # the tensor too, so that no other one gets its identity
        found = self.recording.operations.setdefault(operation, Rows(columns=self._columns(part, values)))
        found.add(positions, values)

    def _columns(self, part: nn.Module | None, values: Tensor) -> tuple[tuple[int, int], ...]:
        """Return the columns that a rank's layer has of the whole result, as its weight is divided."""
        if part is None or self._division is None or self._division.mesh.tp == 1:
            return ()
        shard = self._division.shards.get(f"{self._places[id(part)]}.weight")
        if shard is None or shard.is_whole or shard.dim != 0 or shard.shape[0] != values.shape[1]:
            return ()
        return shard.ranges

    # -- attention ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _attention_watched(self) -> Iterator[None]:
        """Put the recorder around every attention that transformers' modules can call, which it looks up by name."""
        local = ALL_ATTENTION_FUNCTIONS._local_mapping
        before = dict(local)
        try:
            for name in list(ALL_ATTENTION_FUNCTIONS):
                ALL_ATTENTION_FUNCTIONS[name] = self._watched(ALL_ATTENTION_FUNCTIONS[name])
            if "eager" not in ALL_ATTENTION_FUNCTIONS and (plain := _plain_attention(self._module)) is not None:
                ALL_ATTENTION_FUNCTIONS["eager"] = self._watched(plain)
            yield
        finally:
            local.clear()
            local.update(before)

    def _watched(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
            for what, heads in (("query", query), ("key", key), ("value", value)):
                self._add_heads(module, what, heads.transpose(1, 2))
            out = attention(module, query, key, value, *args, **named)
            self._add_heads(module, "attention", out[0])
            return out

        return watched

    def _add_heads(self, module: nn.Module, what: str, heads: Tensor) -> None:
        """Record a tensor [1, T, H, D]."""
        if self._depth and self._rows and len(heads) == 1 and heads.shape[1] == self._num_rows:
            self._put(self._operation(module, what), heads, heads[0], self._rows, self._positions)


def _of_entries(module: nn.Module) -> set[nn.Module]:
    """Return the parts that compute with entries of compressed windows of tokens, and not with rows (DeepSeek-V4)."""
    compressors = [part for part in module.modules() if hasattr(part, "compress_rate")]
    return {part for one in compressors for part in one.children() if not isinstance(part, nn.Linear)}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _kept_rows(asked: object, num_rows: int) -> list[int]:
    """Return the rows that get logits: transformers' `logits_to_keep`, rows or a number of last ones; 0: all."""
    if isinstance(asked, Tensor):
        return asked.tolist()
    if isinstance(asked, int) and asked:
        return list(range(num_rows))[-asked:]
    return list(range(num_rows))


def _plain_attention(module: nn.Module) -> Callable[..., Any] | None:
    """Return the plain attention of the module's family. None: its parts have none, or several."""
    forwards: Sequence[Any] = [type(part).forward for part in module.modules()]
    found = {code.__globals__[_EAGER] for code in forwards if _EAGER in getattr(code, "__globals__", {})}
    return found.pop() if len(found) == 1 else None
