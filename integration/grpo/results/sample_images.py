"""The images of a step's samples on disk: their tensors, as a processor gave them, by their SHA-256.

`rollouts/step-000040.images.safetensors` lies beside the samples of the step, which name the images of their prompts by
`images`. Its tensors are called SHA-256/NAME. With it a sample's receipt can be proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # heavy, and few samples have images
    from torch import Tensor

    from ....rollout.media.images import Images


def images_path(samples: Path) -> Path:
    """Return the path of the images beside a file of samples."""
    return samples.with_name(f"{samples.name.partition('.')[0]}.images.safetensors")


def images_bytes(images: Mapping[str, Images]) -> bytes:
    """Return the content of a file. images: by their SHA-256."""
    import torch
    from safetensors.torch import save

    return bytes(
        save(
            {
                f"{digest}/{name}": torch.cat([one[name] for one in its.inputs])
                for digest, its in images.items()
                for name in its.inputs[0]
            }
        )
    )


def read_images(path: Path) -> list[dict[str, Tensor]]:
    """Read the tensors of each prompt's images in a file. Raises ValueError naming a file that is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    found: dict[str, dict[str, Tensor]] = {}  # by the SHA-256
    for key, tensor in tensors.items():
        digest, _, name = key.rpartition("/")
        found.setdefault(digest, {})[name] = tensor
    return list(found.values())
