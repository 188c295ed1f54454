"""The Hugging Face causal LM that the engine runs, borrowed from the trainer or loaded from a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.machine.huge_pages import use_huge_pages
from ..errors import MemoryReleased, PhaseError
from ..media.encoder import NO_FEATURES, have_blocks
from ..ranks.mesh import Mesh
from ..sharding.division import FullSpec
from ..sharding.part import Part, copy_part, load_part
from ..sharding.shards import Shard
from .adapters.folder import AdapterFolder, AdapterLayers, put_in, take_out
from .adapters.layers import HostedAdapters
from .attention import ATTENTION_NAMES
from .encoders.both_ways import image_encoder
from .forward_numerics import ForwardNumerics
from .given_module import device_of, given_module, present_device
from .layer_probe import PROBING, LayerProbe
from .loading import load_whole, read_config, refuse_faulty_weights
from .operations.carried import STEP_KEYWORD
from .operations.functions import without_autocast
from .operations.packed_rows import NO_MASK
from .recurrent.states import StateShapes
from .rollout_phase import RolloutPhase
from .steps.context import StepContext
from .supported import (
    DTYPES,
    context_length,
    has_recurrent_layers,
    has_state,
    refuse_different_choices,
    refuse_other_kinds,
    refuse_other_outputs,
    refuse_randomness,
    refuse_stages,
    refuse_unsupported,
    refused_if_it_fails,
    warn_of_rounded_frequencies,
)
from .tensors import HostedTensors, first_weight
from .trainer_numerics import whole_part

logger = logging.getLogger(__name__)


class HostedModel:
    """The module or this rank's part of it, its numerics and its phase.

    A module adopted from a trainer belongs to the engine only inside `rollout_phase()`. A module loaded here always
    belongs to the engine, and so does a rank's part of a model that several ranks share.
    """

    def __init__(self, part: Part, *, owned: bool, invariant: bool, trained: PreTrainedModel | None = None) -> None:
        """Take over `part`. trained: the trainer's module if `part` is a copy of parts of it."""
        self.module = part.module
        self._tensors = HostedTensors(self.module)
        self.adapters = HostedAdapters(self.module)  # of PEFT; empty without any
        self.adapter_name: str | None = None  # of the adapter that a service has loaded into its engine
        self.owned, self.folder, self.division, self._stage_input = owned, part.folder, part.division, part.stage_input
        self.config = self.module.config.get_text_config(decoder=True)
        refuse_other_kinds(self.module)
        refuse_unsupported(self.module, self.config, invariant, self.division.layers)
        hosted = ForwardNumerics(self.module, invariant, self.division)
        self.numerics = hosted.numerics
        whole = trained and whole_part(trained, self.division.k_blocks)
        self._trained = ForwardNumerics(whole.module, invariant, whole.division) if whole else hosted
        refuse_randomness(self.trained_module)
        warn_of_rounded_frequencies(self.trained_module)
        refuse_different_choices(self.numerics.guarantee, self.mesh)
        self.phase = RolloutPhase(hosted, owned=owned)
        self.images = image_encoder(self.module, self.numerics.around)
        use_huge_pages((parameter for _, parameter in self._tensors.parameters()), now=True)
        probe = self._probe()
        self._places = probe.places(self.division.layers)
        self.kv_shapes = probe.kv_shapes(self.division.layers, self.dtype)  # of this rank's layers, or of their calls
        self.windows = probe.windows  # tokens that rows of some layers see, with the attention of the first of them
        self.state_shapes: StateShapes = probe.states  # of this rank's recurrent layers; empty: it has none
        logger.info("hosting %s: %s", type(self.module).__name__, self.numerics.describe())

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: str | None, device: str | None, invariant: bool, k_blocks: int = 1,
        mesh: Mesh | None = None,
    ) -> HostedModel:  # fmt: skip
        """Load a folder in Hugging Face format, or this rank's part of it. Raises ValueError that names a missing file,
        or the tensors that cannot be divided."""
        config = read_config(Path(path))
        kept = DTYPES[dtype] if dtype else getattr(config, "dtype", None) or torch.float32
        device = str(present_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
        if mesh is not None and mesh.num_ranks > 1:
            refuse_stages(config, mesh.pp)
            refuse_faulty_weights(Path(path))
            part = load_part(path, config, kept, torch.device(device), mesh, k_blocks)
        else:
            part = whole_part(load_whole(Path(path), config, kept, device).eval().requires_grad_(False), k_blocks)
        return cls(replace(part, folder=Path(path)), owned=True, invariant=invariant)

    @classmethod
    def adopt(
        cls, module: nn.Module, *, dtype: str | None, device: str | None, invariant: bool, k_blocks: int = 1,
        mesh: Mesh | None = None,
    ) -> HostedModel:  # fmt: skip
        """Borrow the trainer's module, or the one inside a PeftModel, and its storage. Ranks that share the model copy
        their part instead.

        Raises ValueError for a wrapper or sharded weights (`given_module`), if `dtype` or `device` differs from the
        module's, and for tensors that cannot be divided.
        """
        num_ranks = 1 if mesh is None else mesh.num_ranks
        module = given_module(module, is_copied=num_ranks > 1)
        parameter, wrong = first_weight(module.parameters()), list[str]()
        if HostedAdapters(module) and (num_ranks > 1 or k_blocks > 1):
            raise ValueError(
                f"{type(module).__name__} has adapters, which need one rank and k_blocks=1, not {num_ranks} and "
                f"{k_blocks}: merge them into its weights (merge_and_unload) to divide it"
            )
        if dtype is not None and DTYPES[dtype] != parameter.dtype:
            wrong.append(f"dtype={dtype!r}, but the module is {parameter.dtype}")
        if device is not None and device_of(device) != parameter.device:
            wrong.append(f"device={device!r}, but the module is on {parameter.device}")
        if wrong:
            raise ValueError(f"the engine shares the trainer's storage: {'; '.join(wrong)}")
        if mesh is not None and num_ranks > 1:
            refuse_stages(module.config, mesh.pp)
            return cls(copy_part(module, mesh, k_blocks), owned=True, invariant=invariant, trained=module)
        return cls(whole_part(module, k_blocks), owned=False, invariant=invariant)

    @property
    def mesh(self) -> Mesh:
        return self.division.mesh

    @property
    def k_blocks(self) -> int:
        """Number of blocks in which row-parallel layers sum their inputs. The trainer's must be the same."""
        return self.division.k_blocks

    @property
    def trained_module(self) -> PreTrainedModel:
        """The whole adopted module, on which `training_numerics` acts, even if this rank runs a part of it only."""
        return self._trained.module

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's part of every parameter and buffer of its stage, by name."""
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
    def has_states(self) -> bool:
        """Whether the whole model has recurrent layers; this rank's stage may have none."""
        return has_recurrent_layers(self.config)

    @property
    def device(self) -> torch.device:
        return first_weight(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return first_weight(self.module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """The number of tokens that get logits: all but those of padding, if the configuration tells of any."""
        return getattr(self.config, "unpadded_vocab_size", None) or self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest context that the module supports, in tokens; without a limit, that of an engine by default."""
        return context_length(self.config)

    @property
    def in_rollout_phase(self) -> bool:
        return self.owned or self.phase.is_open

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters by Hugging Face name, tied ones once under the first of their names.

        Raises MemoryReleased while they are released.
        """
        if self._tensors.are_released:
            raise MemoryReleased("the weights are released: resume them first")
        yield from self._tensors.parameters()

    def buffers(self, *, stored: bool = False, of_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, for example rotary tables. stored: those alone that belong to checkpoints, such as biases
        of routers; of_trained: of the whole adopted module, where a rank that runs a part of it has copies."""
        yield from (HostedTensors(self.trained_module) if of_trained else self._tensors).buffers(stored=stored)

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and the buffers that belong to checkpoints, as they are now, released ones too."""
        yield from self._tensors.parameters()
        yield from self._tensors.buffers(stored=True)

    def tied_names(self) -> dict[str, str]:
        """Return the further names of the whole model's parameters, each with its name in `resident_tensors`: of tied
        ones, and the base model's own names of those that adapters have wrapped."""
        if self.mesh.num_ranks > 1:
            return dict(self.division.tied_names)
        return self._tensors.tied_names() | self.adapters.aliases(name for name, _ in self._tensors.parameters())

    @property
    def holds_weights(self) -> bool:
        """Whether the weights are in memory: false between `release_weights` and `resume_weights`."""
        return not self._tensors.are_released

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters now, tied ones once."""
        return self._tensors.num_bytes

    def release_weights(self) -> int:
        """Free the parameters' memory and lose their values; returns its bytes. Leaves a trainer's module alone: 0."""
        return self._tensors.release() if self.owned else 0

    def resume_weights(self) -> int:
        """Allocate the released parameters. Their values are undefined until written. Returns the bytes allocated."""
        return self._tensors.resume()

    def replace_adapter(self, adapter: AdapterFolder | AdapterLayers) -> AdapterLayers:
        """Put an adapter, or layers of one, around the engine's own layers, in place of the former one's, and return
        those; no layers are no adapter.

        No step is in flight. Raises ValueError for an adapter that does not fit, and for a module that is a trainer's
        or divided; the model is then as before.
        """
        if not self.owned or self.mesh.num_ranks > 1 or self.k_blocks > 1:
            raise ValueError(
                "an adapter can be loaded into an engine that has read its model from a folder, on one rank and with "
                "k_blocks=1; a trainer adds adapters to its own module"
            )

        former: AdapterLayers = {}

        def change() -> ForwardNumerics:
            former.update(take_out(self.module))
            try:
                put_in(self.module, adapter.layers_for(self.module) if isinstance(adapter, AdapterFolder) else adapter)
                division = whole_part(self.module, self.k_blocks).division
                return ForwardNumerics(self.module, self.numerics.guarantee is not None, division)
            except BaseException:
                take_out(self.module)
                put_in(self.module, former)
                raise

        hosted = self._trained = self.phase.replace(change)
        self.numerics, self.division = hosted.numerics, whole_part(self.module, self.k_blocks).division
        self._tensors, self.adapters = HostedTensors(self.module), HostedAdapters(self.module)
        return former

    @contextmanager
    def training_numerics(self) -> Iterator[None]:
        """Install the rollout's operations, attention included, for the trainer's forward and backward.

        Re-entrant, also from several threads: when the last user leaves, the attention and experts implementation and
        every forward are restored. Raises ValueError for a module that draws random numbers, as dropout does.
        """
        refuse_randomness(self.trained_module)
        with self._trained.installed():
            yield

    def rollout_phase(self, *, admits: bool = True) -> AbstractContextManager[None]:
        """Give the module to the engine for the time of the context: numerics, eval flags, no autograd.

        Re-entrant, also from several threads: the last user to leave waits for the users of `borrowed`, calls
        `before_phase_ends`, waits for it, and restores everything.
        admits: False for a phase whose holder has the engine's lock, which a borrower would need.
        """
        return self.phase.entered(admits=admits)

    def borrowed(self, what: str, timeout_s: float) -> AbstractContextManager[float]:
        """Wait for a rollout phase and keep it open, for work beside the steps (e.g. writing weights).

        Yields the seconds left. Re-entrant; changes nothing by itself. Raises DeadlineExceeded if the trainer kept the
        module for `timeout_s`. The engine's own module is available at once.
        """
        return self.phase.borrowed(what, timeout_s)

    @property
    def before_phase_ends(self) -> Callable[[], None]:
        """The function that runs to its end before the module goes back to the trainer."""
        return self.phase.before_end

    @before_phase_ends.setter
    def before_phase_ends(self, function: Callable[[], None]) -> None:
        self.phase.before_end = function

    def forward(
        self,
        token_ids: Tensor | None,
        positions: Tensor,
        logit_rows: Tensor | None,
        step: StepContext,
        hidden: Tensor | None = None,
        *,
        whole_logits: bool = True,
        features: Mapping[str, object] = NO_FEATURES,
    ) -> Tensor:
        """Run this rank's stage and write the rows' KV. Ranks of one stage run it together and return the same.

        token_ids: int64 [N], positions: int64 [N] or, by part of the rotary, [S, N]; a later stage gets no ids, but the
        hidden states [N, D] of the stage before. logit_rows: int64 [R], the rows that get logits; None: all N. Returns
        hidden states [N, D], on the last stage logits [R, vocab]. Raises PhaseError outside the rollout phase.
        whole_logits: False for the part of the vocabulary that this rank has, if any. features: of images.
        """
        if not self.phase.is_set_up:
            raise PhaseError("the module is the trainer's now: generate inside the rollout phase")
        if self.config._attn_implementation not in ATTENTION_NAMES.values():
            raise PhaseError("the module's attention was replaced inside the rollout phase: set it outside")
        step.first_layer = self.division.layers.start
        last = self.numerics.last_layer if step.ends_at is None and not have_blocks(features) else None
        step.wanted = logit_rows if last and last.leaves_out(self, logit_rows, positions.shape[-1]) else None
        divided = self.numerics.divided_logits
        with without_autocast(), nullcontext() if whole_logits or divided is None else divided.left_out():
            return self.call(token_ids, positions, step, logit_rows, hidden, features=features)

    def call(
        self,
        token_ids: Tensor | None,
        positions: Tensor,
        step: object,
        logit_rows: Tensor | None,
        hidden: Tensor | None,
        mask: Tensor | None = NO_MASK,
        features: Mapping[str, object] = NO_FEATURES,
    ) -> Tensor:
        """Run this rank's stage as `forward` does: in a step, or over one whole sequence if `step` is None.

        mask: None lets transformers make its own, which the attention reads and drops. features: see `ImageEncoder`.
        """
        mask = None if self.numerics.numbers_keys else mask  # such code takes the mask of a batch alone
        common: dict[str, Any] = {"position_ids": positions.unsqueeze(-2), "attention_mask": mask, "use_cache": False}
        common |= {STEP_KEYWORD: step.begun(self._places) if isinstance(step, StepContext) else step, **features}
        if getattr(self.config, "output_router_logits", False):  # they are of the trainer's loss
            common["output_router_logits"] = False
        if self._stage_input is None:
            assert token_ids is not None
            common["input_ids"] = token_ids.unsqueeze(0)
        else:
            # Some modules scale their embeddings, so the stage input passes the unscaled tensor to the first layer.
            assert hidden is not None
            common["inputs_embeds"] = self._stage_input.received = hidden.unsqueeze(0)
        try:
            if self.mesh.is_last_stage:
                are_left = isinstance(step, StepContext) and step.wanted is not None
                # 0 stands for all rows that the last layer returns, and copies none.
                kept = 0 if logit_rows is None or are_left else logit_rows
                logits = self.module(**common, logits_to_keep=kept).logits[0]
                # Some vision-language classes compute all rows whatever they are asked for.
                return logits if logit_rows is None or len(logits) == len(logit_rows) else logits[logit_rows]
            return self.module.base_model(**common).last_hidden_state[0]
        finally:
            if self._stage_input is not None:
                self._stage_input.received = None

    def _probe(self) -> LayerProbe:
        """Run a few tokens to learn the shapes of the layers' KV and states.

        Raises ValueError if a layer does not call the hosted attention or uses an unknown keyword.
        """
        probe = LayerProbe(self.max_model_len)
        positions = torch.arange(4, device=self.device)
        hidden = None
        if self._stage_input is not None:
            hidden = torch.zeros(4, self.hidden_size, dtype=self.dtype, device=self.device)
        token = PROBING.set(probe)
        try:
            # The forward of a rank's part fails where another rank ends: that is no fault of the module.
            own_errors = refused_if_it_fails(self.module) if self.mesh.num_ranks == 1 else nullcontext()
            with self.rollout_phase(), torch.inference_mode(), own_errors, probe.watching(self.module):
                out = self.call(positions % self.vocab_size, positions, probe, positions[-1:], hidden, mask=None)
        finally:
            PROBING.reset(token)
        name = type(self.module).__name__
        refuse_other_outputs(name, out, self.hidden_size, self.vocab_size if self.mesh.is_last_stage else None)
        probe.refuse_faults([i for i in self.division.layers if has_state(self.config, i)], name)
        return probe
