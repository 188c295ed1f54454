"""Sessions of tensors that come under other names: what counts as compared with digests, and as whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lockstep.tests.weight_sync.transaction.test_pieces import Experts, model
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.errors import DigestMismatch, TransferFailed
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.records import SessionRecord
from lockstep.weight_sync.transaction.session import SessionManager
from lockstep.weight_sync.transaction.transaction import Coverage, Undo, WeightTransaction

WRONG = "0" * 64
Receive = Callable[[Sink], Sequence[TensorSpec]]
STACK = TensorSpec("experts", torch.float32, (4, 3, 5))


class Host:
    """Hold `test_pieces.model`; see `transaction.host.SessionHost`."""

    def __init__(self) -> None:
        self.tensors = model()

    def make_transaction(self, coverage: Coverage, undo: Undo) -> WeightTransaction:
        named, aliases = self.tensors.items(), {"tied": "norm"}
        return WeightTransaction(named, coverage=coverage, undo=undo, aliases=aliases, pieces=Experts(4, (3, 5)))

    def digest_roots(self, names: Sequence[str]) -> dict[str, bytes]:
        return tensor_roots([(name, named(self.tensors)[name]) for name in names])

    def prepare_commit(self, record: SessionRecord) -> None:
        pass

    def publish(self, record: SessionRecord) -> None:
        pass

    def unpublish(self) -> None:
        pass

    def on_rollback(self, why: str, is_poisoned: bool) -> None:
        pass

    def on_dropped(self) -> None:
        pass

    def on_lease_over(self) -> None:
        pass


def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under all names that they, or pieces of them, have."""
    norm = tensors["norm"]
    return tensors | {f"expert.{n}": tensors["experts"][n] for n in range(4)} | {"old.norm": norm, "tied": norm}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(named(tensors).items()).items()}


def send(tensors: dict[str, Tensor], *names: str) -> Receive:
    def receive(sink: Sink) -> Sequence[TensorSpec]:
        sent = {name: named(tensors)[name] for name in names}
        specs = specs_of(sent.items())
        sink.expect(specs)
        for name, tensor in sent.items():
            sink.write(name, 0, byte_view(tensor.contiguous()))
        return specs

    return receive


def change_elements(sink: Sink) -> Sequence[TensorSpec]:
    """Change an element of the stack, as a delta does that cannot be checked where it arrives."""
    sink.write_elements("experts", torch.tensor([3]), torch.tensor([7.0]))
    sink.leave_unchecked("experts", "a part")
    return [STACK]


PIECES = tuple(f"expert.{n}" for n in range(4))
NEW = {"experts": torch.arange(60.0).view(4, 3, 5), "norm": torch.arange(8.0)}


@pytest.mark.parametrize(
    ("names", "known"), [(PIECES, "experts"), (["old.norm"], "norm"), (["tied"], "norm"), (["norm"], "tied")]
)
def test_digests_under_other_names_than_the_sent_ones_are_compared(names, known):
    manager = SessionManager(Host())
    manager.begin(coverage="partial")
    record = manager.update("named", send(NEW, *names), verify={known: digests(NEW)[known]})
    assert record.verified and manager.commit().verified
    with pytest.raises(DigestMismatch, match=known):  # an implicit session
        manager.update("named", send(NEW, *names), verify={known: WRONG})
    manager.begin(coverage="partial")
    with pytest.raises(DigestMismatch, match=known):
        manager.update("named", send(NEW, *names), verify={known: WRONG})
    record = manager.update("named", send(NEW, *names), verify={known: digests(NEW)[known]})
    assert record.verified and manager.commit().verified


def test_a_digest_of_the_whole_is_compared_when_its_last_piece_has_come():
    manager, whole = SessionManager(Host()), {"experts": digests(NEW)["experts"]}
    manager.begin(coverage="full")
    assert not manager.update("named", send(NEW, *PIECES[:2]), verify=whole).verified
    assert manager.update("named", send(NEW, *PIECES[2:]), verify=whole).verified
    manager.update("named", send(NEW, "norm"), verify=digests(NEW))
    assert manager.commit().verified


def test_digests_of_what_comes_later_are_not_compared_with_what_came_before():
    """A sender gives the digests of all tensors with each part of a second push in a session."""
    later = {name: tensor + 1 for name, tensor in NEW.items()}
    manager = SessionManager(Host())
    manager.begin(coverage="partial")
    manager.update("named", send(NEW, *PIECES, "norm"), verify=digests(NEW))
    for name in (*PIECES, "norm"):
        assert manager.update("named", send(later, name), verify=digests(later)).verified
    assert manager.commit().verified


