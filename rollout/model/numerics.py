"""Install and remove the invariant operations of a module's forward (docs/architecture.md, "Numerics").

Linear layers, norms and activations get a forward of their own while the numerics are installed; the code around them
(routers, experts, gates) runs under a mode that redirects functions of torch. The trainer's forward and the rollout's
run the same operations, so their numbers have the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, activations
from transformers.modeling_layers import GradientCheckpointingLayer

from ...kernels.layers.activation import gelu, gelu_tanh, silu
from ...kernels.linear.linear import Product, invariant_linear, product_of, together_of
from ...kernels.machine.gpu import triton_serves
from ...kernels.sampling.definition import DRAW_DEFINITION
from ...kernels.self_test import Guarantee, self_test
from ..errors import PhaseError
from ..sharding.collectives import GatheredColumns, RowReduction, StageRanks, VocabularyLookup
from ..sharding.division import Division
from ..sharding.tp_plan import SUMS
from .attention import CHUNK, chunk_of
from .encoders.vision import WHOLE, whole_attention_parts
from .experts import GROUPED, REDUCTION, grouped_routes, is_experts
from .last_layer import LastLayer
from .layer_probe import OWN_ATTENTION
from .module_code import class_forward
from .operations.block_indexer import block_indexer_forward
from .operations.carried import carrying_forward
from .operations.compressor import compressor_of
from .operations.distance_bias import DISTANCE_BIAS, distance_bias_forward, reach_of, without_distances
from .operations.entries import COMPRESSOR
from .operations.functions import ReplacedFunctions, invariant_functions, outside_modes
from .operations.fused_layers import fused_forward, gates_by_halves, is_gated_mlp, silu_as_gated
from .operations.indexer import indexer_forward
from .operations.pools import MASK_OF, mask_of_choice, pooled_indexer_forward
from .operations.row_positions import CHECKPOINTS_CACHE, counting_forward, telling_forward
from .operations.shared_attention import shared_attention_forward
from .operations.shared_input import SharedInput, siblings_of
from .operations.shared_queries import SHARED_QUERIES, makes_no_queries, shared_query_attention
from .own_attention.key_bias import key_bias_of
from .own_attention.layers import OwnAttention, own_attentions
from .recurrent.heads import HeadDivision
from .recurrent.layers import recurrent_forward
from .recurrent.ngrams import SHORT_CONV, ngram_forward, short_conv_of
from .supported import stated_context
from .tensors import first_weight

_COPY = "__deepcopy__"  # copy.deepcopy calls this attribute of an instance
_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.SiLU: silu,
    activations.SiLUActivation: silu,
    activations.GELUTanh: gelu_tanh,
    activations.GELUActivation: gelu,
}


class Numerics:
    """The operations of one module, chosen by this processor's self-test and by the module's division.

    `with numerics.installed():` is re-entrant; when the outermost ends, every forward is restored.
    """

    def __init__(
        self, module: PreTrainedModel, invariant: bool, division: Division, *,
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Choose and plan the operations. device, dtype: on which and in which the forward will compute; those of the
        weights by default."""
        parameter = first_weight(module.parameters())
        self._device = device or parameter.device
        self.guarantee: Guarantee | None = None
        self._patches: list[tuple[nn.Module, str, object]] = []  # instance attributes, forward mostly, while installed
        self._own_forwards: list[tuple[nn.Module, Any]] = []
        self._functions: ReplacedFunctions | None = None
        self.divided_logits: GatheredColumns | None = None  # the last layer, if ranks share its columns
        self.groups_experts = False  # whether all experts of a layer are one call, which reads itself which are chosen
        self.numbers_keys = False  # whether code of the model numbers the keys of a call, by its mask if it has one
        self.last_layer: LastLayer | None = None  # if its rows may be left out
        # The whole module, and the parts of it that may run on their own: a backward pass runs checkpointed layers.
        self._entrances = [m for m in module.modules() if isinstance(m, PreTrainedModel | GradientCheckpointingLayer)]
        self._depth = 0
        if invariant:
            shapes = division.linear_shapes
            self.guarantee = self_test(shapes, dtype or parameter.dtype, self._device, cuts=division.cuts)
            _refuse_other_products(module, parameter.dtype, self._device, self.guarantee)
        self._plan_recurrent(module, division)
        self._plan_own_attention(module)
        self._needs_mask = any(name == OWN_ATTENTION for _, name, _ in self._patches)
        self._plan_shared(module, division)
        if self.guarantee is not None:
            self._plan_invariant(module, self.guarantee)
            if division.mesh.num_ranks == 1:  # ranks would have to leave out the same rows
                self.last_layer = LastLayer.of(module, division.layers.stop - 1)
        kinds = {type(module) for module, name, _ in self._patches if name == "forward"}
        patched = [module for module, name, _ in self._patches if name == "forward"]
        self._uncopied = list(dict.fromkeys([*self._entrances, *patched]))
        self._replaced = {kind: class_forward(kind) for kind in kinds}  # forwards of classes that these stand for

    def describe(self) -> str:
        """Return one line for people: the guarantee, its operations, and the number of the definition of draws."""
        reason = self.guarantee.reason if self.guarantee else "invariant mode is off: numbers may depend on the batch"
        return f"{reason}; draws by definition {DRAW_DEFINITION}"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the module with these operations. Changes only instance attributes, and restores them. Raises ValueError
        for parts that have another forward than the one that was replaced, of their own or of their class."""
        if self._depth == 0:
            self._refuse_other_forwards()
            for module, name, value in self._patches:
                setattr(module, name, value)
            for module in self._uncopied:  # a copy's forwards would compute with this module's weights
                vars(module)[_COPY] = _refuse_copy
            self._own_forwards = self._enter_functions()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for module, own in self._own_forwards:
                    if own is None:
                        del module.forward
                    else:
                        module.forward = own
                for module, name, _ in self._patches:
                    delattr(module, name)
                for module in self._uncopied:
                    del vars(module)[_COPY]

    def _refuse_other_forwards(self) -> None:
        hooked = [module for module, name, _ in self._patches if name in vars(module)]
        if hooked:
            names = sorted({type(module).__name__ for module in hooked})
            raise ValueError(f"modules with a forward of their own cannot be hosted: {', '.join(names)}")
        if changed := [kind.__name__ for kind, own in self._replaced.items() if class_forward(kind) is not own]:
            raise ValueError(
                f"{', '.join(sorted(changed))}: the forward of the class was changed after the engine was made, which "
                "computes these modules itself: change it before the engine is made, or make the engine anew"
            )

    def around(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return the function under the mode that replaces functions of torch."""
        return function if self._functions is None else self._functions.around(function)

    def _enter_functions(self) -> list[tuple[nn.Module, Any]]:
        """Put the mode around the entrances, and carry the keywords of models. Returns them with the forward that each
        instance had of its own."""
        can_compile = "torch._dynamo" in sys.modules  # else nothing is compiled, and the import would take seconds
        entrances = [m for m in self._entrances if self._functions is not None or isinstance(m, PreTrainedModel)]
        own: list[tuple[nn.Module, Any]] = [(module, vars(module).get("forward")) for module in entrances]
        for module, _ in own:
            last = self.last_layer
            forward = module.forward
            if last is not None and module is last.module:
                forward = last.narrowing(forward)
            forward = self.around(forward)
            if isinstance(module, PreTrainedModel):
                forward = carrying_forward(forward, takes=type(module).forward, masks=self._needs_mask)
            # A compiled caller runs the module uncompiled: the compiler would trace into operations that it breaks.
            module.forward = torch.compiler.disable(forward) if can_compile else forward
        return own

    def _plan_recurrent(self, root: nn.Module, division: Division) -> None:
        """Plan the forwards of recurrent layers, of indexers and of attention that counts rows, and chunks of some."""
        heads = HeadDivision(StageRanks.of(division.mesh), division.mesh.tp_rank)
        own = own_attentions(root)
        recurrent = set()
        for module in root.modules():
            if (forward := recurrent_forward(module, heads)) is not None:
                self._patches.append((module, "forward", forward))
                recurrent.add(module)
        for module in root.modules():
            pooled = pooled_indexer_forward(module) or block_indexer_forward(module) or ngram_forward(module)
            telling = None if module in own else counting_forward(module)
            counting = telling
            telling = telling or telling_forward(module, recurrent) or shared_attention_forward(module)
            forward = pooled or indexer_forward(module) or telling
            forward = forward or distance_bias_forward(module) or without_distances(module)
            if forward is not None:
                self._patches.append((module, "forward", forward))
            if counting is not None and hasattr(module, CHECKPOINTS_CACHE):
                self._patches.append((module, CHECKPOINTS_CACHE, True))
            if (mask_of := mask_of_choice(module)) is not None:
                self._patches.append((module, MASK_OF, mask_of))
            if (short_conv := short_conv_of(module)) is not None:
                self._patches.append((module, SHORT_CONV, short_conv))
            if (reach := reach_of(module)) is not None:
                self._patches.append((module, DISTANCE_BIAS, reach))
            if (found := compressor_of(module)) is not None:
                self._patches += [(found[0], "forward", found[1]), (module, COMPRESSOR, id(found[0]))]
            if (chunk := chunk_of(module)) is not None:
                self._patches.append((module, CHUNK, chunk))
            if makes_no_queries(module):
                self._patches.append((module, SHARED_QUERIES, shared_query_attention(self._linear())))
        self._patches += [(part, WHOLE, True) for part in whole_attention_parts(root)]

    def _plan_own_attention(self, root: PreTrainedModel) -> None:
        parts = own_attentions(root)
        reach = stated_context(root.config.get_text_config(decoder=True))
        key_bias = key_bias_of(root, parts[0], reach) if parts and reach else None
        self.numbers_keys = key_bias is not None
        for layer, part in enumerate(parts):
            attention = OwnAttention(part, root.config, key_bias)
            self._patches += [(part, "forward", attention.forward), (part, OWN_ATTENTION, True)]
            if getattr(part, "layer_idx", None) is None:
                self._patches.append((part, "layer_idx", layer))

    def _plan_shared(self, root: nn.Module, division: Division) -> None:
        """Plan the forwards of layers that several ranks share, or that sum K-blocks as if ranks shared them."""
        mesh, in_order = division.mesh, self.guarantee is not None
        num_blocks = division.k_blocks // mesh.tp if in_order else 1
        ranks = StageRanks.of(mesh)
        reduction = RowReduction(in_order, num_blocks, ranks)
        if mesh.tp == 1 and num_blocks == 1:
            return
        linear, product = self._linear(), self._product()
        for name, module in root.named_modules():
            role = division.roles[name]
            if role == "experts":
                self._patches.append((module, REDUCTION, reduction))
            elif role in SUMS and type(module) is nn.Linear:
                if mesh.tp == 1:
                    forward = _linear_forward(module, partial(linear, num_blocks=num_blocks))
                else:
                    forward = _row_forward(module, product, reduction, mesh.tp_rank if role == "row_split" else None)
                self._patches.append((module, "forward", forward))
            elif role == "column_gather" and division.holds_part(f"{name}.weight"):
                part = range(*division.shards[f"{name}.weight"].ranges[0])
                columns = GatheredColumns(_linear_forward(module, linear), part, ranks)
                self._patches.append((module, "forward", columns))
                if module is root.get_output_embeddings():  # type: ignore[operator]  # a PreTrainedModel
                    self.divided_logits = columns
            elif role == "embedding" and division.holds_part(f"{name}.weight"):
                first = division.shards[f"{name}.weight"].ranges[0][0]
                functions = ReplacedFunctions({F.embedding: VocabularyLookup(first, ranks)})
                self._patches.append((module, "forward", functions.around(module.forward)))

    def _plan_invariant(self, root: nn.Module, guarantee: Guarantee) -> None:
        self._functions = invariant_functions(
            outside_modes(self._linear()),
            defers=triton_serves(self._device),
            is_training=lambda: any(part.training for part in root.modules()),
        )
        planned = {id(module) for module, name, _ in self._patches if name == "forward"}
        divided = frozenset(planned)

        together = together_of(guarantee.linear)

        def is_plain(module: nn.Module) -> bool:
            return type(module) is nn.Linear and id(module) not in divided

        if together is not None:
            for layers in (found for parent in root.modules() for found in siblings_of(parent)):
                if planned.isdisjoint(map(id, layers)):
                    shared = SharedInput(layers, self._linear(), together.products)
                    forwards = [outside_modes(shared.forward_of(index)) for index in range(len(layers))]
                    self._patches += [(layer, "forward", own) for layer, own in zip(layers, forwards, strict=True)]
                    planned.update(map(id, layers))
        grouped = [(module, grouped_routes(module, guarantee)) for module in root.modules() if is_experts(module)]
        self.groups_experts = all(routes is not None for _, routes in grouped)
        self._patches += [(module, GROUPED, routes) for module, routes in grouped if routes is not None]
        gating = {id(part.act_fn) for part in root.modules() if is_gated_mlp(part) or gates_by_halves(part)}
        for module in root.modules():
            if id(module) in planned:
                continue
            forward: object = None
            if type(module) is nn.Linear:
                forward = _linear_forward(module, self._linear())
            elif id(module) in gating:
                forward = outside_modes(silu_as_gated)
            elif type(module) in _ACTIVATIONS:
                forward = outside_modes(_ACTIVATIONS[type(module)])
            elif (fused := fused_forward(module, is_plain, together.gated if together else None)) is not None:
                forward = fused
            if forward is not None:
                self._patches.append((module, "forward", forward))

    def _linear(self) -> Callable[..., Tensor]:
        if self.guarantee is None:
            return F.linear
        return partial(invariant_linear, method=self.guarantee.linear, row_multiple=self.guarantee.row_multiple)

    def _product(self) -> Product:
        return product_of(self.guarantee.linear, self.guarantee.row_multiple) if self.guarantee else F.linear


