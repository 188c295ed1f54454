"""An engine with its weights: the verbs that HTTP, the command line, the job and the trainer adapters talk to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..rollout.engine import Engine
from ..weight_sync.digest import model_digest
from ..weight_sync.in_place import NamedTensors, sync_in_place

_TAGS = ("kv_cache",)


@dataclass(frozen=True)
class Commit:
    """A weight version that landed."""

    version: str
    digest: str | None  # None while a digest asked for "later" is owed
    bytes_copied: int
    num_blocks_dropped: int  # cached KV of the version before


class RolloutService:
    """Joins an engine and the weight verbs. Methods that have an HTTP verb bear its name.

    Example, in a training rank whose `model` the engine was made from:
        service = RolloutService(Engine(model))
        with service.rollout():
            completions = service.engine.generate(prompts, params)
        with service.optimizer_step():
            optimizer.step()
        service.commit_in_place("1", source=model.named_parameters())
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._owes_digest = False

    # -- phases -----------------------------------------------------------------------------------------------------

    @contextmanager
    def rollout(self, *, release_kv: bool = False) -> Iterator[None]:
        """The rollout phase: the module generates. KV released before is resumed.

        With `release_kv` the pool is given back at the end, for the trainer to use its memory; that raises NotIdle
        where sequences are still running.
        """
        self.engine.resume_kv()
        with self.engine.model.rollout_phase():
            self.engine.wake()
            yield
        if release_kv:
            self.engine.release_kv()

    @contextmanager
    def training_numerics(self) -> Iterator[None]:
        """Run the trainer's forward and backward in here: then its log-probabilities are the engine's, bit for bit."""
        with self.engine.model.training_numerics():
            yield

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Announce that the shared weights are being written. From here to the next commit the engine refuses to
        sample, also after an exception in here: the weights may be torn."""
        self.finish_digest()
        self.engine.refuse_sampling("the trainer is writing the weights: commit them first")
        yield

    # -- weights ----------------------------------------------------------------------------------------------------

    def commit_in_place(
        self, version: str, *, source: NamedTensors, digest: Literal["now", "later"] = "now"
    ) -> Commit:
        """Publish what the trainer wrote into the shared storage as `version`; starts a KV epoch.

        source: the trainer's parameters by Hugging Face name, checked to be the engine's own memory. With
        `digest="later"` the digest is None until `finish_digest`, which `optimizer_step` calls before the next write.
        Raises ValueError listing tensors that are not shared; then nothing is committed.
        """
        if digest not in ("now", "later"):
            raise ValueError(f'digest must be "now" or "later", not {digest!r}')
        record = sync_in_place(self.engine.resident_tensors(), source)
        value = self.model_digest() if digest == "now" else None
        num_dropped = self.engine.commit_weights(version, value)
        self._owes_digest = value is None
        return Commit(version, value, record.bytes_copied, num_dropped)

    def finish_digest(self) -> str | None:
        """Compute the digest that a commit put off, if one is owed; returns the digest of the weights now."""
        if self._owes_digest:
            self.engine.set_weight_digest(self.model_digest())
            self._owes_digest = False
        return self.engine.weight_digest

    def model_digest(self) -> str:
        """SHA-256 tree over the resident tensors as they are now (DESIGN section 3), in hex. Changes nothing."""
        return model_digest(self.engine.resident_tensors())

    def get_weight_version(self) -> str:
        """The version that was committed last."""
        return self.engine.weight_version

    # -- memory and state -------------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Iterable[str] = _TAGS) -> dict[str, int]:
        """Free the memory behind each tag (only "kv_cache" so far); returns the bytes freed by tag.

        Raises ValueError for an unknown tag, NotIdle while sequences run.
        """
        return {tag: self.engine.release_kv() for tag in _checked(tags)}

    def resume_memory_occupation(self, tags: Iterable[str] = _TAGS) -> dict[str, int]:
        """Allocate again what was released; returns the bytes held by tag. What is there stays as it is."""
        return {tag: self.engine.resume_kv() for tag in _checked(tags)}

    def state(self) -> dict[str, object]:
        """The engine's state and the weights'. Changes nothing."""
        return {**self.engine.state(), "owes_digest": self._owes_digest}


def _checked(tags: Iterable[str]) -> list[str]:
    tags = list(tags)
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        raise ValueError(f"unknown memory tag: {', '.join(unknown)}; known: {', '.join(_TAGS)}")
    return tags
