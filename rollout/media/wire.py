"""The encoding of a prompt's images for other ranks: a head of JSON, and the tensors as safetensors."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from .images import Images

_POSITIONS = "positions"


def images_bytes(images: Images) -> bytes:
    """Encode the images of a prompt. Every number is decoded to the same bits."""
    tensors = {f"{index}/{name}": one for index, inputs in enumerate(images.inputs) for name, one in inputs.items()}
    tensors |= {f"beside/{name}": one for name, one in images.beside.items()}
    if images.prompt_positions is not None:
        tensors[_POSITIONS] = images.prompt_positions
    head = {
        "tokens": list(images.tokens), "ends": list(images.ends), "digest": images.digest,
        "digests": list(images.digests), "offset": images.offset, "blocks": [list(one) for one in images.blocks],
        "block_tokens": list(images.block_tokens),
    }  # fmt: skip
    text = json.dumps(head, separators=(",", ":")).encode()
    data = safetensors.torch.save({name: one.contiguous() for name, one in tensors.items()})
    return len(text).to_bytes(8, "little") + text + data


def images_from(data: bytes) -> Images:
    """Decode the images of `images_bytes`."""
    end = 8 + int.from_bytes(data[:8], "little")
    head: dict[str, Any] = json.loads(data[8:end])
    tensors = safetensors.torch.load(data[end:])
    inputs: list[dict[str, Tensor]] = [{} for _ in head["ends"]]
    beside: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.partition("/")
        if owner == "beside":
            beside[leaf] = tensor
        elif name != _POSITIONS:
            inputs[int(owner)][leaf] = tensor
    head["blocks"] = [(begin, stop) for begin, stop in head["blocks"]]
    positions: torch.Tensor | None = tensors.get(_POSITIONS)
    return Images(inputs=inputs, prompt_positions=positions, beside=beside, **head)
