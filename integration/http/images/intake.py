"""The images of requests on their way to the engine: refused, decoded, and run through the model's processor."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ....rollout.engine import Engine
from ....rollout.giving_way import others_compute
from ....rollout.media.reader import IDS, encoder_names, why_no_images
from ..edge.config import HttpConfig
from ..edge.errors import BadField, TooLong
from .kept import KeptPrompts, Made
from .pictures import SentPicture, check_pixels, pixels_of, sent_bytes, sent_picture

if TYPE_CHECKING:
    from PIL.Image import Image

    from .processor import FolderProcessor


class ProcessedPrompt(list[int]):
    """The token ids of a prompt, with the tensors of its images, which the engine has not read yet."""

    def __init__(self, made: Made, field: str) -> None:
        """Take what was made. field: of the request, that the images are in."""
        ids = made.inputs[IDS]
        super().__init__(ids.flatten().tolist() if isinstance(ids, Tensor) else ids)
        self.made, self.field = made, field


class ImageIntake:
    """The images of one server's requests. Any thread may call."""

    def __init__(self, engine: Engine, config: HttpConfig) -> None:
        self._engine, self._config = engine, config
        self._lock = threading.Lock()  # of the loading, which one thread does
        self._loaded: FolderProcessor | None = None
        self._failure: str | None = None
        self._kept = KeptPrompts(config.max_kept_image_bytes)

    @cached_property
    def refusal(self) -> str | None:
        """The reason why this server takes no images, as far as it is known without loading the processor; None: it
        does."""
        if self.no_images is not None:
            return self.no_images
        if importlib.util.find_spec("PIL") is None:
            return "images are not supported: the server has no Pillow (extra `images`: pip install -e '.[images]')"
        if self._folder is None:
            return "images are not supported: no folder of the model's processor is known (processor_path)"
        return None

    @cached_property
    def no_images(self) -> str | None:
        """The reason why the model takes no images, not even as tensors; None: it does."""
        model = self._engine.model
        return f"images are not supported: {why_no_images(model.module)}" if model.images is None else None

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tensors that the model's encoder takes."""
        return encoder_names(self._engine.model.module)

    @property
    def _folder(self) -> Path | None:
        model, config = self._engine.model, self._config
        named = config.processor_path or model.folder or config.model_path or getattr(model.module, "name_or_path", "")
        return Path(named) if named and Path(named).is_dir() else None

    def sent(self, given: Sequence[object], field: str, *, is_bare: bool = False) -> list[SentPicture]:
        """Return pictures of a list in a request, as they came. Raises BadField."""
        return [self.one(one, f"{field}.{index}", is_bare=is_bare) for index, one in enumerate(given)]

    def one(self, given: object, field: str, *, is_bare: bool = False) -> SentPicture:
        """Return a picture as it came. Raises BadField, also where this server takes none."""
        if self.refusal is not None:
            raise BadField(field, self.refusal)
        return sent_picture(given, field, self._config, is_bare=is_bare)

    def tensors(self, given: str, field: str) -> SentPicture:
        """Return the tensors of a picture as they came, base64 that is not decoded here. Raises BadField."""
        return sent_bytes(given, field, self._config)

    def count(self, num: int, field: str) -> None:
        """Check the number of images of a request. Raises BadField."""
        if num > (limit := self._config.max_images):
            raise BadField(field, f"{num} images are more than the {limit} of a request (max_images)")

    def check_pixels(self, pictures: Sequence[SentPicture]) -> None:
        """Check the pixels of the pictures of a request, which may be of several prompts. Raises BadField."""
        check_pixels(pictures, self._config)

    def processor(self, field: str) -> FolderProcessor:
        """Return the processor, which the first call loads. Raises BadField where there is none."""
        with others_compute(), self._lock:
            if self._loaded is None and self._failure is None:
                from .processor import FolderProcessor  # heavy, and few servers need it

                assert self._folder is not None, "images have been refused"
                try:
                    self._loaded = FolderProcessor(self._folder)
                except ValueError as error:
                    self._failure = f"images are not supported: {error}"
        if self._loaded is None:
            raise BadField(field, str(self._failure))
        return self._loaded

    def of_text(self, text: str, pictures: Sequence[SentPicture], field: str, *, adds_special: bool) -> ProcessedPrompt:
        """Return the prompt of a text with placeholders of its pictures. Slow. Raises BadField, with this field where
        it is not the fault of a picture."""
        processor = self.processor(field)
        key = _key(pictures, text.encode("utf-8", "surrogatepass"), adds_special)
        return self._of_pixels(
            key, pictures, field, lambda images: processor.of_text(text, images, adds_special=adds_special)
        )

    def of_ids(self, ids: list[int], pictures: Sequence[SentPicture], field: str) -> ProcessedPrompt:
        """Return the prompt of token ids with their pictures. Slow. Raises BadField likewise."""
        processor = self.processor(field)
        return self._of_pixels(_ids_key(pictures, ids), pictures, field, lambda images: processor.of_ids(ids, images))

    def of_tensors(
        self, ids: list[int], pictures: Sequence[SentPicture], ranges: Sequence[tuple[int, int]], field: str,
        make: Callable[[], Mapping[str, Tensor]],
    ) -> ProcessedPrompt:  # fmt: skip
        """Return the prompt of token ids with pictures that came as tensors, which `make` decodes. ranges: the first
        token of each and the one behind its last. Slow. Raises BadField likewise."""
        key = _ids_key(pictures, ids) + f"{ranges}".encode()  # longer than a digest: no key of pixels
        return self._made(key, field, lambda: Made({IDS: ids, **make()}, ranges))

    def _of_pixels(
        self, key: bytes, pictures: Sequence[SentPicture], field: str, make: Callable[[list[Image]], Made]
    ) -> ProcessedPrompt:
        """Return the prompt that was made under a key, or make it of the pixels of its pictures."""
        processor, room = self.processor(field), self._engine.max_prompt_len

        def check(sizes: list[tuple[int, int]]) -> None:
            num = processor.num_tokens(sizes)
            if num is not None and num > 2 * room:  # an image that is turned upright may have some more, or fewer
                why = f"Input length ({num} tokens of images) exceeds the maximum allowed length ({room} tokens)"
                raise TooLong(field, str(num), room, room, why=why)

        return self._made(key, field, lambda: make(pixels_of(pictures, self._config, check)))

    def _made(self, key: bytes, field: str, make: Callable[[], Made]) -> ProcessedPrompt:
        try:
            return ProcessedPrompt(self._kept.of(key, make), field)
        except ValueError as error:
            raise BadField(field, str(error)) from None


def _ids_key(pictures: Sequence[SentPicture], ids: list[int]) -> bytes:
    return _key(pictures, array("q", ids).tobytes(), None)


def _key(pictures: Sequence[SentPicture], prompt: bytes, adds_special: bool | None) -> bytes:
    """Return a digest of what a prompt with images is made of. adds_special: None for token ids."""
    found = hashlib.sha256(f"{adds_special} {len(prompt)} ".encode())
    found.update(prompt)
    for picture in pictures:
        found.update(hashlib.sha256(picture.data.encode("utf-8", "surrogatepass")).digest())
    return found.digest()
