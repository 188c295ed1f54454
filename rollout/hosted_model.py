"""A Hugging Face causal LM, borrowed from the trainer or loaded from a folder, as the engine runs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..kernels.paged_attention import attention_path
from .errors import MemoryReleased, PhaseError
from .hosted_attention import ATTENTION_NAMES, NO_MASK, STEP_KEYWORD, KVShape, Probe, StepContext
from .hosted_experts import EXPERTS
from .numerics import Numerics
from .phase_gate import PhaseGate

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Rotary tables that are recomputed from the longest sequence of the batch: a row would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class HostedModel:
    """The module, its numerics, and the phase it is in.

    A module adopted from a trainer belongs to the engine only inside `rollout_phase()`; one loaded here always does.
    """

    def __init__(self, module: PreTrainedModel, *, owned: bool, invariant: bool) -> None:
        self.module = module
        self.owned = owned
        self.config = module.config.get_text_config(decoder=True)
        self._refuse_unsupported(invariant)
        self.numerics = Numerics(module, invariant)
        self._lock = threading.RLock()
        self._numerics_users = 0
        self._rollout_users = 0
        self._numerics_exit = ExitStack()  # how to leave: the last one out does
        self._rollout_exit: ExitStack | None = None  # likewise; None outside the phase
        self._released_shapes: list[torch.Size] = []  # of the parameters in their order, while their memory is released
        self.before_phase_ends: Callable[[], None] = lambda: None
        self._gate = PhaseGate()
        self.kv_shapes = self._probe()
        logger.info("hosting %s: %s", type(module).__name__, self.numerics.describe())

    @classmethod
    def load(cls, path: str | Path, *, dtype: str | None, device: str | None, invariant: bool) -> HostedModel:
        """Load a folder in Hugging Face format. Raises ValueError naming what is missing."""
        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"model folder {str(path)!r} holds no config.json")
        config = AutoConfig.from_pretrained(path)
        kept = getattr(config, "dtype", None) or torch.float32
        module = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPES[dtype] if dtype else kept)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(module.to(device).eval().requires_grad_(False), owned=True, invariant=invariant)

    @classmethod
    def adopt(cls, module: nn.Module, *, dtype: str | None, device: str | None, invariant: bool) -> HostedModel:
        """Borrow the trainer's module: its storage is the engine's. Raises ValueError for a wish it contradicts."""
        if not isinstance(module, PreTrainedModel):
            raise ValueError(f"can host a transformers PreTrainedModel or a folder, not {type(module).__name__}")
        parameter = next(module.parameters())
        wrong = []
        if dtype is not None and _DTYPES[dtype] != parameter.dtype:
            wrong.append(f"dtype={dtype!r}, but the module is {parameter.dtype}")
        if device is not None and torch.device(device) != parameter.device:
            wrong.append(f"device={device!r}, but the module is on {parameter.device}")
        if wrong:
            raise ValueError(f"the engine shares the trainer's storage: {'; '.join(wrong)}")
        return cls(module, owned=False, invariant=invariant)

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
        return self.owned or self._rollout_users > 0

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by Hugging Face name, tied ones once, under the first of their names.

        Raises MemoryReleased while they are released.
        """
        if self._released_shapes:
            raise MemoryReleased("the weights are released: resume them first")
        yield from self.module.named_parameters(remove_duplicate=True)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors beside the parameters, rotary tables for one: derived, so an update may leave them out."""
        yield from self.module.named_buffers(remove_duplicate=True)

    def tied_names(self) -> dict[str, str]:
        """Further names of tied parameters, each with the name that `resident_tensors` gives it."""
        first: dict[int, str] = {}
        pairs = self.module.named_parameters(remove_duplicate=False)
        return {name: known for name, p in pairs if (known := first.setdefault(id(p), name)) != name}

    @property
    def holds_weights(self) -> bool:
        """False between `release_weights` and `resume_weights`."""
        return not self._released_shapes

    @property
    def weight_bytes(self) -> int:
        """Memory of the parameters now, tied ones once."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

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
        with self._lock:
            if self._numerics_users == 0:
                with ExitStack() as entered:
                    config = self.module.config
                    entered.callback(self._restore, config._attn_implementation, config._experts_implementation)
                    self._use_implementations()
                    entered.enter_context(self.numerics.installed())
                    self._numerics_exit = entered.pop_all()
            self._numerics_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._numerics_users -= 1
                if self._numerics_users == 0:
                    self._numerics_exit.close()

    @contextmanager
    def rollout_phase(self, *, admits: bool = True) -> Iterator[None]:
        """The module is the engine's in here: numerics, eval flags, no autograd. Re-entrant, also from several threads:
        the last one to leave waits for those of `borrowed`, calls `before_phase_ends`, waits for it, and restores
        everything.

        admits: False for a phase whose holder has the engine's lock, which a borrower would need.
        """
        with self._lock:
            if self._rollout_exit is None:
                with ExitStack() as entered:
                    entered.callback(self._leave_rollout_phase)
                    entered.enter_context(self.training_numerics())
                    entered.callback(_restore_flags, [(module, module.training) for module in self.module.modules()])
                    self.module.eval()
                    self._rollout_exit = entered.pop_all()
            self._rollout_users += 1
        if admits:
            self._gate.open()
        try:
            yield
        finally:
            try:
                if admits:
                    self._gate.close()
            finally:
                with self._lock:
                    self._rollout_users -= 1
                    is_last = self._rollout_users == 0
                if is_last:
                    self._end_rollout_phase()

    @contextmanager
    def borrowed(self, what: str, timeout_s: float) -> Iterator[float]:
        """Have the module for something beside the steps, weights to be written for one: waits for a rollout phase,
        which then does not end before this does. Yields the seconds left. Re-entrant; changes nothing by itself.

        Raises DeadlineExceeded where the trainer kept it for `timeout_s`. The engine's own module is there at once.
        """
        if self.owned:
            yield timeout_s
        else:
            with self._gate.guest(what, timeout_s) as seconds_left:
                yield seconds_left

    def _end_rollout_phase(self) -> None:
        try:
            # Without our lock: it waits for a step that may be running, and that step may look at the phase.
            self.before_phase_ends()
        finally:
            with self._lock:
                if self._rollout_users == 0 and self._rollout_exit is not None:
                    self._rollout_exit.close()

    def _leave_rollout_phase(self) -> None:
        self._rollout_exit = None

    def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, step: StepContext) -> Tensor:
        """Logits [len(logit_rows), vocab] of the rows asked for; token_ids, positions: int64 [N].

        Writes the rows' KV. Raises PhaseError outside the rollout phase.
        """
        if self._rollout_exit is None:
            raise PhaseError("the module is the trainer's now: generate inside the rollout phase")
        return self._call(token_ids, positions, step, logits_to_keep=logit_rows)

    def _call(self, token_ids: Tensor, positions: Tensor, step: object, **kwargs: object) -> Tensor:
        output = self.module(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=NO_MASK,
            use_cache=False,
            **{STEP_KEYWORD: step},
            **kwargs,
        )
        return output.logits[0]

    def _use_implementations(self) -> None:
        path = self.numerics.guarantee.attention if self.numerics.guarantee else attention_path(self.device, self.dtype)
        self.module.set_attn_implementation(ATTENTION_NAMES[path])
        if self.numerics.guarantee is not None and self.module._can_set_experts_implementation():
            self.module.set_experts_implementation(EXPERTS)

    def _restore(self, attention: str | None, experts: str | None) -> None:
        # The attributes that transformers' setters write; the setters refuse some values that a module may start with.
        self.module.config._attn_implementation_internal = attention
        self.module.config._experts_implementation_internal = experts

    def _refuse_unsupported(self, invariant: bool) -> None:
        wrong = []
        if next(self.module.parameters()).dtype not in _DTYPES.values():
            wrong.append(f"dtype {next(self.module.parameters()).dtype}")
        rope = getattr(self.config, "rope_parameters", None) or {}
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if invariant and parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE:
                wrong.append(f"rope_type {parameters['rope_type']!r} (its tables depend on the batch)")
        if not self.module._can_set_attn_implementation():
            wrong.append("attention that does not go through transformers' attention interface")
        if getattr(self.config, "num_attention_heads", None) is None:
            wrong.append("layers without attention heads")
        # Other kinds are told to a module by its mask or its own code, and would go unseen.
        kinds = set(getattr(self.config, "layer_types", None) or ()) - _LAYER_TYPES
        wrong += [f"layers of type {kind}" for kind in sorted(kinds)]
        if getattr(self.config, "is_encoder_decoder", False):
            wrong.append("an encoder")
        if wrong:
            raise ValueError(f"{type(self.module).__name__} cannot be hosted: {', '.join(wrong)}")

    def _probe(self) -> list[KVShape]:
        """Run a few tokens through: every layer must come to the hosted attention, with keywords it knows."""
        probe = Probe()
        ids = torch.arange(4, device=self.device) % self.vocab_size
        with self.rollout_phase(), torch.inference_mode():
            self._call(ids, torch.arange(4, device=self.device), probe, logits_to_keep=1)
        missing = sorted(set(range(self.config.num_hidden_layers)) - set(probe.layers))
        if missing:
            raise ValueError(
                f"{type(self.module).__name__} cannot be hosted: layers {missing} do not use transformers' attention "
                "interface"
            )
        return [probe.layers[index] for index in range(self.config.num_hidden_layers)]


def _restore_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, training in flags:
        module.training = training
