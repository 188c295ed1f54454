"""The images of receipts' prompts, found by their SHA-256 among prompts that were given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...rollout.media.images import Images
from ...rollout.media.reader import IDS, image_tensors, image_token, images_digest
from ...rollout.proving.claim import Claim
from ...rollout.request_options import RequestOptions

if TYPE_CHECKING:
    from ...rollout.control.desk.intake import CheckedPrompt, Prompt
    from ...rollout.engine import Engine


class ClaimedImages:
    """The images that claims are proven with."""

    def __init__(self, engine: Engine, prompts: Iterable[Mapping[str, Any]]) -> None:
        """Take the images of prompts, as a processor gives them; their tokens are those of the receipts. Raises
        ValueError for tensors that are none."""
        self._engine = engine
        found = [image_tensors(prompt) for prompt in prompts]
        self._tensors = {images_digest(tensors): tensors for tensors in found}
        self._read: dict[tuple[tuple[int, ...], str], CheckedPrompt | str] = {}  # or why it cannot be read

    def absent(self, claim: Claim) -> str:
        """Return why the images of a claim's prompt are not at hand; "": they are, or it has none."""
        if claim.images is None:
            token = image_token(self._engine.model.module)
            return "its prompt has tokens of images, and it names no images" if token in claim.prompt_ids else ""
        if claim.images not in self._tensors:
            return f"its prompt has images of SHA-256 {claim.images}, which are not at hand: give the prompt with them"
        read = self._of(claim, claim.images)
        return read if isinstance(read, str) else ""

    def prompt(self, claim: Claim) -> Prompt:
        """Return a claim's prompt for an engine. Its images are at hand."""
        if claim.images is None:
            return list(claim.prompt_ids)
        read = self._of(claim, claim.images)
        assert not isinstance(read, str), read
        return read

    def of(self, claim: Claim) -> Images | None:
        """Return the images of a claim's prompt, which are at hand."""
        prompt = self.prompt(claim)
        return getattr(prompt, "images", None)

    def _of(self, claim: Claim, digest: str) -> CheckedPrompt | str:
        """Return the prompt of a claim as this engine reads it, or the reason why it does not."""
        key = claim.prompt_ids, digest
        if key not in self._read:
            given = {IDS: list(claim.prompt_ids), **self._tensors[digest]}
            try:
                self._read[key], _ = self._engine.requests.check(given, None, RequestOptions())
            except ValueError as error:
                self._read[key] = f"its prompt cannot be read with its images: {error}"
        return self._read[key]
