"""Update sessions: every transition, and the end of updates that are never committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from lockstep.weight_sync.digests.model_digest import tensor_leaves, tensor_root
from lockstep.weight_sync.errors import DigestMismatch, Poisoned, SessionBusy, SessionError, TransferFailed
from lockstep.weight_sync.layout.bucket import byte_view, plan_buckets
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.host import SessionHost
from lockstep.weight_sync.transaction.lease import LEASE_THREAD, Lease
from lockstep.weight_sync.transaction.records import SessionRecord
from lockstep.weight_sync.transaction.session import SessionManager
from lockstep.weight_sync.transaction.transaction import WeightTransaction

Receive = Callable[[Sink], Sequence[TensorSpec]]
WAIT_S = 20.0


class Replica(SessionHost):
    """Three resident tensors, a tied name and a session manager over them."""

    def __init__(self, **options: object) -> None:
        self.tensors = {"a": torch.zeros(40), "b": torch.zeros(6, 8).t(), "c": torch.zeros((), dtype=torch.bfloat16)}
        self.published: list[SessionRecord] = []
        self.rolled_back = threading.Event()
        self.whys: list[str] = []
        self.transaction: WeightTransaction | None = None
        self.before_publishing: Callable[[], object] = lambda: None
        self.publish_error: Exception | None = None
        self.digest_error: Exception | None = None
        self.manager = SessionManager(self, **options)

    def make_transaction(self, coverage: str, undo: str) -> WeightTransaction:
        self.transaction = WeightTransaction(self.tensors.items(), aliases={"tied": "a"}, coverage=coverage, undo=undo)
        return self.transaction

    def publish(self, record: SessionRecord) -> None:
        self.before_publishing()
        if self.publish_error is not None:
            raise self.publish_error
        self.published.append(record)

    def on_rollback(self, why: str, is_poisoned: bool) -> None:
        self.whys.append(why)
        self.rolled_back.set()

    def digest_roots(self, names: Sequence[str]) -> dict[str, bytes]:
        if self.digest_error is not None:
            raise self.digest_error
        return {name: root_of(name, self.transaction.resident(name)) for name in names}

    @property
    def values(self) -> dict[str, float]:
        """Return the one value that all elements of each tensor have; fails where a tensor is partly written."""
        found = {name: set(tensor.flatten().tolist()) for name, tensor in self.tensors.items()}
        assert all(len(values) == 1 for values in found.values()), f"torn: {found}"
        return {name: values.pop() for name, values in found.items()}

    @property
    def state(self) -> dict[str, object]:
        return self.manager.state()


def root_of(name: str, tensor: torch.Tensor) -> bytes:
    return tensor_root(name, tensor.dtype, tensor.shape, tensor_leaves(tensor))


def filled(value: float, names: str = "abc") -> dict[str, torch.Tensor]:
    shapes = {"a": ((40,), torch.float32), "b": ((8, 6), torch.float32), "c": ((), torch.bfloat16)}
    return {name: torch.full(shapes[name][0], value, dtype=shapes[name][1]) for name in names}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: root_of(name, tensor).hex() for name, tensor in tensors.items()}


def sending(
    tensors: dict[str, torch.Tensor], stop_after: int | None = None, error: BaseException | None = None
) -> Receive:
    """Return a receiver of these tensors in buckets of 64 bytes. It raises before piece number `stop_after`."""

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        specs = specs_of(tensors.items())
        sink.expect(specs)
        pieces = [piece for plan in plan_buckets(specs, 64) for piece in plan.pieces]
        for number, piece in enumerate(pieces):
            if number == stop_after and error is not None:
                raise error
            if number == stop_after:
                break
            data = byte_view(tensors[piece.name])[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            lent = sink.destination(piece.name, piece.tensor_offset, piece.num_bytes)
            if lent is None:
                sink.write(piece.name, piece.tensor_offset, data)
            else:
                lent.copy_(data)
        return specs

    return receive


def lease_thread() -> threading.Thread:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == LEASE_THREAD]
    return thread


OLD = {"a": 0.0, "b": 0.0, "c": 0.0}
NEW = {"a": 1.0, "b": 1.0, "c": 1.0}


# -- sessions that end well -------------------------------------------------------------------------------------------


def test_an_explicit_session_commits_once_and_says_what_it_was():
    replica = Replica()
    manager = replica.manager
    assert replica.state["state"] == "idle"
    manager.begin("7")
    assert replica.state["missing"] == {"count": 3, "names": ["a", "b", "c"]}
    update = manager.update("distributed", sending(filled(1.0, "ab")), verify=digests(filled(1.0)))
    assert (update.num_tensors, update.num_bytes, update.verified, update.explicit) == (2, 352, True, True)
    assert replica.state["state"] == "open" and replica.state["explicit"]
    assert replica.state["num_tensors_written"] == 2 and replica.state["missing"] == {"count": 1, "names": ["c"]}
    assert not manager.update("disk", sending(filled(1.0, "c"))).verified
    assert replica.published == []
    record = manager.commit()
    assert replica.published == [record] and replica.values == NEW
    assert (record.version, record.coverage, record.verified) == ("7", "full", False)
    assert (record.sources, record.num_tensors, record.num_bytes) == (("distributed", "disk"), 3, 354)
    assert record.num_undo_bytes == 354 and record.seconds > 0
    assert replica.state["state"] == "committed" and replica.state["version"] == "7" and not replica.whys


@pytest.mark.parametrize(("names", "coverage"), [("abc", "full"), ("b", "partial")])
def test_an_update_outside_a_session_opens_one_that_is_as_full_as_it_turns_out(names, coverage):
    replica = Replica()
    tensors = filled(1.0, names)
    update = replica.manager.update("tensor", sending(tensors), version="1", verify=digests(tensors))
    assert update.verified and not update.explicit and not replica.state["explicit"]
    replica.manager.update("tensor", sending(tensors), verify=digests(tensors))  # again: the same session
    record = replica.manager.commit()
    assert (record.coverage, record.verified, record.version) == (coverage, True, "1")
    assert record.sources == ("tensor",) and replica.published == [record]


@pytest.mark.parametrize(
    ("given", "version"), [((None, None, None), None), (("1", None, None), "1"), (("1", "2", None), "2"), ("123", "3")]
)
def test_the_last_version_that_was_given_counts(given, version):
    replica = Replica()
    replica.manager.begin(given[0])
    replica.manager.update("disk", sending(filled(1.0)), version=given[1])
    assert replica.manager.commit(given[2]).version == version


def test_a_tensor_rewritten_without_a_digest_is_not_verified_any_more():
    replica = Replica()
    replica.manager.update("disk", sending(filled(1.0)), verify=digests(filled(1.0)))
    replica.manager.update("disk", sending(filled(2.0, "b")))
    assert not replica.manager.commit().verified


def test_a_digest_under_the_tied_name_verifies_the_tensor():
    replica = Replica()
    tensors = {"tied": torch.ones(40), "a": torch.ones(40)}
    replica.manager.begin(coverage="partial")
    assert replica.manager.update("disk", sending(tensors), verify=digests({"tied": torch.ones(40)})).verified
    record = replica.manager.commit()
    assert record.verified and record.num_tensors == 1


def test_updates_of_one_session_may_send_tied_tensors_anew():
    replica = Replica()
    for value in (1.0, 2.0):
        both = {"tied": torch.full((40,), value), "a": torch.full((40,), value)}
        replica.manager.update("tensor", sending(both))
    with pytest.raises(ValueError, match="a and tied are one tensor"):
        replica.manager.update("tensor", sending({"tied": torch.ones(40), "a": torch.zeros(40)}))
    assert replica.values == OLD


def test_a_commit_is_reverted_until_its_undo_is_released():
    replica = Replica()
    replica.manager.begin("1")
    replica.manager.update("disk", sending(filled(1.0)))
    record = replica.manager.commit()
    assert replica.manager.revert() == record
    assert replica.values == OLD and replica.state["state"] == "rolled_back" and len(replica.published) == 1
    with pytest.raises(SessionError, match="no commit to revert"):
        replica.manager.revert()
    replica.manager.update("disk", sending(filled(1.0)))  # a revert on request does not prevent updates
    replica.manager.commit("2")
    replica.manager.release_undo()
    replica.manager.release_undo()
    with pytest.raises(SessionError, match="no commit to revert"):
        replica.manager.revert()
    assert replica.values == NEW and replica.state["state"] == "committed"


def test_the_next_session_releases_the_undo_of_the_commit_before():
    replica = Replica()
    replica.manager.update("disk", sending(filled(1.0)))
    replica.manager.commit("1")
    first = replica.transaction
    replica.manager.begin("2")
    assert not first.can_revert
    with pytest.raises(SessionError, match="already open"):
        replica.manager.revert()


# -- calls in the wrong order -----------------------------------------------------------------------------------------


def test_calls_in_the_wrong_order_are_refused_in_the_fields_words():
    manager = Replica().manager
    with pytest.raises(SessionError, match=r"^no weight-update session is open; call begin_weight_update\(\) first$"):
        manager.commit()
    with pytest.raises(SessionError, match="no weight-update session is open"):
        manager.rollback()
    manager.begin()
    with pytest.raises(SessionError, match=r"^a weight-update session is already open; call end_weight_update\(\) f"):
        manager.begin()


@pytest.mark.parametrize("options", [{"coverage": "most"}, {"undo": "some"}, {"lease_s": 0}])
def test_unknown_options_open_nothing(options):
    replica = Replica()
    with pytest.raises(ValueError, match=next(iter(options))):
        replica.manager.begin(**options)
    assert replica.state["state"] == "idle"


def test_a_full_session_with_tensors_missing_stays_open_until_they_are_sent():
    replica = Replica()
    replica.manager.begin("1")
    replica.manager.update("disk", sending(filled(1.0, "b")))
    with pytest.raises(ValueError, match=r"2 tensors were not wholly written: a; c"):
        replica.manager.commit()
    replica.manager.update("disk", sending(filled(1.0, "ac")))
    assert replica.manager.commit().coverage == "full" and len(replica.published) == 1


def test_an_update_that_is_refused_before_its_first_byte_changes_nothing():
    replica = Replica()
    wrong = sending({"a": torch.zeros(41), "x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"a: shape \[41\].*x: not a tensor"):
        replica.manager.update("disk", wrong)
    assert replica.state["state"] == "idle"
    replica.manager.begin("1")
    replica.manager.update("disk", sending(filled(1.0, "a")))
    for refused in (wrong, sending(filled(1.0, "a"))):
        with pytest.raises(ValueError, match="does not fit"):
            replica.manager.update("disk", refused)
        assert replica.state["state"] == "open" and replica.state["num_tensors_written"] == 1
    replica.manager.update("disk", sending(filled(1.0, "bc")))
    assert replica.manager.commit().sources == ("disk",)
    assert replica.values == NEW and not replica.whys


# -- failures ---------------------------------------------------------------------------------------------------------

NUM_PIECES = sum(len(plan.pieces) for plan in plan_buckets(specs_of(filled(1.0).items()), 64))


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("the wire broke"), KeyboardInterrupt(), SystemExit(9)], ids=repr)
@pytest.mark.parametrize("piece", range(NUM_PIECES))
def test_a_receiver_that_dies_at_any_piece_takes_its_whole_session_back(piece, error, explicit):
    replica = Replica()
    if explicit:
        replica.manager.begin("1", coverage="partial")
    replica.manager.update("first", sending(filled(1.0, "a")))
    with pytest.raises(type(error)):
        replica.manager.update("second", sending(filled(2.0), stop_after=piece, error=error))
    if piece == 0:  # none of its bytes were written: the session continues
        assert replica.state["state"] == "open"
        replica.manager.commit()
        assert replica.values == {**OLD, "a": 1.0}
        return
    assert replica.values == OLD and replica.state["state"] == "rolled_back"
    assert replica.whys == [f"second: {error}"] and replica.published == []
    if explicit:  # later updates of its client must not open a session of their own
        for act in (lambda: replica.manager.update("third", sending(filled(3.0, "c"))), replica.manager.commit):
            with pytest.raises(SessionError, match=r"was rolled back \(second: .*begin_weight_update\(\) first"):
                act()
        replica.manager.begin("2")
    replica.manager.update("third", sending(filled(3.0)))
    replica.manager.commit()
    assert set(replica.values.values()) == {3.0}


@pytest.mark.parametrize("piece", range(1, NUM_PIECES))
def test_pieces_that_never_arrive_are_named_and_everything_is_taken_back(piece):
    replica = Replica()
    with pytest.raises(TransferFailed, match=r"disk: . tensors did not arrive whole: .*c"):
        replica.manager.update("disk", sending(filled(1.0), stop_after=piece))
    assert replica.values == OLD and replica.state["state"] == "rolled_back"


def test_giving_up_takes_everything_back_and_frees_the_way():
    replica = Replica()
    replica.manager.begin("1")
    replica.manager.update("disk", sending(filled(1.0, "ab")))
    replica.manager.rollback("another target failed")
    assert replica.values == OLD and replica.whys == ["another target failed"]
    assert replica.state["why"] == "another target failed"
    with pytest.raises(SessionError, match="another target failed"):
        replica.manager.commit()
    with pytest.raises(SessionError, match="another target failed"):  # it may be its client's
        replica.manager.update("tensor", sending(filled(1.0)))
    replica.manager.forget_abort()  # as where generation is paused for another update
    replica.manager.update("tensor", sending(filled(1.0)))


def test_an_update_of_all_weights_is_no_part_of_a_session_that_was_aborted():
    replica = Replica()
    replica.manager.begin("1")
    replica.manager.rollback("asked for")
    replica.manager.update("disk", sending(filled(1.0)), is_whole=True)


def test_calls_of_a_named_client_reach_its_own_session_alone():
    replica = Replica()
    manager = replica.manager
    with pytest.raises(SessionError, match="one has no weight-update session here"):
        manager.update("tensor", sending(filled(1.0)), client="one")
    manager.begin("1", client="one")
    with pytest.raises(SessionError, match="already open, that of one"):
        manager.begin("2", client="two")
    for who in ("two", None):
        with pytest.raises(SessionError, match="the open weight-update session is that of one"):
            manager.update("tensor", sending(filled(1.0)), client=who)
        with pytest.raises(SessionError, match="the open weight-update session is that of one"):
            manager.commit(client=who)
        with pytest.raises(SessionError, match="the open weight-update session is that of one"):
            manager.verify({}, client=who)
    with pytest.raises(SessionError, match="the open weight-update session is that of one"):
        manager.rollback(client="two")
    assert replica.values == OLD and manager.client == "one"
    manager.update("tensor", sending(filled(1.0)), client="one")
    manager.commit(client="one")
    with pytest.raises(SessionError, match="the last commit is not that of two"):
        manager.revert(client="two")
    manager.revert(client="one")
    assert replica.values == OLD


def test_a_named_client_whose_session_somebody_aborted_hears_of_it_and_others_do_not():
    replica = Replica()
    manager = replica.manager
    manager.begin("1", client="one")
    manager.rollback("an operator")  # without a name: anybody may
    with pytest.raises(SessionError, match="no weight-update session is open"):
        manager.rollback()
    manager.begin("2", client="two")
    with pytest.raises(SessionError, match=r"that of two: the weight-update session was rolled back .an operator."):
        manager.update("tensor", sending(filled(1.0)), client="one")
    manager.rollback(client="one")  # it is rolled back already, and two's session stays
    assert manager.client == "two"
    manager.rollback(client="two")
    with pytest.raises(SessionError, match="an operator"):
        manager.update("tensor", sending(filled(1.0)), client="one")
    manager.update("tensor", sending(filled(1.0)))  # a client without a name has lost nothing
    manager.commit()
    manager.begin("3", client="one")
    manager.rollback(client="one")


def test_a_session_that_ended_by_itself_can_be_acknowledged_once():
    replica = Replica()
    replica.manager.begin("1")
    with pytest.raises(RuntimeError):
        replica.manager.update("disk", sending(filled(1.0), stop_after=2, error=RuntimeError("broke")))
    replica.manager.rollback()
    with pytest.raises(SessionError, match="no weight-update session is open"):
        replica.manager.rollback()
    assert replica.whys == ["disk: broke"]
    replica.manager.update("disk", sending(filled(1.0)))


@pytest.mark.parametrize("undo", ["tensors", "none"])
def test_a_commit_that_cannot_be_published_is_taken_back(undo):
    replica = Replica()
    replica.publish_error = RuntimeError("not idle")
    replica.manager.begin("1", undo=undo)
    replica.manager.update("disk", sending(filled(1.0)))
    with pytest.raises(RuntimeError, match="not idle"):
        replica.manager.commit()
    assert replica.state["state"] == ("rolled_back" if undo == "tensors" else "poisoned")
    assert replica.values == (OLD if undo == "tensors" else NEW)
    assert "publishing failed: not idle" in replica.state["why"]


# -- digests ----------------------------------------------------------------------------------------------------------


def test_a_mismatch_in_a_session_is_repaired_by_sending_only_those_tensors():
    replica = Replica()
    replica.manager.begin("1")
    wanted = filled(1.0)
    corrupt = {**wanted, "b": torch.full((8, 6), 5.0), "c": torch.tensor(5.0, dtype=torch.bfloat16)}
    with pytest.raises(DigestMismatch, match=r"2 tensors differ.*: b, c; the session is still open") as error:
        replica.manager.update("disk", sending(corrupt), verify=digests(wanted))
    assert error.value.names == ("b", "c")
    assert replica.values == {**NEW, "b": 0.0, "c": 0.0} and replica.state["missing"]["names"] == ["b", "c"]
    with pytest.raises(ValueError, match="b; c"):
        replica.manager.commit()
    repair = {name: wanted[name] for name in error.value.names}
    assert replica.manager.update("disk", sending(repair), verify=digests(repair)).verified
    record = replica.manager.commit()
    assert record.verified and record.coverage == "full" and replica.values == NEW
    replica.manager.revert()
    assert replica.values == OLD


def test_a_mismatch_outside_a_session_takes_everything_back_and_tells_how_to_repair():
    replica = Replica()
    replica.manager.update("disk", sending(filled(1.0, "a")))
    with pytest.raises(DigestMismatch, match=r"1 tensors.*: c; everything.*rolled back.*begin_weight_update") as error:
        replica.manager.update("disk", sending(filled(2.0, "c")), verify=digests(filled(1.0)))
    assert error.value.names == ("c",)
    assert replica.values == OLD and replica.state["state"] == "rolled_back"


def test_a_digest_that_cannot_be_computed_takes_everything_back():
    replica = Replica()
    replica.digest_error = RuntimeError("a rank did not answer")
    with pytest.raises(RuntimeError, match="a rank did not answer"):
        replica.manager.update("disk", sending(filled(1.0)), verify=digests(filled(1.0)))
    assert replica.values == OLD and replica.state["state"] == "rolled_back"


# -- poison -----------------------------------------------------------------------------------------------------------


def poisoned_replica() -> Replica:
    replica = Replica()
    replica.manager.begin("1", undo="none")
    with pytest.raises(RuntimeError, match="broke"):
        replica.manager.update("tensor", sending(filled(1.0), stop_after=2, error=RuntimeError("the wire broke")))
    assert replica.state["state"] == "poisoned" and "the wire broke" in replica.state["why"]
    return replica


def test_poisoned_weights_refuse_everything_but_a_full_session():
    manager = poisoned_replica().manager
    with pytest.raises(Poisoned, match=r"the wire broke.*only an explicit session of full coverage"):
        manager.update("disk", sending(filled(1.0)))
    with pytest.raises(Poisoned, match="the wire broke"):
        manager.begin("2", coverage="partial")
    with pytest.raises(SessionError, match="the wire broke"):
        manager.commit()
    assert manager.state()["state"] == "poisoned"


def test_a_verified_full_commit_heals():
    replica = poisoned_replica()
    replica.manager.begin("2")
    assert replica.state["state"] == "open" and "the wire broke" in replica.state["why"]
    replica.manager.update("disk", sending(filled(1.0)), verify=digests(filled(1.0)))
    assert replica.manager.commit().verified
    assert replica.values == NEW and replica.state["state"] == "committed" and replica.state["why"] == ""
    replica.manager.update("disk", sending(filled(2.0)))
    replica.manager.commit()


def test_an_unverified_full_commit_does_not_heal():
    replica = poisoned_replica()
    replica.manager.begin("2")
    replica.manager.update("disk", sending(filled(1.0)), verify=digests(filled(1.0, "ab")))
    with pytest.raises(Poisoned, match=r"the wire broke.*not verified: c"):
        replica.manager.commit()
    assert replica.published == [] and replica.state["state"] == "open"
    replica.manager.rollback("cannot verify")
    assert replica.state["state"] == "poisoned" and "the wire broke" in replica.state["why"]


def test_reverting_the_commit_that_healed_poisons_again():
    replica = poisoned_replica()
    replica.manager.begin("2")
    replica.manager.update("disk", sending(filled(1.0)), verify=digests(filled(1.0)))
    replica.manager.commit()
    replica.manager.revert()
    assert replica.state["state"] == "poisoned" and "the wire broke" in replica.state["why"]


def test_a_mismatch_without_undo_poisons():
    replica = Replica()
    replica.manager.begin("1", undo="none")
    with pytest.raises(Poisoned, match="cannot be restored"):
        replica.manager.update("disk", sending(filled(2.0)), verify=digests(filled(1.0)))
    assert replica.state["state"] == "poisoned"


def test_a_mismatch_that_verify_finds_without_undo_poisons_and_ends_the_session():
    replica = Replica()
    replica.manager.begin("1", undo="none")
    replica.manager.update("disk", sending(filled(2.0)))
    with pytest.raises(Poisoned, match="a, b, c cannot be restored"):
        replica.manager.verify(digests(filled(1.0)))
    assert replica.state["state"] == "poisoned" and "cannot be restored" in replica.state["why"]
    assert not replica.manager.is_explicit
    replica.manager.begin("2")
    replica.manager.update("disk", sending(filled(1.0)), verify=digests(filled(1.0)))
    assert replica.manager.commit().verified and replica.values == NEW


def test_without_undo_a_commit_stands():
    replica = Replica()
    replica.manager.begin("1", undo="none")
    replica.manager.update("disk", sending(filled(1.0)))
    assert replica.manager.commit().num_undo_bytes == 0
    with pytest.raises(SessionError, match="no commit to revert"):
        replica.manager.revert()
    assert replica.values == NEW


# -- leases and threads -----------------------------------------------------------------------------------------------


def test_a_session_that_is_not_ended_in_time_is_taken_back_without_its_client():
    replica = Replica()
    replica.manager.begin("1", lease_s=0.5)
    assert 0 < replica.state["seconds_left"] <= 0.5
    replica.manager.update("disk", sending(filled(1.0)))
    assert replica.rolled_back.wait(WAIT_S)
    for act in (replica.manager.commit, lambda: replica.manager.update("disk", sending(filled(2.0)))):
        with pytest.raises(SessionError, match=r"it expired: its client was silent for 0\.5 s.*begin_weight_update"):
            act()
    assert replica.values == OLD and replica.state["state"] == "rolled_back" and len(replica.whys) == 1
    replica.manager.begin("2")
    assert replica.state["seconds_left"] is None
    replica.manager.update("disk", sending(filled(2.0)))
    replica.manager.commit()


def test_an_update_that_outlasts_the_lease_renews_it_and_silence_afterwards_ends_it():
    replica = Replica()
    receiving, go_on = threading.Event(), threading.Event()
    inner = sending(filled(1.0))

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        specs = inner(sink)
        receiving.set()
        assert go_on.wait(WAIT_S)
        return specs

    replica.manager.begin("1", lease_s=0.4)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(replica.manager.update("disk", receive)), daemon=True)
    thread.start()
    assert receiving.wait(WAIT_S)
    lease = lease_thread()
    lease.join(0.8)  # expires while bytes arrive, and waits
    assert lease.is_alive()
    assert replica.state["state"] == "open" and replica.state["seconds_left"] == 0 and replica.values == NEW
    go_on.set()
    thread.join(WAIT_S)
    assert len(done) == 1 and replica.state["seconds_left"] > 0
    assert replica.rolled_back.wait(WAIT_S)  # by the renewed one
    lease.join(WAIT_S)
    assert not lease.is_alive()
    assert replica.values == OLD and len(replica.whys) == 1


@pytest.mark.parametrize("call", ["update", "verify"])
def test_each_call_of_a_sessions_client_starts_its_lease_anew(call):
    replica = Replica()
    replica.manager.begin("1", "partial", lease_s=WAIT_S)
    replica.manager.update("disk", sending(filled(1.0)))
    lease_thread().join(0.2)  # so much of its time passes
    before = replica.state["seconds_left"]
    if call == "update":
        replica.manager.update("disk", sending(filled(1.0)))
    else:
        replica.manager.verify({})
    assert before < replica.state["seconds_left"] <= WAIT_S
    replica.manager.commit()
    assert replica.values == NEW


def test_only_a_session_whose_lease_is_over_is_given_up_as_expired():
    replica = Replica()
    replica.manager.begin("1", lease_s=WAIT_S)
    replica.manager.update("disk", sending(filled(1.0)))
    with pytest.raises(SessionError, match="no session has expired"):
        replica.manager.rollback("it expired", is_lost=True, only_expired=True)
    assert replica.state["state"] == "open"
    replica.manager.commit()
    with pytest.raises(SessionError, match="no session has expired"):
        replica.manager.rollback("it expired", is_lost=True, only_expired=True)
    assert replica.values == NEW


def test_a_commit_that_comes_with_the_end_of_the_lease_is_too_late_however_fast_it_is(monkeypatch):
    monkeypatch.setattr(Lease, "call_at_end", lambda lease, end: None)  # its thread is slower
    replica = Replica()
    replica.manager.begin("1", lease_s=0.05)
    replica.manager.update("disk", sending(filled(1.0)))
    while replica.state["seconds_left"]:
        pass
    with pytest.raises(SessionError, match="it expired"):
        replica.manager.commit()
    assert replica.values == OLD and len(replica.whys) == 1


def test_a_lease_that_ends_while_its_session_commits_is_met():
    replica = Replica()
    replica.before_publishing = lambda: lease_thread().join(0.8)
    replica.manager.begin("1", lease_s=0.4)
    lease = lease_thread()
    replica.manager.update("disk", sending(filled(1.0)))
    record = replica.manager.commit()
    lease.join(WAIT_S)
    assert not lease.is_alive() and replica.published == [record]
    assert replica.values == NEW and replica.state["state"] == "committed" and not replica.whys


def test_a_lease_that_was_met_never_fires():
    replica = Replica()
    replica.manager.begin("1", lease_s=30.0)
    lease = lease_thread()
    replica.manager.update("disk", sending(filled(1.0)))
    replica.manager.commit()
    lease.join(WAIT_S)
    assert not lease.is_alive() and not replica.whys and replica.values == NEW


def test_a_call_waits_for_another_only_so_long_and_state_does_not_wait():
    replica = Replica(lock_timeout_s=WAIT_S)
    receiving, go_on = threading.Event(), threading.Event()

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        receiving.set()
        assert go_on.wait(WAIT_S)
        return sending(filled(1.0))(sink)

    thread = threading.Thread(target=replica.manager.update, args=("tensor", receive), daemon=True)
    thread.start()
    assert receiving.wait(WAIT_S)
    for act in (
        lambda: replica.manager.commit(timeout_s=0.01),
        lambda: replica.manager.update("disk", sending(filled(2.0)), timeout_s=0.01),
        lambda: replica.manager.rollback(timeout_s=0.01),
        lambda: replica.manager.begin(lease_s=0.01),
        lambda: replica.manager.release_undo(timeout_s=0.01),
        lambda: replica.manager.revert(timeout_s=0.01),
    ):
        with pytest.raises(SessionBusy, match=r"waited 0\.01 s .*\(update from tensor\)"):
            act()
    assert replica.state["state"] == "open"
    go_on.set()
    assert replica.manager.commit("1").num_tensors == 3  # waits for the update to end
    thread.join(WAIT_S)
    assert replica.values == NEW


def test_the_state_lists_at_most_twenty_names():
    replica = Replica()
    replica.tensors = {"a": torch.zeros(2)} | {f"t{i:02}": torch.zeros(2) for i in range(29)}
    replica.manager.begin()
    assert replica.manager.state()["missing"] == {"count": 30, "names": ["a", *(f"t{i:02}" for i in range(19))]}
