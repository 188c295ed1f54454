"""Tests of the store whose calls keep to their deadlines."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.group.shared_keys import Interrupted, SharedKeys

PATIENCE = 30.0


def test_a_call_beside_a_close_is_answered_and_not_left_to_its_deadline():
    keys = SharedKeys(HashStore())
    keys.put("a", "1", Deadline.after(PATIENCE))
    jobs, closing = keys._jobs, threading.Thread(target=keys.close)

    class Late:
        """A queue into which the close comes right before the first job, if it can."""

        def put(self, job: object) -> None:
            if job is not None and closing.ident is None:
                closing.start()
                closing.join(0.3)
            jobs.put(job)

        def get(self) -> object:
            return jobs.get()

    keys._jobs = Late()
    assert keys.has("a", Deadline.after(PATIENCE))
    closing.join(PATIENCE)
    assert not closing.is_alive()
    with pytest.raises(Interrupted, match="the store is closed"):
        keys.has("a", Deadline.after(PATIENCE))