def _refuse_copy(memo: object) -> NoReturn:
    raise PhaseError(
        "a module cannot be copied under an engine's numerics, for the copy would compute with its weights: copy it "
        "outside the rollout phase"
    )


def _refuse_other_products(root: nn.Module, own: torch.dtype, device: torch.device, guarantee: Guarantee) -> None:
    """Raise ValueError if layers of a second dtype, adapters in float32 for instance, need another product."""
    shapes: dict[torch.dtype, set[tuple[int, int]]] = {}
    for module in root.modules():
        if type(module) is nn.Linear and module.weight.dtype is not own:
            shapes.setdefault(module.weight.dtype, set()).add((module.out_features, module.in_features))
    for dtype, found in shapes.items():
        other = self_test(found, dtype, device)
        if (other.linear, other.row_multiple) != (guarantee.linear, guarantee.row_multiple):
            raise ValueError(
                f"{len(found)} shapes of layers in {dtype} need another product here ({other.choices}) than those in "
                f"{own} ({guarantee.choices}): give all one dtype (autocast_adapter_dtype=False for PEFT)"
            )


def _linear_forward(module: nn.Linear, linear: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return outside_modes(lambda x: linear(x, module.weight, module.bias))


def _row_forward(
    module: nn.Linear, product: Product, reduction: RowReduction, part: int | None
) -> Callable[[Tensor], Tensor]:
    """Return a forward that sums partial products over ranks.

    part: this rank's part of the inputs if every rank has them whole; None if a rank has its own part only.
    """

    def forward(x: Tensor) -> Tensor:
        mine = x if part is None else x.chunk(reduction.ranks.tp, dim=-1)[part]
        out = reduction.product(mine.reshape(-1, mine.shape[-1]), module.weight, module.bias, product)
        return out.view(*x.shape[:-1], -1)

    return outside_modes(forward)
