"""Run-time conditions that a caller may want to handle; what a caller got wrong is a ValueError instead."""


class LockstepError(RuntimeError):
    """Base of every run-time condition that Lockstep raises on purpose."""


class IllegalTransition(LockstepError):
    """A sequence was asked to enter a state that its present state does not lead to; nothing changed."""


class NotIdle(LockstepError):
    """The operation needs an engine with nothing running; the message counts what is."""


class PhaseError(LockstepError):
    """The module belongs to the other phase: the trainer's, or the rollout's."""


class MemoryReleased(LockstepError):
    """The KV pool is released; resume it first."""


class LedgerError(LockstepError):
    """The block ledger does not sum up: free + cached + held is not the pool. A bug of ours."""


class BrokenLogits(LockstepError):
    """The model gave NaN where log-probabilities should be: its weights are broken. Nothing was sampled."""


class SamplingRefused(LockstepError):
    """The weights may be torn: nothing is sampled before the next commit."""


class DeadlineExceeded(LockstepError):
    """A command's deadline passed before it began; it never runs."""


class OpIdTaken(LockstepError):
    """An op_id stands for another call, or for the same call with other arguments; nothing ran."""


class EngineStopped(LockstepError):
    """The background loop has ended, by `stop()` or by the error that is this one's cause."""


class RankFailure(LockstepError):
    """A rank of the replica died, was stopped, hangs, or differs from the others: every rank of the replica raises this
    with the same first cause, and the replica is of no further use."""

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), phase: str = "", step: int = -1, seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.ranks = ranks  # of the world, to blame
        self.phase = phase  # what they were doing
        self.step = step  # of the engine; -1: none yet
        self.seconds = seconds  # for which nothing was heard
