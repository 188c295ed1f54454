"""A Hugging Face causal LM, borrowed from the trainer or loaded from a folder, as the engine runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...kernels.machine.huge_pages import use_huge_pages
from ..errors import MemoryReleased, PhaseError
from ..ranks.mesh import Mesh
from ..sharding.division import FullSpec, divide
from ..sharding.part import Part, copy_part, load_part
from ..sharding.shards import Shard
from .attention import NO_MASK, STEP_KEYWORD, KVShape, LayerProbe, StepContext
from .forward_numerics import ForwardNumerics
from .rollout_phase import RolloutPhase
from .supported import DTYPES, refuse_different_choices, refuse_unsupported
from .tensors import HostedTensors

logger = logging.getLogger(__name__)


class HostedModel:
    """The module, or this rank's part of it, its numerics, and the phase it is in.

    A module adopted from a trainer is the engine's only inside `rollout_phase()`. One loaded here always is, and so is
    the part of a rank that shares the model with others.
    """

    def __init__(self, part: Part, *, owned: bool, invariant: bool, trained: PreTrainedModel | None = None) -> None:
        """trained: the trainer's module where `part` is a copy of parts of it."""
        self.module = part.module
        self._tensors = HostedTensors(self.module)
        self.owned = owned
        self.division = part.division
        self._stage_input = part.stage_input
        self.config = self.module.config.get_text_config(decoder=True)
        refuse_unsupported(self.module, self.config, invariant)
        hosted = ForwardNumerics(self.module, invariant, self.division)
        self.numerics = hosted.numerics
        self._trained = hosted
        if trained is not None:
            self._trained = ForwardNumerics(trained, invariant, _whole(trained, self.division.k_blocks).division)
        refuse_different_choices(self.numerics.guarantee, self.mesh)
        self._phase = RolloutPhase(hosted, owned=owned)
        self._released_shapes: list[torch.Size] = []  # of the parameters in their order, while their memory is released
        use_huge_pages((parameter for _, parameter in self._tensors.parameters()), now=True)
        self.kv_shapes = self._probe()  # of this rank's layers, in their order
        logger.info("hosting %s: %s", type(self.module).__name__, self.numerics.describe())

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: str | None, device: str | None, invariant: bool, k_blocks: int = 1,
        mesh: Mesh | None = None,
    ) -> HostedModel:  # fmt: skip
        """Load a folder in Hugging Face format, or this rank's part of it. Raises ValueError naming what is missing,
        or cannot be divided."""
        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"model folder {str(path)!r} holds no config.json")
        config = AutoConfig.from_pretrained(path)
        kept = DTYPES[dtype] if dtype else getattr(config, "dtype", None) or torch.float32
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if mesh is not None and mesh.num_ranks > 1:
            part = load_part(path, config, kept, torch.device(device), mesh, k_blocks)
        else:
            module = AutoModelForCausalLM.from_pretrained(path, dtype=kept)
            part = _whole(module.to(device).eval().requires_grad_(False), k_blocks)
        return cls(part, owned=True, invariant=invariant)

    @classmethod
    def adopt(
        cls, module: nn.Module, *, dtype: str | None, device: str | None, invariant: bool, k_blocks: int = 1,
        mesh: Mesh | None = None,
    ) -> HostedModel:  # fmt: skip
        """Borrow the trainer's module: its storage is the engine's. Ranks that share the model copy their part instead.

        Raises ValueError for a wish it contradicts, and for what cannot be divided.
        """
        if not isinstance(module, PreTrainedModel):
            raise ValueError(f"can host a transformers PreTrainedModel or a folder, not {type(module).__name__}")
        parameter = next(module.parameters())
        wrong = []
        if dtype is not None and DTYPES[dtype] != parameter.dtype:
            wrong.append(f"dtype={dtype!r}, but the module is {parameter.dtype}")
        if device is not None and torch.device(device) != parameter.device:
            wrong.append(f"device={device!r}, but the module is on {parameter.device}")
        if wrong:
            raise ValueError(f"the engine shares the trainer's storage: {'; '.join(wrong)}")
        if mesh is not None and mesh.num_ranks > 1:
            return cls(copy_part(module, mesh, k_blocks), owned=True, invariant=invariant, trained=module)
        return cls(_whole(module, k_blocks), owned=False, invariant=invariant)

    @property
    def mesh(self) -> Mesh:
        return self.division.mesh

    @property
    def k_blocks(self) -> int:
        """Blocks that the inputs of row-parallel layers are summed in: the trainer's number must be the same."""
        return self.division.k_blocks

    @property
    def trained_module(self) -> PreTrainedModel:
        """What `training_numerics` serves: the adopted module, whole, whatever this rank has of it itself."""
        return self._trained.module

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Which part of which tensor this rank has, for every parameter and buffer of its stage."""
        return self.division.shards

    @property
    def full_specs(self) -> Mapping[str, FullSpec]:
        """dtype and shape of every parameter of the whole model, the same on all ranks, in the module's order."""
        return self.division.full_specs

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that stages pass on; their dtype is `dtype`."""
        return self.config.hidden_size

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest context the module was made for, in tokens."""
        return self.config.max_position_embeddings

    @property
    def in_rollout_phase(self) -> bool:
        return self.owned or self._phase.is_open

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by Hugging Face name, tied ones once, under the first of their names: what this rank has of them.

        Raises MemoryReleased while they are released.
        """
        if self._released_shapes:
            raise MemoryReleased("the weights are released: resume them first")
        yield from self._tensors.parameters()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors beside the parameters, rotary tables for one: derived, so an update may leave them out."""
        yield from self._tensors.buffers()

    def tied_names(self) -> dict[str, str]:
        """Further names of tied parameters of the whole model, each with the name that `resident_tensors` gives it."""
        if self.mesh.num_ranks > 1:
            return dict(self.division.tied_names)
        return self._tensors.tied_names()

    @property
    def holds_weights(self) -> bool:
        """False between `release_weights` and `resume_weights`."""
        return not self._released_shapes

    @property
    def weight_bytes(self) -> int:
        """Memory of the parameters now, tied ones once."""
        return sum(parameter.nbytes for _, parameter in self._tensors.parameters())

    def release_weights(self) -> int:
        """Give the parameters' memory back, values and all; returns its bytes. A trainer's are not ours to free: 0."""
        if not self.owned or self._released_shapes:
            return 0
        before = self.weight_bytes
        for parameter in self.module.parameters():
            self._released_shapes.append(parameter.shape)
            parameter.data = parameter.data.new_empty(0)
        return before - self.weight_bytes

    def resume_weights(self) -> int:
        """Allocate what was released; what it holds is undefined until it is written. Returns the bytes allocated."""
        before = self.weight_bytes
        for parameter, shape in zip(self.module.parameters(), self._released_shapes, strict=False):
            parameter.data = parameter.data.new_empty(shape)
        self._released_shapes = []
        return self.weight_bytes - before

    @contextmanager
    def training_numerics(self) -> Iterator[None]:
        """The trainer's forward and backward run in here: same operations as the rollout, attention included.

        Re-entrant, also from several threads: as the last one leaves, attention and experts implementation and every
        forward are what they were.
        """
        with self._trained.installed():
            yield

    def rollout_phase(self, *, admits: bool = True) -> AbstractContextManager[None]:
        """The module is the engine's in here: numerics, eval flags, no autograd. Re-entrant, also from several threads:
        the last one to leave waits for those of `borrowed`, calls `before_phase_ends`, waits for it, and restores
        everything.

        admits: False for a phase whose holder has the engine's lock, which a borrower would need.
        """
        return self._phase.entered(admits=admits)

    def borrowed(self, what: str, timeout_s: float) -> AbstractContextManager[float]:
        """Have the module for something beside the steps, weights to be written for one: waits for a rollout phase,
        which then does not end before this does. Yields the seconds left. Re-entrant; changes nothing by itself.

        Raises DeadlineExceeded where the trainer kept it for `timeout_s`. The engine's own module is there at once.
        """
        return self._phase.borrowed(what, timeout_s)

    @property
    def before_phase_ends(self) -> Callable[[], None]:
        """The function to call, and to wait for, before the module goes back to the trainer."""
        return self._phase.before_end

    @before_phase_ends.setter
    def before_phase_ends(self, function: Callable[[], None]) -> None:
        self._phase.before_end = function

    def forward(
        self,
        token_ids: Tensor | None,
        positions: Tensor,
        logit_rows: Tensor,
        step: StepContext,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run this rank's stage. token_ids, positions: int64 [N]; later stages get the hidden states [N, D] of the one
        before, and no ids. Returns hidden states [N, D], on the last stage logits [len(logit_rows), vocab].

        Writes the rows' KV. Ranks of one stage run it together, and return the same. Raises PhaseError outside the
        rollout phase.
        """
        if not self._phase.is_set_up:
            raise PhaseError("the module is the trainer's now: generate inside the rollout phase")
        step.first_layer = self.division.layers.start
        return self._call(token_ids, positions, step, logit_rows, hidden)

    def _call(
        self, token_ids: Tensor | None, positions: Tensor, step: object, logit_rows: Tensor | int, hidden: Tensor | None
    ) -> Tensor:
        common = {"position_ids": positions.unsqueeze(0), "attention_mask": NO_MASK, "use_cache": False}
        common[STEP_KEYWORD] = step
        if self._stage_input is None:
            common["input_ids"] = token_ids.unsqueeze(0)
        else:
            # The stand-in gives it to the first layer again: some modules scale what they take for embeddings.
            common["inputs_embeds"] = self._stage_input.received = hidden.unsqueeze(0)
        try:
            if self.mesh.is_last_stage:
                return self.module(**common, logits_to_keep=logit_rows).logits[0]
            return self.module.base_model(**common).last_hidden_state[0]
        finally:
            if self._stage_input is not None:
                self._stage_input.received = None

    def _probe(self) -> list[KVShape]:
        """Run a few tokens through: every layer must come to the hosted attention, with keywords it knows."""
        probe = LayerProbe()
        positions = torch.arange(4, device=self.device)
        hidden = None
        if self._stage_input is not None:
            hidden = torch.zeros(4, self.hidden_size, dtype=self.dtype, device=self.device)
        with self.rollout_phase(), torch.inference_mode():
            out = self._call(positions % self.vocab_size, positions, probe, 1, hidden)
        missing = sorted(set(self.division.layers) - set(probe.layers))
        name = type(self.module).__name__
        if missing:
            raise ValueError(f"{name} cannot be hosted: layers {missing} do not use transformers' attention interface")
        if not self.mesh.is_last_stage and out.shape != (4, self.hidden_size):
            raise ValueError(f"{name} cannot be cut into stages: a stage gave {list(out.shape)} for hidden states")
        return [probe.layers[index] for index in self.division.layers]


def _whole(module: PreTrainedModel, k_blocks: int) -> Part:
    num_layers = module.config.get_text_config(decoder=True).num_hidden_layers
    return Part(module, divide(module, Mesh.single(), k_blocks, range(num_layers)), None)
