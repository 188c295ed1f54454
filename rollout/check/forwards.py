"""The forwards that the check compares: whole as in the trainer, in pieces as in the engine, and with own attention.

None of them changes the module: its mode, its gradients, its attention and torch's random numbers are as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from ...kernels.attention.selection import SelectedKeys
from ...kernels.attention.step import PagedStep
from ..model.forward_numerics import restored_implementations, use_attention
from ..model.hosted_model import HostedModel
from ..model.memory import is_out_of_memory
from ..model.operations.fused_layers import observing
from ..model.operations.indexer import WATCHING
from ..model.recurrent.states import StepStates
from ..model.rollout_phase import evaluated
from ..model.steps.context import StepContext
from ..model.steps.pools import step_pools

PIECES = (13, 1, 1, 3)  # tokens of the sequence in each step, and ...
BESIDE = (3, 4, 0, 4)  # ... of its neighbour in the same step. In the second, the last layer leaves rows out; the
# third is one row alone
NUM_TOKENS = sum(PIECES)
_BLOCK_SIZE = 16
_BLOCKS = ((3, 1), (2, 0))  # of the sequence and of its neighbour


def random_tokens(config: PretrainedConfig, num_tokens: int, seed: int) -> Tensor:
    """Return int64 [num_tokens], equal for equal arguments, without the special tokens that a configuration names."""
    special: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith(("token_id", "token_index", "token_ids")):
            special.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    vocab_size = config.get_text_config(decoder=True).vocab_size
    usual = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in special])
    return usual[torch.randint(len(usual), (num_tokens,), generator=torch.Generator().manual_seed(seed))]


def whole(hosted: HostedModel, ids: Tensor, rows: Tensor, *, positions: bool = False) -> Tensor:
    """Run the module as the trainer does: under the engine's numerics, in its own mode, with gradients recorded.

    positions: pass position_ids, as the engine does. Returns logits [len(rows), vocab].
    """
    more: dict[str, Any] = {"position_ids": torch.arange(len(ids), device=ids.device)[None]} if positions else {}
    records = not torch.is_inference_mode_enabled()
    gpus = [ids.device] if ids.device.type == "cuda" else []
    with hosted.training_numerics(), torch.set_grad_enabled(records), torch.random.fork_rng(gpus):
        return hosted.module(ids[None], use_cache=False, logits_to_keep=rows, **more).logits[0].detach()


def own(module: PreTrainedModel, ids: Tensor, rows: Tensor) -> Tensor:
    """Run the module with its own operations and its own, plain attention. Returns logits [len(rows), vocab]."""
    with restored_implementations(module), evaluated(module), torch.no_grad():
        use_attention(module, "eager")
        _use_own_experts(module)
        return module(ids[None], use_cache=False, logits_to_keep=rows).logits[0]


def widened(module: PreTrainedModel, ids: Tensor, rows: Tensor) -> Tensor | None:
    """Run a copy of the module as `own` does, with numbers of twice the width. None where it takes too much memory."""
    wide = torch.float64 if module.dtype is torch.float32 else torch.float32
    try:
        other = copy.deepcopy(module)
        nn.Module.to(other, wide)
        return own(other, ids, rows)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _use_own_experts(module: PreTrainedModel) -> None:
    """Have experts computed by their class's own code: grouped products need widths of whole vectors."""
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")


class _Reached(Exception):
    """A forward came to the module whose result was wanted."""


