"""The verbs that load an adapter into an engine and unload it, checked and published as other updates are.

An engine has at most one adapter, which is part of its weights: it answers every request until it is unloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...rollout.engine import Engine
from ...rollout.errors import MemoryReleased
from ...rollout.loop.commands import OnCommit
from ...rollout.model.adapters.folder import AdapterFolder, AdapterLayers
from ...weight_sync.errors import SessionError
from ...weight_sync.transaction.call_lock import CallLock
from ..service_config import ServiceConfig
from .all_ranks import Replica
from .host import AS_A_WHOLE, Commit
from .options import UpdateOptions
from .sessions import WeightSessions

_LOADING = "adapter"  # the key of the refusal to sample meanwhile


@dataclass(frozen=True)
class AdapterReport:
    """The adapters of an engine after a change."""

    loaded_adapters: dict[str, str]  # folder by name: at most one
    commit: Commit


class LoraVerbs:
    """The methods of a service that change its adapter. The subclass sets the fields. Arguments are those of
    `WeightVerbs`."""

    engine: Engine
    config: ServiceConfig
    sessions: WeightSessions
    replica: Replica
    _adapter: tuple[str, str] | None = None  # name and folder
    _adapter_lock: CallLock  # held while an adapter is changed

    @property
    def loaded_adapters(self) -> dict[str, str]:
        """The folder of the loaded adapter by its name; empty without one."""
        return dict([self._adapter]) if self._adapter is not None else {}

    def load_lora_adapter(
        self,
        lora_name: str,
        lora_path: str | Path,
        *,
        load_inplace: bool = False,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        timeout_s: float | None = None,
    ) -> AdapterReport:
        """Load an adapter folder in PEFT's layout. The engine has adapter, version and digest, or is as before.

        load_inplace: replace the adapter of that name, if it is loaded; `ServiceConfig.lora_replaces` replaces any.
        Raises ValueError naming another adapter that is loaded, a fault of the folder, tensors that do not fit, or an
        engine that cannot load any; NotIdle where requests run; SessionError while a weight-update session is open.
        """
        if not lora_name:
            raise ValueError("lora_name must not be empty")
        options = UpdateOptions(
            weight_version, self.config.wait_s(timeout_s), None, abort_all_requests, keep_running, in_flight
        )
        with self._changing(options.timeout_s):
            former = self._adapter
            is_same = former is not None and former[0] == lora_name
            if former is not None and not (self.config.lora_replaces or (load_inplace and is_same)):
                remedy = "load it in place (load_inplace)" if is_same else "an engine has one at a time"
                raise ValueError(f"adapter {former[0]!r} is loaded already: {remedy}, or unload it first")
            return self._change_adapter((lora_name, str(lora_path)), AdapterFolder.read(lora_path), options)

    def unload_lora_adapter(
        self,
        lora_name: str,
        *,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        keep_running: bool = False,
        in_flight: OnCommit | None = None,
        timeout_s: float | None = None,
    ) -> AdapterReport:
        """Unload the adapter of that name: the engine has its base alone again. Raises ValueError for an adapter that
        is not loaded, and as `load_lora_adapter` does."""
        options = UpdateOptions(
            weight_version, self.config.wait_s(timeout_s), None, abort_all_requests, keep_running, in_flight
        )
        with self._changing(options.timeout_s):
            if lora_name not in self.loaded_adapters:
                loaded = ", ".join(map(repr, self.loaded_adapters)) or "none"
                raise ValueError(f"adapter {lora_name!r} is not loaded; loaded: {loaded}")
            return self._change_adapter(None, {}, options)

    @contextmanager
    def _changing(self, timeout_s: float) -> Iterator[None]:
        with self._adapter_lock.held("a change of the adapter", timeout_s, lambda error: None):
            yield

    def _change_adapter(
        self, adapter: tuple[str, str] | None, content: AdapterFolder | AdapterLayers, options: UpdateOptions
    ) -> AdapterReport:
        """Hold the sampling, change the layers, and publish. Whatever fails, the former layers are put back."""
        if self.sessions.state()["state"] == "open":
            raise SessionError("a weight-update session is open: end it or give it up before an adapter is changed")
        # No session begins before the end: it would write tensors that the change may take out again.
        commit = self.sessions.change_adapter(lambda: self._put_in(adapter, content, options), options.timeout_s)
        self.replica.stands()
        return AdapterReport(self.loaded_adapters, commit)

    def _put_in(
        self, adapter: tuple[str, str] | None, content: AdapterFolder | AdapterLayers, options: UpdateOptions
    ) -> Commit:
        weights = self.engine.weights
        if not self.engine.model.holds_weights:
            raise MemoryReleased('the weights are released: resume_memory_occupation(["weights"]) first')
        if self.engine.refusal is not None:
            raise SessionError(f"the weights are to be updated before an adapter is changed: {self.engine.refusal}")
        version = options.weight_version if options.weight_version is not None else self.engine.weight_version
        is_held = False
        try:
            weights.hold_for_update(
                refusal=(_LOADING, "an adapter is being loaded or unloaded"), abort_all=options.abort_all_requests,
                keep_running=options.keep_running, in_flight=options.in_flight, timeout_s=options.timeout_s,
            )  # fmt: skip
            is_held = True
            with AS_A_WHOLE:
                former = weights.replace_adapter(content)
                try:
                    commit = self.sessions.commit_adapter(version, options.in_flight)
                except BaseException:
                    weights.replace_adapter(former)
                    self.sessions.renamed()
                    raise
                self._adapter = adapter
                self.engine.model.adapter_name = None if adapter is None else adapter[0]
            return commit
        finally:
            weights.allow_sampling(_LOADING, None if is_held else ())
