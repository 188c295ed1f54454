"""The forward with which TRL scores completions, computed with the engine's operations.

TRL asks the module for log-probabilities in place of logits (`fused_lm_head=True`) of a batch that is padded on both
sides. Its own answer depends on the padding and on the batch. Here the padding is taken out, the rows run with the
engine's numerics, and the log-probabilities are computed by the engine's own function: they have the engine's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ...kernels.sampling.entropy import row_entropy
from ...kernels.sampling.logprobs import selected_logprobs
from ...rollout.media.reader import image_token
from ...rollout.model.hosted_model import HostedModel
from ..image_inputs import TYPES, image_keywords, rotary_keywords
from .packed_rows import PackedRows, pack_rows

Images = Mapping[str, Tensor]  # of a batch, in the order of its sequences; {}: it has none
# The rows, the log-probability float32 [M] of each scored token, and the images.
OnScored = Callable[[PackedRows, Tensor, Images], None]
Recall = Callable[[PackedRows, Images], Tensor | None]  # of the rows, the same if it is known


@dataclass
class ScoredOutput(ModelOutput):
    """The answer to a scoring forward, with the names that TRL reads.

    Shapes are [B, T - 1], with 0 where nothing is scored.
    """

    loss: Tensor | None = None  # mean of -log_probs over the scored tokens
    log_probs: Tensor | None = None  # float32, of softmax(logits / temperature)
    entropy: Tensor | None = None  # float32, nats
    label_mask: Tensor | None = None  # bool: whether a token is scored
    aux_loss: Tensor | None = None  # of the router of a mixture of experts, if asked for


class PackedForward:
    """A module's forward in place of TRL's, from the constructor to `remove`.

    on_scored: called with what each scoring forward computed. recall: asked for a scoring forward without gradients of
    a module in train mode: TRL wants log-probabilities alone there, so that known ones need no forward. Every other
    call runs the module's class as it is, without autocast: the engine computes in the weights' dtype.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        temperature: float,
        on_scored: OnScored | None = None,
        recall: Recall | None = None,
    ) -> None:
        self.hosted: HostedModel | None = None  # the module's numerics, set before the first scoring forward
        self.num_scored = 0  # scoring forwards so far
        self._module, self._temperature = module, temperature
        self._on_scored, self._recall = on_scored, recall
        self._before: object = vars(module).get("forward")
        plain = MethodType(type(module).forward, module)

        @functools.wraps(type(module).forward)
        def forward(_: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            with torch.autocast(module.device.type, enabled=False):
                return self._scored(*args, **kwargs) if fused_lm_head else plain(*args, **kwargs)

        module.forward = MethodType(forward, module)

    def remove(self) -> None:
        """Restore the module's forward."""
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before  # type: ignore[assignment]

    def _scored(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_router_logits: bool | None = None,
        **others: object,
    ) -> ScoredOutput:
        """Answer a scoring forward. input_ids, attention_mask, labels: [B, T]; others: of images."""
        others = {name: value for name, value in others.items() if value is not None and name not in TYPES}
        unknown = sorted(name for name, value in others.items() if not isinstance(value, Tensor))
        if "pixel_values" not in others:
            unknown = sorted(others)
        if unknown or input_ids is None or attention_mask is None or labels is None:
            asked = f"passes {', '.join(unknown)}" if unknown else "lacks input_ids, attention_mask or labels"
            raise ValueError(f"TRL's forward {asked}: only text and images are supported, as trl 1.16 passes them")
        rows = pack_rows(input_ids, attention_mask, labels)
        images: dict[str, Tensor] = others  # type: ignore[assignment]
        self._refuse_stray_tokens(rows, images)
        if self._recall is not None and self._module.training and not torch.is_grad_enabled():
            known = self._recall(rows, images)
            if known is not None:
                return ScoredOutput(log_probs=rows.padded(known), label_mask=rows.is_scored)
        keywords: dict[str, Any] = {}
        if images:
            is_drawn, grid = labels != -100, images.get("image_grid_thw")
            keywords = image_keywords(self._module, input_ids, attention_mask, images)
            keywords |= rotary_keywords(self._module, input_ids, attention_mask, is_drawn, grid)
        return self._computed(rows, images, keywords, asks_router=bool(output_router_logits))

    def _refuse_stray_tokens(self, rows: PackedRows, images: Images) -> None:
        """Raise ValueError for tokens of images in a completion, and in prompts without images."""
        token = image_token(self._module)
        if token is None:
            return
        if bool(torch.eq(rows.targets, token).any()):
            raise ValueError(f"a completion has the token of images, {token}: ban it where the completions are drawn")
        if not images and bool(torch.eq(rows.input_ids, token).any()):
            raise ValueError(
                "TRL scores prompts with images without the images: with a rollout_func it takes those of the "
                "dataset's column `images` or `image` alone, not those inside of messages"
            )

    def _computed(
        self, rows: PackedRows, images: Images, keywords: Mapping[str, Any], *, asks_router: bool
    ) -> ScoredOutput:
        assert self.hosted is not None
        inputs = {**rows.model_inputs(), **keywords}
        if asks_router:
            inputs["output_router_logits"] = True
        with self.hosted.training_numerics():
            # Not by calling the module, whose hooks have run for this call.
            out = self._module.forward(**inputs)
            kept: Any = inputs["logits_to_keep"]
            logits = out.logits[0]
            # Some vision-language classes compute all rows whatever they are asked for.
            logits = logits if len(logits) == len(kept) else logits[kept]
            targets = rows.targets if len(rows.targets) else kept
            logprobs = selected_logprobs(logits, targets, self._temperature)
            entropy = row_entropy(logits, self._temperature)
        self.num_scored += 1
        if self._on_scored is not None and len(rows.targets):
            self._on_scored(rows, logprobs.detach(), images)
        log_probs = rows.padded(logprobs)
        return ScoredOutput(
            loss=-log_probs.sum() / max(len(rows.targets), 1),
            log_probs=log_probs,
            entropy=rows.padded(entropy),
            label_mask=rows.is_scored,
            aux_loss=getattr(out, "aux_loss", None),
        )
