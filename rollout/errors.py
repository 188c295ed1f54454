"""Run-time conditions that a caller may want to handle; a caller's own mistakes are ValueErrors instead."""

from collections.abc import Sequence


class LockstepError(RuntimeError):
    """The base of every run-time condition that Lockstep raises on purpose."""


class GrammarError(ValueError):
    """A grammar of a request that is wrong, or that this engine cannot use. The message quotes the place."""


class GrammarsUnavailable(LockstepError):
    """No process here can compile grammars: it does not start, or does not know the library's release."""


class IllegalTransition(LockstepError):
    """A requested change of a sequence's state that its present state does not allow; nothing changed."""


class NotIdle(LockstepError):
    """An operation that needs an idle engine; the message counts the running requests."""


class PhaseError(LockstepError):
    """A use of the module that its present user rules out: the trainer, this engine, or another one."""


class MemoryReleased(LockstepError):
    """An operation on the released KV pool; resume it first."""


class OutOfMemory(LockstepError):
    """Memory that the machine did not give; nothing changed. The message names the size and the remedy."""


class LedgerError(LockstepError):
    """A wrong sum in the block ledger: free + cached + held is not the pool. A bug of ours."""


class BrokenLogits(LockstepError):
    """NaN in the model's output where log-probabilities should be: its weights are broken. Nothing was sampled.

    Raised to the callers that wait for these sequences, where no thread of the engine's own runs the steps, or else to
    the caller that runs them. Such a thread aborts these requests and goes on.
    """

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)  # of the sequences with such output


class SamplingRefused(LockstepError):
    """A refusal to sample before the next commit, because the weights may be partly written."""


class DeadlineExceeded(LockstepError):
    """A command whose deadline passed before it began; it never runs, but by an earlier call under its op_id."""


class Overloaded(LockstepError):
    """A refusal because too much waits already; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OpIdTaken(LockstepError):
    """An op_id that belongs to another call, or to the same call with other arguments; nothing ran."""


class EngineStopped(LockstepError):
    """The end of the background loop by the error that is this one's cause, or of the engine by `close()`."""


class ForkedProcess(LockstepError):
    """A use of an engine in a fork of its process: its threads, locks and sockets are the parent's. Nothing ran."""


class RankFailure(LockstepError):
    """The failure of a rank of the replica: it ended, was stopped, hangs, or differs from the others.

    Every rank of the replica raises this with the same first cause, and the replica is unusable afterwards.
    """

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), phase: str = "", step: int = -1, seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.ranks = ranks  # of the world: the failed ones
        self.phase = phase  # their activity at that time
        self.step = step  # of the engine; -1: before the first one
        self.seconds = seconds  # since their last message
