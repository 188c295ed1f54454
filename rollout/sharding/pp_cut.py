"""The cut of a whole module down to one pipeline stage.

The module keeps its structure: layers of other stages are replaced by modules that return their input, so that layer
indices, and the values that a forward reads by them, stay the same.
"""

from __future__ import annotations

import inspect

from torch import Tensor, nn
from transformers import PreTrainedModel

# Parts of the base models of families without a pipeline plan, by model_type.
_MISSING_PLANS = {
    "lfm2": ("embed_tokens", "layers", "embedding_norm"),
    "lfm2_moe": ("embed_tokens", "layers", "embedding_norm"),
    "granitemoehybrid": ("embed_tokens", "layers", "norm"),
    "nemotron_h": ("embeddings", "layers", "norm_f"),
}

_SELECTION = "prev_topk_indices"  # an argument of layers that may take the selection of the layer before


def stage_layers(num_layers: int, pp: int, pp_rank: int) -> range:
    """Return the layers of a stage: contiguous, and equally many per stage, or one more on the first few.

    Raises ValueError if a stage would have none.
    """
    if num_layers < pp:
        raise ValueError(f"pp={pp} stages need at least as many layers, and the model has {num_layers}")
    size, rest = divmod(num_layers, pp)
    first = pp_rank * size + min(pp_rank, rest)
    return range(first, first + size + (pp_rank < rest))


class PassedLayer(nn.Module):
    """A substitute for a layer of another stage. It has the attributes of the layer that a model's forward reads."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.received: Tensor | None = None  # [1, N, D] where this stage begins: its first layer gets this as its input
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)
        # Such layers also give the keys that their indexer selects, which layers without an indexer take. The first
        # layer of a stage must have its own.
        self._gives_selection = _SELECTION in inspect.signature(layer.forward).parameters

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor, None]:
        passed = hidden_states if self.received is None else self.received
        return (passed, None) if self._gives_selection else passed


def _stage_parts(module: PreTrainedModel) -> list[str]:
    """Return the names of the parts that a stage has or not, in the order in which they run."""
    missing = _MISSING_PLANS.get(module.config.get_text_config(decoder=True).model_type, ())
    parts = [*(f"{module.base_model_prefix}.{name}" for name in missing), *(module._pp_plan or ())]
    head = module.get_output_embeddings()
    return parts + [name for name, part in module.named_modules() if part is head and name not in parts]


def stage_problems(module: PreTrainedModel) -> list[str]:
    """Return the reasons why a module cannot be cut into stages; empty when it can."""
    plan = _stage_parts(module)
    layers = f"{module.base_model_prefix}.layers"
    if layers not in plan or not isinstance(module.get_submodule(layers), nn.ModuleList):
        return [f"{type(module).__name__} brings no pipeline plan (base_model_pp_plan) with {layers}"]
    known = (layers, *plan)
    return [
        f"{name} belongs to no stage of its pipeline plan"
        for name, _ in module.named_parameters()
        if not any(name.startswith(f"{part}.") for part in known)
    ]


def cut_stage(module: PreTrainedModel, layers: range, *, is_first: bool, is_last: bool) -> PassedLayer | None:
    """Keep only the stage's own modules. Returns the substitute layer that passes on the stage's input.

    The plan's modules before the layers belong to the first stage, those behind them to the last. A last stage whose
    head is tied to the embedding keeps the embedding too.
    """
    stand_in: PassedLayer | None = None
    all_layers = module.get_submodule(f"{module.base_model_prefix}.layers")
    assert isinstance(all_layers, nn.ModuleList)
    for index, layer in enumerate(all_layers):
        if index not in layers:
            all_layers[index] = passed = PassedLayer(layer)
            stand_in = passed if index == layers.start - 1 else stand_in
    names = _stage_parts(module)
    base = [name for name in names if name.startswith(f"{module.base_model_prefix}.")]
    where = base.index(f"{module.base_model_prefix}.layers")
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for name in names:
        part = module.get_submodule(name)
        before = name in base[:where]
        if part is all_layers or (is_first if before else is_last) or (is_last and is_tied and part is embedding):
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, nn.Identity())
    return stand_in
