"""The comparison of one sequence in two ways, as one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from .comparison import compare
from .recording import Recording
from .report import Report
from .runs import plain_logprobs, run_way
from .scores import Scores, TokenGap, gaps
from .sequence import TokenSequence
from .ways import Way, with_equal_blocks


def explain(
    model: PreTrainedModel | Path,
    sequence: TokenSequence,
    first: Way,
    second: Way,
    *,
    scores: Scores | None = None,
    at_least: int = 1,
    tolerance: float = 0.0,
    announce: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run a sequence in two ways and compare every operation.

    scores: log-probabilities of another engine, to compare with the first way's. at_least: ignore differences of fewer
    ulps. tolerance: nats that reported log-probabilities may differ. announce: gets a line before each run. Raises
    ValueError for ways that the model does not support, and RunFailed.
    """
    ways = with_equal_blocks(first, second)
    recordings, plain = [], []
    for way in ways:
        announce(f"running {way.describe()}")
        recordings.append(run_way(way, sequence, model))
        plain.append(_gaps(recordings[-1], sequence, plain_logprobs(way, sequence, model)))
    one, other = recordings
    claimed = tuple(gaps(one, sequence, Scores(sequence.token_ids, sequence.logprobs))) if sequence.logprobs else ()
    return Report(
        sequence,
        ways,
        (one, other),
        compare(one, other, at_least=at_least),
        reported=claimed,
        scores=tuple(gaps(one, sequence, scores)) if scores is not None else (),
        plain=(plain[0], plain[1]),
        tolerance=tolerance,
    )


def _gaps(recording: Recording, sequence: TokenSequence, logprobs: dict[int, float]) -> tuple[TokenGap, ...]:
    """Return the gaps of log-probabilities by position, if they are of all the tokens."""
    if len(logprobs) != len(sequence.token_ids):
        return ()
    return tuple(gaps(recording, sequence, Scores(sequence.token_ids, tuple(logprobs.values()))))
