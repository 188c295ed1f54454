"""Calls that all ranks of a replica make together: their start, their end and their results."""

from __future__ import annotations

import json
import logging
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any, Literal

from ..completion import Completion, DraftCounts, DrawnWith, FinishReason, KeptIds, NextToken, WeightSpan
from ..errors import EngineStopped, RankFailure
from ..media.images import Images
from ..media.wire import images_bytes, images_from
from ..ranks.channel import RankChannel
from ..ranks.controller_channel import as_controller
from ..ranks.remote_errors import error_bytes, error_from
from ..running.runner import Runner
from ..sampling_params import SamplingParams
from .controller import ReplicaRunner
from .follower import IN_A_CALL, SERVING, Follower
from .request_json import changed, kv_starts_of, options_of
from .result_bytes import as_tuples

logger = logging.getLogger(__name__)

End = Literal["call over", "closed"]


class RankCalls:
    """The calls of one engine. In a replica of one rank every method does nothing."""

    def __init__(self, ranks: RankChannel, runner: Runner) -> None:
        self._ranks = ranks
        self._follower: Follower | None = None
        if not ranks.mesh.is_controller:
            assert isinstance(runner, ReplicaRunner)
            self._follower = Follower(ranks, runner.stage)

    @contextmanager
    def call(self, quiet: Callable[[], object]) -> Iterator[Callable[[list[Completion]], None]]:
        """Open a call at the controller. It begins when every follower follows. Raises RankFailure.

        The followers in the call return the completions that were passed to the yielded function, or raise the error
        that was raised in the context. quiet: ends all running work, so that no rank leaves while another needs it.
        """
        if self._ranks.mesh.num_ranks == 1:
            yield lambda completions: None
            return
        as_controller(self._ranks).await_followers(self._ranks.timeout_s)
        given: list[Completion] = []
        try:
            yield given.extend
            quiet()
            encoded = completions_bytes(given)
        except RankFailure:
            raise  # the followers detect it by themselves
        except BaseException as error:
            quiet()
            as_controller(self._ranks).end_call(IN_A_CALL, b"E" + error_bytes(error))
            raise
        as_controller(self._ranks).end_call(IN_A_CALL, b"C" + encoded)

    def join(self) -> list[Completion]:
        """Follow until the controller's call ends; returns its completions. At a follower. Raises the call's error, and
        EngineStopped where the controller has closed the engine."""
        assert self._follower is not None
        end = self._follower.follow(IN_A_CALL)
        if end is None:
            raise EngineStopped("the controller has closed the engine: make another one")
        if end.payload[:1] == b"E":
            raise error_from(end.payload[1:], "the controller")
        return completions_from(end.payload[1:])

    def follow(self) -> End:
        """Follow until `dismiss` at the controller, or until the engine closes. Raises ValueError at the controller."""
        if self._follower is None:
            raise ValueError(f"rank {self._ranks.mesh.rank} is the controller of its replica: it does not follow")
        return "closed" if self._follower.follow(SERVING) is None else "call over"

    def dismiss(self) -> None:
        """Release the followers that serve, at the controller. Their `follow` returns, of those that do not follow yet
        when they do."""
        if self._ranks.mesh.num_ranks == 1:
            return
        as_controller(self._ranks).end_call(SERVING, b"C" + completions_bytes([]), of_all=True)

    def close(self) -> None:
        """Close this rank's side; the controller's followers leave. Log a warning if the replica is lost."""
        try:
            if self._follower is not None:
                self._follower.close()
            else:
                self._ranks.close()
        except RankFailure as failure:
            logger.warning("closing, though the replica is lost: %s", failure)


def completions_bytes(completions: list[Completion]) -> bytes:
    """Encode completions as JSON. Every number is decoded to the same bits."""
    images: dict[Images, int] = {}  # numbered as they come: samples share those of their prompt
    plain = [_plain(completion, images) for completion in completions]
    sent = [b64encode(images_bytes(one)).decode() for one in images]
    return json.dumps({"images": sent, "completions": plain}, separators=(",", ":"), default=dict).encode()


def _plain(completion: Completion, images: dict[Images, int]) -> dict[str, Any]:
    values = asdict(replace(completion, drawn_with=None, receipt=None, kept_ids=None))
    values["receipt"] = completion.receipt
    if (kept := completion.kept_ids) is not None:
        values["kept_ids"] = [kept.ids.tolist(), kept.ends.tolist()]
    if (drawn := completion.drawn_with) is not None:
        options = changed(drawn.options)
        if drawn.options.renewal is not None:
            options["renewal"] = asdict(drawn.options.renewal)
        if drawn.options.begun is not None:
            options["begun"] = asdict(drawn.options.begun)
        number = None if drawn.images is None else images.setdefault(drawn.images, len(images))
        params = changed(replace(drawn.params, custom_params=None))  # of any type, and not the engine's
        values["drawn_with"] = [params, options, drawn.seed, number]
    return values


def completions_from(data: bytes) -> list[Completion]:
    """Decode the completions of `completions_bytes`."""
    given = json.loads(data)
    images = [images_from(b64decode(one)) for one in given["images"]]
    return [_completion(one, images) for one in given["completions"]]


def _completion(given: dict[str, Any], images: Sequence[Images]) -> Completion:
    values = {f.name: as_tuples(given[f.name]) for f in fields(Completion)}
    for name, kind in (("finish_reason", FinishReason), ("next_token", NextToken)):
        if given[name] is not None:
            values[name] = kind(**{key: as_tuples(value) for key, value in given[name].items()})
    values["weight_versions"] = tuple(WeightSpan(**span) for span in given["weight_versions"])
    if given["drawn_with"] is not None:
        params, options, seed, number = given["drawn_with"]
        own = None if number is None else images[number]
        values["drawn_with"] = DrawnWith(SamplingParams(**params), options_of(options), seed, own)
    values["receipt"] = given["receipt"]
    if given["kept_ids"] is not None:
        values["kept_ids"] = KeptIds(*(array("i", numbers) for numbers in given["kept_ids"]))
    values["kv_starts"] = kv_starts_of(given["kv_starts"])
    values["drafts"] = tuple(DraftCounts(**counts) for counts in given["drafts"])
    return Completion(**values)
