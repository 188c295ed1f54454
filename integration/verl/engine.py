"""verl's FSDP engine with the rollout's numerics: its log-probabilities are those that the rollout reported.

Importing this module, as `actor_rollout_ref.model.external_lib` does in each worker, puts it in the place of verl's own
for `strategy=fsdp2`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name, get_vendor
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ...kernels.sampling.entropy import row_entropy
from ...kernels.sampling.logprobs import selected_logprobs
from ...rollout.model.trainer_numerics import TrainerNumerics
from .settings import k_blocks_of

_OF_TEXT = {"input_ids", "attention_mask", "position_ids", "cu_seqlens", "cu_seqlens_cpu"}
_NOT_TAKEN = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk")


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=get_device_name(), vendor=get_vendor()
)
class LockstepFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine for FSDP2, whose forward and backward passes run under the rollout's numerics.

    It needs `use_remove_padding=True` and no sequence parallelism, and stands for FSDP's first version too, which it
    refuses by name: that one puts modules of its own around the layers. Parameters may be float32 under a policy that
    computes in bfloat16: the rollout's dtype has to be that in which the forward computes.
    """

    numerics: TrainerNumerics

    def _build_module(self) -> nn.Module:
        if self.use_ulysses_sp or not self.use_remove_padding or self.engine_config.strategy != "fsdp2":
            raise NotImplementedError(
                "the rollout's numerics need strategy=fsdp2, use_remove_padding=True and "
                f"ulysses_sequence_parallel_size=1, not {self.engine_config.strategy}, {self.use_remove_padding} and "
                f"{self.ulysses_sequence_parallel_size}"
            )
        if self.pad_to_length:
            raise NotImplementedError("the rollout's numerics need pad_to_length=False")
        return super()._build_module()

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        policy = self.engine_config.mixed_precision or {}
        self.numerics = TrainerNumerics(
            module, device=torch.device(get_device_name()), k_blocks=k_blocks_of(self.model_config),
            dtype=PrecisionType.to_dtype(policy.get("param_dtype", "bf16")),
        )  # fmt: skip
        divided = super()._build_fsdp_module(module)
        self._autocast_dtype = torch.float32  # none: the policy of FSDP casts, and nothing else does
        return divided

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prepare one row of all sequences, and say where each begins."""
        wrong = [name for name in _NOT_TAKEN if tensordict_utils.get_non_tensor_data(micro_batch, name, False)]
        if wrong:
            raise NotImplementedError(f"the rollout's numerics do not go with {', '.join(wrong)}")
        inputs, kept = super().prepare_model_inputs(micro_batch)
        if more := sorted(set(inputs) - _OF_TEXT):
            raise NotImplementedError(f"the rollout's numerics take text alone, not {', '.join(more)}")
        inputs["cu_seq_lens_q"] = micro_batch["input_ids"].offsets().to(torch.int32)
        return inputs, kept

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Compute log-probabilities, and entropies if they are asked for, as nested tensors of the sequences."""
        logits, temperatures = output.logits[0], output_args["temperature_rmpad"]
        ends = micro_batch["input_ids"].offsets()
        out = {"log_probs": selected_logprobs(logits, output_args["input_ids_rmpad_rolled"], temperatures)}
        if tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            out["entropy"] = row_entropy(logits, temperatures)
        return {name: torch.nested.nested_tensor_from_jagged(values, ends) for name, values in out.items()}

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Compute a micro-batch under the rollout's numerics."""
        with self.numerics.training_numerics():
            return super().forward_step(micro_batch, loss_function, forward_only)
