"""A rank that follows its replica's controller: it applies the same events to its manager and runs the same steps."""

from __future__ import annotations

import logging

from ..errors import RankFailure
from ..ranks.channel import RankChannel
from ..ranks.follower_channel import FollowerChannel
from ..ranks.remote_errors import error_bytes
from ..ranks.watch import AWAY
from ..ranks.wire import Kind, Message
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput
from .event_stream import EventReader, Op, Order
from .result_bytes import results_bytes
from .stage import Stage, StepSkipped

logger = logging.getLogger(__name__)

IN_A_CALL, SERVING = 1, 2  # modes of a follower: until the controller's call ends, or until it is dismissed


class Follower:
    """The executor of the controller's messages, in their order, in the thread that calls `follow`."""

    def __init__(self, ranks: RankChannel, stage: Stage) -> None:
        assert isinstance(ranks, FollowerChannel)
        self._ranks, self._stage = ranks, stage
        self._workers = stage.workers
        self._reader = EventReader(stage.has_states)
        self._requests: dict[str, Request] = {}
        self._output: ScheduleOutput | None = None  # the newest schedule
        self.is_closed = False

    def follow(self, how: int) -> Message | None:
        """Follow until the controller ends the call, and return the message that ended it; None: the controller closes
        the engine, or has closed it. Raises RankFailure."""
        if self.is_closed:
            return None
        watch = self._ranks.watch
        if not self._ranks.is_over:
            self._ranks.send(Kind.HERE, how)
        try:
            while True:
                watch.enter("waiting for a step")
                message = self._ranks.next_message()
                if message.kind is Kind.CALL_OVER:
                    return message
                if message.kind is Kind.CLOSE:
                    self._say_goodbye()
                    return None
                self._take(message)
        finally:
            watch.enter(AWAY)

    def close(self) -> None:
        """Wait for the controller to close the engine, and send this rank's last message."""
        if not self.is_closed:
            self._ranks.await_close()
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        self.is_closed = True
        self._ranks.close()

    def _take(self, message: Message) -> None:
        if message.kind is Kind.STEP:
            for order in self._reader.read(message.payload, self._workers):
                self._apply(order)
        elif message.kind is Kind.VERB:
            self._ranks.answer_verb(message)
        else:
            raise AssertionError(f"a follower cannot take {message}")

    def _apply(self, order: Order) -> None:
        workers, value = self._workers, order.value
        if order.op is Op.SCHEDULE:
            self._output, new = value
            workers.on_schedule(self._output)
            for request in new:
                request.sequence = workers.sequence(request.id)
                self._requests[request.id] = request
        elif order.op is Op.RESULTS:
            for result in value:
                if workers.is_live(result.id, result.incarnation):
                    self._requests[result.id].record.prompt_logprobs += result.prompt_logprobs
            workers.on_step_completed(value)
        elif order.op is Op.CANCELLED:
            workers.on_step_cancelled(value)
        elif order.op is Op.PREEMPT:
            workers.preempt(value)
        elif order.op is Op.FREE:
            workers.free(value)
            self._stage.forget(self._requests.pop(value))
        elif order.op is Op.CHECK:
            self._check(value)
        else:
            self._run(value)

    def _check(self, state_hash: str) -> None:
        if (own := self._workers.state_hash()) != state_hash:
            where = f"before step {self._output.step + 1}" if self._output else "at the start"
            what = f"has come apart from the controller {where}: state {own[:12]}, not {state_hash[:12]}"
            raise self._ranks.lose([self._ranks.mesh.local_rank], what)

    def _run(self, step: int) -> None:
        output = self._output
        assert output is not None and output.step == step, (output, step)
        try:
            results = self._stage.run(output, self._requests)
        except RankFailure:
            raise
        except StepSkipped:
            results = []
        except Exception as error:  # a boundary between processes: the controller raises it for its caller
            logger.exception("step %d failed", step)
            place = f"{self._ranks.mesh.local_rank}\n".encode()
            self._ranks.send(Kind.STEP_FAILED, step, place + error_bytes(error))
            results = []
        finally:
            # Also after a failure: the controller's next step may hold the next chunk of a sequence in this step.
            self._workers.on_stage_completed(output.scheduled)
        if results:
            self._ranks.send(Kind.RESULTS, step, results_bytes(results))