def attention_results(hosted: HostedModel, attention: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Run the module's layers up to an attention. Returns its results [N, D], with the engine's operations and its own.

    Its own attention is PyTorch's fused one where the family has it, which takes no memory for all pairs of tokens.
    """
    found: list[Tensor] = []

    def reached(part: nn.Module, inputs: object, out: Any) -> None:
        found.append((out[0] if isinstance(out, tuple) else out)[0])
        raise _Reached

    module = hosted.module
    hook = attention.register_forward_hook(reached)
    try:
        with hosted.training_numerics(), torch.no_grad(), suppress(_Reached), evaluated(module):
            module(ids[None], use_cache=False, logits_to_keep=1)
        with restored_implementations(module), evaluated(module), torch.no_grad(), suppress(_Reached):
            use_attention(module, "sdpa" if getattr(module, "_supports_sdpa", False) else "eager")
            _use_own_experts(module)
            module(ids[None], use_cache=False, logits_to_keep=1)
    finally:
        hook.remove()
    ours, own = found
    return ours, own


def whole_part(hosted: HostedModel, ids: Tensor | None, hidden: Tensor | None, positions: Tensor) -> Tensor:
    """Run a rank's part of the module over a whole sequence. The ranks of a stage run it together."""
    with hosted.rollout_phase(), torch.inference_mode():
        return hosted.call(ids, positions, None, positions, hidden, mask=None)


def in_pieces(
    hosted: HostedModel, ids: Tensor | None, hidden: Tensor | None, other_ids: Tensor, num_tokens: int
) -> Tensor:
    """Run the first tokens through paged KV, a piece a step, beside a neighbour. Returns their rows of the result.

    hidden: the states [num_tokens, D] that a later stage gets in the place of tokens.
    """
    device, outs = hosted.device, []
    steps = list(zip(PIECES, BESIDE, accumulate(PIECES), accumulate(BESIDE), strict=True))
    num_blocks = 1 + max(map(max, _BLOCKS))
    pools = step_pools(hosted.kv_shapes, hosted.state_shapes, num_blocks, _BLOCK_SIZE, 5, device)
    keys, values, index_keys, states = pools
    with hosted.rollout_phase(), torch.inference_mode():
        for index, (size, beside, end, other_end) in enumerate(steps):
            first = end - size
            size = min(size, num_tokens - first)
            if size <= 0:
                break
            mine = torch.arange(first, first + size, device=device)
            other = torch.arange(other_end - beside, other_end, device=device)
            slots = torch.cat([_slots(_BLOCKS[0], mine), _slots(_BLOCKS[1], other)])
            num = 2 if beside else 1  # sequences
            paged = PagedStep(
                torch.tensor(_BLOCKS[:num], dtype=torch.int32, device=device),
                torch.tensor([0, size, size + beside][: num + 1], dtype=torch.int32, device=device),
                torch.tensor([first + size, other_end][:num], dtype=torch.int32, device=device),
            )
            read, write = (_places(slot, device)[:num] for slot in _slots_of_step(index))
            step_states = StepStates(states, read, write) if states else None
            step = StepContext(slots, paged, keys, values, states=step_states, index_caches=index_keys)
            tokens = None if ids is None else torch.cat([ids[mine], other_ids[other]])
            inputs = None if hidden is None else torch.cat([hidden[mine], hidden[other]])
            out = hosted.forward(tokens, torch.cat([mine, other]), torch.arange(size, device=device), step, inputs)
            outs.append(out[:size].clone())
    return torch.cat(outs)


def _slots_of_step(index: int) -> tuple[int, int]:
    """Return the slots of states that a step reads and writes."""
    return (1 + index % 2, 2 - index % 2) if index else (0, 2)


def _places(slot: int, device: torch.device) -> Tensor:
    """Return the slots of the sequence and its neighbour: each has two, and slot 0 is that of zeros."""
    return torch.tensor([slot, slot + 2 if slot else 0], device=device)


def _slots(blocks: tuple[int, ...], positions: Tensor) -> Tensor:
    return torch.tensor(blocks, device=positions.device)[positions // _BLOCK_SIZE] * _BLOCK_SIZE + (
        positions % _BLOCK_SIZE
    )


class Choices(TorchFunctionMode):
    """A mode that holds the choices of routers and indexers: rounding may flip one, and then no number can be compared.

    The choices of one forward are recorded and repeated in the next: the indices of every torch.topk, argmax and max
    along a dimension, and the keys that the hosted attention selects for one whole sequence, where the module's own
    code calls topk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._indices: list[Tensor] = []
        self._next: int | None = None  # of those to repeat; None while recording

    def repeat(self) -> Choices:
        """Repeat the recorded choices from now on."""
        self._next = 0
        return self

    def __enter__(self) -> Choices:
        self._watching = WATCHING.set(self._selected if self._next is None else None)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        WATCHING.reset(self._watching)
        super().__exit__(*error)

    def _selected(self, keys: SelectedKeys) -> None:
        """Record a selection as indices [1, N, M]; those of a row that sees fewer keys are of keys behind it, too."""
        every = torch.arange(keys.places.shape[1], device=keys.places.device)
        is_full = (keys.counts == len(every))[:, None]
        self._indices.append(torch.where(is_full, keys.places.to(torch.int64), every)[None])

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            indices = self._chosen(out.indices)
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
            return torch.return_types.topk(((args[0] if args else kwargs["input"]).gather(dim, indices), indices))
        if func in (torch.argmax, Tensor.argmax):
            return self._chosen(out)
        if isinstance(out, torch.return_types.max):
            indices, scores = self._chosen(out.indices), args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            found = scores.gather(dim, indices if indices.dim() == scores.dim() else indices.unsqueeze(dim))
            return torch.return_types.max((found.view_as(indices), indices))
        return out

    def _chosen(self, indices: Tensor) -> Tensor:
        if self._next is None:
            self._indices.append(indices.clone())
            return indices
        recorded = self._indices[self._next] if self._next < len(self._indices) else None
        if recorded is None or recorded.shape != indices.shape:
            return indices  # an indexer's that selects all keys: the hosted attention selects none then
        self._next += 1
        return recorded


@dataclass(frozen=True)
class Seen:
    """An input or a result of a module inside the hosted one."""

    place: str
    owner: str  # class of the module whose own code computed it
    tensor: Tensor

    def rows(self, first: int, num_rows: int, total: int) -> Tensor | None:
        """Return some rows of a tensor [1, N, ...] or [N, ...]; None if it has not `total` rows N."""
        by_row = self.tensor[0] if self.tensor.dim() > 2 and len(self.tensor) == 1 else self.tensor
        return by_row[first : first + num_rows] if by_row.dim() > 1 and len(by_row) == total else None


@contextmanager
def watched(module: nn.Module) -> Iterator[list[Seen]]:
    """Yield a list that inputs and results of all modules inside are added to, in the order of their computation."""
    seen: list[Seen] = []

    def note(place: str, owner: nn.Module, value: object) -> None:
        tensor = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seen.append(Seen(place, type(owner).__name__, tensor.detach().clone()))

    with ExitStack() as hooks:
        parents = {child: parent for parent in module.modules() for child in parent.children()}
        for name, part in module.named_modules():
            if part not in parents:
                continue

            @observing
            def before(part: nn.Module, inputs: Any, named: Any, name: str = name) -> None:
                note(f"input of {name}", parents[part], inputs or tuple(named.values()))

            @observing
            def after(part: nn.Module, inputs: Any, out: Any, name: str = name) -> None:
                note(f"result of {name}", part, out)

            hooks.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(after).remove)
        yield seen
