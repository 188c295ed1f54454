"""Changes of one unit in the last place, planted in a model: in one parameter, or in what one operation gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lockstep.rollout.model.operations import fused_layers

SEAMS = ("query", "key", "attention")  # the first two: what the rotary embedding gives


@dataclass(frozen=True)
class Plant:
    """A change and its place."""

    kind: str  # "parameter", "result" or "input" of a module, or one of SEAMS
    module: str  # its name
    parameter: str = ""  # its name in the module
    element: int = 0  # of the parameter, or of a row; beyond its size: from the start again
    position: int = 0  # the row that an operation's result is changed in

    @property
    def what(self) -> str:
        """What an explanation calls the operation that it is found in."""
        return "result" if self.kind == "parameter" else self.kind


def draw(model: PreTrainedModel, num_rows: int, random_numbers: random.Random) -> Plant:
    """Draw a change: as often in a parameter as in an operation."""
    element, position = random_numbers.randrange(1 << 20), random_numbers.randrange(num_rows)
    if random_numbers.random() < 0.5:
        name = random_numbers.choice([name for name, _ in model.named_parameters()])
        module, _, parameter = name.rpartition(".")
        return Plant("parameter", module, parameter, element)
    names = [name for name, part in model.named_modules() if name.count(".") and not isinstance(part, nn.ModuleList)]
    names = [name for name in names if "act_fn" not in name]  # the engine computes it together with the product
    places = [(kind, name) for name in names for kind in ("result", "input") if (kind, name) != ("input", names[0])]
    attentions = [name for name in names if name.endswith("self_attn")]
    places = [place for place in places if place[1] != "model.rotary_emb" and place != ("input", "model.embed_tokens")]
    places = [place for place in places if place[0] == "result" or place[1] not in attentions]  # passed by name
    places += [(seam, name) for name in attentions for seam in SEAMS]
    kind, module = random_numbers.choice(places)
    return Plant(kind, module, "", element, position)


@contextmanager
def planted(model: PreTrainedModel, plant: Plant) -> Iterator[None]:
    """Make the change for the time of the context."""
    part = model.get_submodule(plant.module)
    if plant.kind == "parameter":
        values = part.get_parameter(plant.parameter).data.view(-1)
        index = plant.element % len(values)
        before = values[index].clone()
        values[index] = torch.nextafter(before, torch.tensor(torch.inf, dtype=before.dtype))
        try:
            yield
        finally:
            values[index] = before
        return
    positions: list[int] = []

    def begin(_: nn.Module, inputs: object, named: dict[str, Any]) -> None:
        found = named.get("position_ids")
        positions[:] = range(1 << 20) if found is None else found[0].tolist()

    def changed(tensor: Tensor) -> Tensor:
        """Return [1, N, ...] with one element of the row of the plant's position changed."""
        if plant.position not in positions[: tensor.shape[1]]:
            return tensor
        out = tensor.clone()
        row = out[0, positions.index(plant.position)]
        place = torch.unravel_index(torch.tensor(plant.element % row.numel()), row.shape)
        row[place] = torch.nextafter(row[place], torch.full_like(row[place], torch.inf))
        return out

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    before, rotary = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), fused_layers._rotary
    if plant.kind == "result":
        hooks.append(
            part.register_forward_hook(
                lambda _, inputs, out: (changed(out[0]), *out[1:]) if isinstance(out, tuple) else changed(out)
            )
        )
    elif plant.kind == "input":
        hooks.append(part.register_forward_pre_hook(lambda _, inputs: (changed(inputs[0]), *inputs[1:])))
    elif plant.kind == "attention":
        for name in list(ALL_ATTENTION_FUNCTIONS):
            ALL_ATTENTION_FUNCTIONS[name] = _around(ALL_ATTENTION_FUNCTIONS[name], part, changed)
    else:
        calls = _RotaryCalls(SEAMS.index(plant.kind), part.layer_idx, changed)
        hooks.append(model.register_forward_pre_hook(calls.begin))
        fused_layers._rotary = calls
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        fused_layers._rotary = rotary
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)


def _around(attention: Callable[..., Any], part: nn.Module, changed: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return the attention that changes its result in one layer."""

    def planted_attention(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        out = attention(module, *inputs, **named)
        return (changed(out[0]), *out[1:]) if module is part else out

    return planted_attention


class _RotaryCalls:
    """The rotary embedding of a model, which its layers call in their order, with one result of one layer changed."""

    def __init__(self, index: int, layer: int, changed: Callable[[Tensor], Tensor]) -> None:
        self._index, self._layer, self._changed = index, layer, changed
        self._rotary = fused_layers._rotary
        self._num_calls = 0

    def begin(self, *_: object) -> None:
        self._num_calls = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = list(self._rotary(*inputs))
        if self._num_calls == self._layer:
            out[self._index] = self._changed(out[self._index].transpose(1, 2)).transpose(1, 2)
        self._num_calls += 1
        return tuple(out)
