"""The reading of prompts with images by a hosted module, and its check with the first of them: the engine's forward
against a trainer's."""

from __future__ import annotations

import inspect
import logging
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..media.encoder import as_taken
from ..media.images import ImageRows, Images
from ..media.reader import ImageReader, image_token
from ..media.wire import images_bytes, images_from
from ..model.hosted_model import HostedModel
from ..model.supported import refused_if_it_fails
from ..ranks.channel import RankChannel

logger = logging.getLogger(__name__)

_CHECK = "check_images"
_NEAR = 0.05  # difference of log-probabilities that rounding explains, in an engine that is not invariant


T = TypeVar("T")


class Command(Protocol):
    """The function that runs another one under a name between two steps."""

    def __call__(self, name: str, run: Callable[[], T]) -> T: ...


def checking_reader(model: HostedModel, ranks: RankChannel, command: Command, most_rows: int) -> ImageReader | None:
    """Return the reader of prompts with images, which runs the model between two steps; None: the model takes none.

    ranks: of the replica, which check the first prompt together. most_rows: of a prompt, in one step.
    """
    if (encoder := model.images) is None:
        return None
    ranks.handlers[_CHECK] = lambda ids, images: compare_images(model, ids, images_from(b64decode(images)))

    def check(ids: Sequence[int], images: Images) -> None:
        if ranks.mesh.num_ranks == 1:
            gaps = [compare_images(model, ids, images)]
        else:
            arguments = {"ids": list(ids), "images": b64encode(images_bytes(images)).decode()}
            found = ranks.run_everywhere(_CHECK, arguments)
            if wrong := next((one for one in found if not one.success), None):
                raise ValueError(f"rank {wrong.rank}: {wrong.message}")
            gaps = [one.data for one in found]
        refuse_gap(model, max(gaps), len(ids))

    def count(inputs: Mapping[str, Tensor]) -> int:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        says = f"this image's tensors are refused ({sizes}): the encoder of {type(model.module).__name__} fails on them"
        with model.rollout_phase(admits=False), refused_if_it_fails(model.module, says=says):
            return encoder.count(inputs)

    def types(ids: Tensor, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        with model.rollout_phase(admits=False), refused_if_it_fails(model.module, "images"):
            blocks = encoder.blocks(found := encoder.types(ids, given))
        if blocks and model.has_states:
            name = type(model.module).__name__
            raise ValueError(f"tokens of images that see each other, beside recurrent layers ({name}): not supported")
        return found, blocks

    return ImageReader(
        model.module,
        lambda inputs: command("count_features", lambda: count(inputs)),
        (lambda ids, given: command("types_of_tokens", lambda: types(ids, given))) if encoder.may_have_blocks else None,
        lambda ids, images: command(_CHECK, lambda: check(ids, images)),
        most_rows,
    )


def compare_images(model: HostedModel, ids: Sequence[int], images: Images) -> float:
    """Compare the last logits of a prompt with images: those of the module's own forward, which encodes all images at
    once and makes its own positions and mask, with those of the engine's, which gives it each image's features.

    Returns the largest difference of log-probabilities, at least the smallest number where other bits differ; 0.0:
    equal bits. A collective of the ranks that share the module.
    """
    token_ids = torch.tensor(ids, device=model.device)
    last = torch.tensor([len(ids) - 1], device=model.device)
    rows = ImageRows()
    rows.add(images, 0, len(ids), 0)
    rotary = torch.arange(len(ids), device=model.device)
    if images.prompt_positions is not None:
        rotary = images.prompt_positions.to(model.device)
    assert model.images is not None
    with model.rollout_phase(admits=False), torch.inference_mode(), refused_if_it_fails(model.module, "images"):
        given = _as_a_trainer(model, token_ids, images)
        own = model.module(**given, use_cache=False, logits_to_keep=1).logits[0, -1]
        features = model.images.keywords(rows, token_ids)
        ours = model.call(token_ids, rotary, None, last, None, features=features)[0]
    gap = float((own.float().log_softmax(-1) - ours.float().log_softmax(-1)).abs().max())
    return gap if torch.equal(own, ours) else max(gap, sys.float_info.min)


def refuse_gap(model: HostedModel, gap: float, num_tokens: int) -> None:
    """Raise ValueError where a prompt of so many tokens with images has other bits than a trainer's forward, in an
    engine that is not invariant other numbers than rounding explains."""
    if gap > (0.0 if model.numerics.guarantee is not None else _NEAR):
        raise ValueError(
            f"{type(model.module).__name__} cannot run with images: over a prompt of {num_tokens} tokens its own "
            f"forward, as a trainer calls it, gives other log-probabilities than the engine's, by up to {gap:.2g}"
        )
    logger.info("check of %s with images: equal bits as in a trainer's forward", type(model.module).__name__)


def _as_a_trainer(model: HostedModel, token_ids: Tensor, images: Images) -> dict[str, Any]:
    """Return the keywords of the module's own forward over one prompt with images."""
    names = images.inputs[0].keys()
    given = as_taken({name: torch.cat([one[name] for one in images.inputs]) for name in names}, model)
    taken = inspect.signature(type(model.module).forward).parameters
    of_images = torch.eq(token_ids, image_token(model.module) or 0).int().unsqueeze(0)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in taken:
            given[name] = images.beside.get(name, of_images).to(model.device)
    ids = token_ids.unsqueeze(0)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}  # some make no positions without a mask