def test_poisoned_weights_are_not_healed_by_a_digest_that_differs():
    manager = SessionManager(Host())

    def broken(sink: Sink) -> Sequence[TensorSpec]:
        send(NEW, "norm")(sink)
        raise ConnectionError("gone")

    manager.begin(undo="none")
    with pytest.raises(ConnectionError):
        manager.update("named", broken)
    assert manager.state()["state"] == "poisoned"
    manager.begin(coverage="full")
    with pytest.raises(DigestMismatch, match="experts"):
        manager.update("named", send(NEW, *PIECES, "norm"), verify=digests(NEW) | {"experts": WRONG})
    manager.update("named", send(NEW, *PIECES), verify={"experts": digests(NEW)["experts"]})
    assert manager.commit().verified and manager.state()["state"] == "committed"


def test_a_changed_tensor_is_not_proven_by_the_digest_of_a_piece_alone():
    host = Host()
    manager, before = SessionManager(host), host.tensors["experts"].clone()
    piece = digests({**host.tensors, "experts": before.flatten().index_fill(0, torch.tensor([3]), 7.0).view(4, 3, 5)})
    with pytest.raises(TransferFailed, match="experts"):
        manager.update("delta", change_elements, verify={"expert.0": piece["expert.0"]})
    assert torch.equal(host.tensors["experts"], before)
    assert manager.update("delta", change_elements, verify={"experts": piece["experts"]}).verified


def test_pieces_that_came_after_a_change_take_its_place():
    manager = SessionManager(Host())
    manager.begin(coverage="partial")
    manager.update("delta", change_elements)
    manager.update("named", send(NEW, *PIECES[:3]), verify=digests(NEW))
    with pytest.raises(ValueError, match="experts"):
        manager.commit()
    manager.update("named", send(NEW, PIECES[3]), verify={PIECES[3]: digests(NEW)[PIECES[3]]})
    assert manager.commit().verified


@pytest.mark.parametrize("name", ["experts", "expert.2", "norm"])
def test_half_of_a_tensor_that_was_whole_already_is_not_committed(name):
    host = Host()
    manager = SessionManager(host)
    data = byte_view(named(NEW)[name].contiguous())
    half = data.numel() // 8 * 4

    def write(start: int, stop: int) -> Receive:
        def receive(sink: Sink) -> Sequence[TensorSpec]:
            sink.write(name, start, data[start:stop])
            return []  # as of a bucket that cuts a tensor

        return receive

    manager.begin(coverage="partial")
    manager.update("named", send(NEW, "experts", "norm"), verify=digests(NEW))
    manager.update("shm", write(0, half))
    with pytest.raises(ValueError, match=name):
        manager.commit()
    manager.update("shm", write(half, data.numel()))
    manager.commit()
    assert all(torch.equal(host.tensors[one], NEW[one]) for one in NEW)
    manager.begin(coverage="partial")
    manager.update("shm", write(half, data.numel()))
    manager.update("named", send(NEW, "experts", "norm"))
    manager.commit()


def test_a_change_of_elements_makes_a_tensor_whole_only_where_its_own_update_began_it():
    host = Host()
    manager, half = SessionManager(host), byte_view(torch.zeros(2, 3, 5))

    def write_half(sink: Sink) -> Sequence[TensorSpec]:
        sink.write("experts", 0, half)
        return []

    def change_and_write(sink: Sink) -> Sequence[TensorSpec]:  # as a delta does, in parts of either kind
        sink.write("experts", 60, half[:60])
        change_elements(sink)
        sink.write("experts", 180, half[60:])
        return [STACK]

    manager.begin(coverage="partial")
    manager.update("delta", change_and_write)
    manager.verify({"experts": digests(host.tensors)["experts"]})
    manager.commit()
    manager.begin(coverage="partial")
    manager.update("named", send(NEW, "experts"))
    manager.update("shm", write_half)
    manager.update("delta", change_and_write)
    with pytest.raises(ValueError, match=r"experts bytes \[120, 180\)"):
        manager.commit()


def test_a_change_under_another_name_comes_in_several_parts():
    host = Host()
    manager = SessionManager(host)

    def change(sink: Sink) -> Sequence[TensorSpec]:
        spec = TensorSpec("old.norm", torch.float32, (8,))
        sink.expect([spec])
        for at in (1, 4):
            sink.write_elements("old.norm", torch.tensor([at]), torch.tensor([9.0]))
        return [spec]

    manager.begin(coverage="partial")
    manager.update("delta", change)
    manager.commit()
    assert host.tensors["norm"][[1, 4]].tolist() == [9.0, 9.0]


def test_tensors_that_share_a_part_of_their_memory_are_rolled_back_whole():
    memory = torch.arange(16.0)
    before = memory.clone()
    transaction = WeightTransaction([("first", memory[:12]), ("last", memory[4:])], coverage="partial")
    for name in ("first", "last"):
        transaction.write(name, 0, byte_view(torch.full((12,), -1.0)))
    transaction.rollback()
    assert torch.equal(memory, before)
