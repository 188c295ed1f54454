"""The parts of one engine below its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..config import EngineConfig
from ..grammars.catalog import Grammars
from ..kv.ledger import KVLedger
from ..kv.tensors import KVCache, KVPlan
from ..model.hosted_model import HostedModel
from ..ranks.channel import RankChannel
from ..reports.reports import Reports
from ..running.runner import Runner
from ..scheduling.scheduler import Scheduler, StepLimits
from ..sequences.engine_manager import EngineSequenceManager
from ..sequences.event_log import ManagerPair
from ..sequences.request import Request
from ..speculation.speculation import Speculation
from ..states.tensors import StatePlan, StatePool


@dataclass(frozen=True)
class RunnerParts:
    """The parts that a runner is made from: this rank's share of the model and of the KV."""

    config: EngineConfig
    ranks: RankChannel
    model: HostedModel
    kv_cache: KVCache
    state_pool: StatePool
    eos_token_ids: frozenset[int]
    max_model_len: int
    reports: Reports

    @property
    def overlap(self) -> bool:
        """Return whether the next step is planned while the model runs. Where that is not set, a GPU would wait for the
        host in every step; on a CPU both compute with the same processors."""
        asked, is_alone = self.config.overlap, self.ranks.mesh.num_ranks == 1
        return self.model.device.type == "cuda" and is_alone if asked is None else asked


MakeRunner = Callable[[RunnerParts], Runner]


@dataclass(frozen=True)
class Parts(RunnerParts):
    """Model, KV, runner, scheduler and managers of one engine."""

    tokenizer: PreTrainedTokenizerBase | None
    kv_plan: KVPlan
    state_plan: StatePlan
    runner: Runner
    ledger: KVLedger
    limits: StepLimits
    scheduler: Scheduler
    managers: ManagerPair
    grammars: Grammars
    speculation: Speculation | None  # None: off
    owns_mesh: bool  # it was built for this engine

    @property
    def sequences(self) -> EngineSequenceManager:
        """The controller's manager, which knows all live requests."""
        return self.managers.engine

    def why_no_draft(self, request: Request) -> str | None:
        """Return why a running sequence had no draft in the newest step; None: it had one, or drafts are off."""
        return None if self.speculation is None else self.speculation.reasons.of(request)

    def close(self) -> None:
        """End the threads, close the files, and destroy the groups of a mesh of its own. No step is in flight."""
        self.runner.close()
        self.grammars.close()
        self.reports.trace.close()
        if self.owns_mesh and self.ranks.has_parted:  # where a rank is lost, the end of its groups could be waited for
            self.ranks.mesh.destroy()
