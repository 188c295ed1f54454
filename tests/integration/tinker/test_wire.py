"""The encoding of messages: examples of its documentation, and hostile bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.integration.tinker.serving import models
from lockstep.integration.tinker.serving.sampling import SampleRequest
from lockstep.integration.tinker.training.data import BadInput
from lockstep.integration.tinker.wire import messages
from lockstep.integration.tinker.wire import protobuf as wire
from lockstep.integration.tinker.wire.bodies import DatumBody, SampleBody
from lockstep.integration.tinker.wire.json_forms import data_of
from lockstep.integration.tinker.wire.messages import dense_of, pass_request, tensor
from lockstep.rollout.giving_way import giving_way
from lockstep.tests.support import tinker_client
from lockstep.tests.support.tinker_client import datum, pass_body


def test_examples_of_the_documentation():
    """protobuf.dev, "Encoding": a varint of 150, the text "testing", a message inside, a packed list."""
    assert wire.put_varint(1, 150) == bytes.fromhex("089601")
    assert wire.put_text(2, "testing") == bytes.fromhex("120774657374696e67")
    assert wire.put_bytes(3, wire.put_varint(1, 150)) == bytes.fromhex("1a03089601")
    assert wire.put_numbers(6, [3, 270, 86942]) == bytes.fromhex("3206038e029ea705")
    assert wire.put_varint(1, -2) == bytes.fromhex("08feffffffffffffffff01")
    [(number, value)] = wire.fields(bytes.fromhex("08feffffffffffffffff01"))
    assert (number, wire.signed(value)) == (1, -2)
    [(_, packed)] = wire.fields(bytes.fromhex("3206038e029ea705"))
    assert wire.numbers(packed) == [3, 270, 86942]


def test_unknown_fields_are_skipped():
    known = pass_body("m", 3, [datum([1], target_tokens=[2])], "ppo", {"a": 0.5}, True)
    others = wire.put_varint(90, 7) + wire.put_text(91, "x") + bytes([92 * 8 & 0x7F | 0x81, 0x05]) + bytes(8)
    for body in (known, known + others, others + known):
        found = pass_request(body)
        assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("m", 3, "ppo", True)
        assert found.loss_fn_config == {"a": 0.5}
        [one] = found.data()
        assert one.token_ids.tolist() == [1] and one.inputs["target_tokens"].tolist() == [2]


def test_settings_of_the_newer_form_may_be_texts():
    newer = wire.put_bytes(7, wire.put_text(1, "kind") + wire.put_bytes(2, wire.put_text(2, "b")))
    assert pass_request(wire.put_text(1, "m") + newer).loss_fn_config == {"kind": "b"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x0a", "ends inside of a number"),
        (b"\x0a\x05ab", "has 5 bytes, and the message has 2 more"),
        (b"\x00\x01", "number 0"),
        (b"\x0b", "kind 3"),
        (b"\x08" + b"\xff" * 11, "more than 10 bytes"),
        (b"\x0a\x01\xff", "not UTF-8"),
        (b"\x08\x01", "is the number 1, not bytes"),
    ],
)
def test_broken_bytes_are_named(data, reason):
    with pytest.raises(wire.BadMessage, match=reason):
        pass_request(data)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_refused(data):
    try:
        found = pass_request(data)
        found.data()
    except ValueError:
        return
    assert isinstance(found.model_id, str)


@given(st.binary(min_size=1, max_size=60), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_a_message_with_other_bytes_inside_is_a_message_or_refused(noise, at):
    body = bytearray(pass_body("m", 1, [datum([1, 2], target_tokens=[2, 3], weights=[1, 2])], "ppo", {"a": 1.0}, False))
    body[at : at + len(noise)] = noise
    try:
        pass_request(bytes(body)).data()
    except ValueError:
        return


def test_other_threads_go_first_while_many_fields_are_parsed():
    waits = []
    with giving_way(lambda: waits.append(1), threading.Lock()):
        assert pass_request(wire.put_varint(9, 1) * 100_000).parts == []
        assert len(waits) > 5
        waits.clear()
        assert pass_request(wire.put_bytes(7, wire.put_varint(9, 1) * 100_000)).loss_fn_config == {"": 0.0}
        assert len(waits) > 5, "those inside of a field too"


def test_tensors_whose_parts_do_not_fit_are_refused():
    good = np.array([[1, 2], [3, 4]], "<i8")
    assert tensor(memoryview(tinker_client.tensor(good))).tolist() == good.tolist()
    for broken, reason in (
        (wire.put_bytes(1, bytes(8)), "dtype 0"),
        (wire.put_bytes(1, bytes(7)) + wire.put_varint(3, 1), "7 bytes are no array of float32"),
        (wire.put_bytes(1, bytes(8)) + wire.put_varint(3, 1) + wire.put_numbers(4, [3]), r"shape is \[3\]"),
        (wire.put_bytes(1, bytes(8)) + wire.put_varint(3, 1) + wire.put_numbers(4, [-2]), "is none"),
        (wire.put_varint(3, 2) + wire.put_numbers(4, [2**40, 2**40]), "0 numbers"),
    ):
        with pytest.raises(wire.BadMessage, match=reason):
            tensor(memoryview(broken))


def test_csr_tensors_whose_parts_do_not_fit_are_refused():
    values, rows, columns = np.array([5, 6]), np.array([0, 1, 2]), np.array([1, 0])
    assert dense_of(values, rows, columns, [2, 2], -1).tolist() == [[-1, 5], [6, -1]]
    for parts in (
        (values, np.array([0, 2]), columns, [2, 2]),
        (values, np.array([1, 1, 2]), columns, [2, 2]),
        (values, np.array([0, 3, 2]), columns, [2, 2]),
        (values, rows, np.array([2, 0]), [2, 2]),
        (values, rows, np.array([-1, 0]), [2, 2]),
        (values, rows, columns, None),
        (values, rows, columns, [2**20, 2**20]),
        (values, np.array([], np.int64), columns, [-1, 2]),
    ):
        with pytest.raises(wire.BadMessage):
            dense_of(*parts, 0)


def csr(shape, rows=(0, 0)):
    """Encode a Tensor of int64 in CSR form without an entry."""
    parts = wire.put_bytes(2, np.array(rows, "<i8").tobytes())
    return wire.put_bytes(2, parts) + wire.put_varint(3, 2) + wire.put_numbers(4, shape)


def with_input(tokens, tensor_bytes):
    """Encode a Datum whose target_tokens are these bytes; they stand before its tokens."""
    return wire.put_bytes(2, wire.put_text(1, "target_tokens") + wire.put_bytes(2, tensor_bytes)) + datum(tokens)


@pytest.mark.parametrize("num", [3, 5000])
def test_shapes_of_more_than_two_dimensions_are_refused_before_anything_is_computed_of_them(num):
    numbers = wire.put_bytes(1, bytes(8)) + wire.put_varint(3, 2)
    for shape in (wire.put_numbers(4, [2] * num), wire.put_varint(4, 2) * num):
        with pytest.raises(wire.BadMessage, match="at most 2 dimensions") as refused:
            tensor(memoryview(numbers + shape))
        assert len(str(refused.value)) < 200
    one = {"data": [1], "dtype": "int64", "shape": [2] * num}
    for form in (one, {**one, "sparse_crow_indices": [0], "sparse_col_indices": []}):
        body = DatumBody(model_input={"chunks": []}, loss_fn_inputs={"target_tokens": form})
        with pytest.raises(BadInput, match="at most 2 dimensions") as refused:
            data_of([body])
        assert len(str(refused.value)) < 200


def test_a_shape_of_long_numbers_is_shortened_where_it_is_refused():
    given = {"data": [1], "dtype": "int64", "shape": [10**4000, 1]}
    for one in (given, {**given, "sparse_crow_indices": [0], "sparse_col_indices": []}):
        with pytest.raises(BadInput) as refused:
            data_of([DatumBody(model_input={"chunks": []}, loss_fn_inputs={"target_tokens": one})])
        assert len(str(refused.value)) < 300


def test_a_csr_tensor_has_as_many_rows_as_its_datum_has_tokens():
    body = pass_body("m", 1, [with_input([1, 2], csr([1, 1 << 24]))], "ppo", {}, False)
    with pytest.raises(BadInput, match=r"data\[0\]: .*target_tokens: .*1 rows, and model_input 2 tokens"):
        pass_request(body).data()
    good = pass_body("m", 1, [with_input([1, 2], csr([2, 3], (0, 0, 0)))], "ppo", {}, False)
    assert pass_request(good).data()[0].inputs["target_tokens"].tolist() == [[0] * 3] * 2
    for columns, reason in ((1 << 24, "1 rows, and model_input 2 tokens"), (3, "")):
        num_rows = 1 if reason else 2
        given = {"data": [], "dtype": "int64", "shape": [num_rows, columns],
                 "sparse_crow_indices": [0] * (num_rows + 1), "sparse_col_indices": []}  # fmt: skip
        tokens = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        one = DatumBody(model_input=tokens, loss_fn_inputs={"target_tokens": given})
        if reason:
            with pytest.raises(BadInput, match=reason):
                data_of([one])
        else:
            assert data_of([one])[0].inputs["target_tokens"].shape == (2, 3)


def test_the_csr_tensors_of_a_request_have_a_limit_together(monkeypatch):
    monkeypatch.setattr(messages, "MAX_DENSE", 100)
    data = [with_input([1], csr([1, 50]))] * 2
    assert len(pass_request(pass_body("m", 1, data, "ppo", {}, False)).data()) == 2
    with pytest.raises(BadInput, match=r"data\[2\]: .*at most 100 elements"):
        pass_request(pass_body("m", 1, [*data, data[0]], "ppo", {}, False)).data()
    given = {"data": [], "dtype": "int64", "shape": [1, 50], "sparse_crow_indices": [0, 0], "sparse_col_indices": []}
    one = DatumBody(model_input={"chunks": [{"tokens": [1]}]}, loss_fn_inputs={"target_tokens": given})
    assert len(data_of([one] * 2)) == 2
    with pytest.raises(BadInput, match=r"data\[2\]: .*at most 100 elements"):
        data_of([one] * 3)


def test_places_of_csr_numbers_beyond_int64_are_refused_by_name():
    given = {"data": [1], "dtype": "int64", "shape": [1, 1], "sparse_crow_indices": [0, 2**70],
             "sparse_col_indices": [0]}  # fmt: skip
    with pytest.raises(BadInput, match="target_tokens has places beyond int64"):
        data_of([DatumBody(model_input={"chunks": [{"tokens": [1]}]}, loss_fn_inputs={"target_tokens": given})])
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {}, "target_prompt_logprobs": given}
    with pytest.raises(BadInput, match="target_prompt_logprobs has places beyond int64"):
        SampleRequest.of(SampleBody(**body), 64)


def test_a_broken_datum_is_named_by_its_place():
    request = pass_request(pass_body("m", 1, [datum([1], target_tokens=[2]), b"\x0a\x09"], "ppo", {}, False))
    with pytest.raises(BadInput, match=r"data\[1\]: field 1 has 9 bytes"):
        request.data()


def in_json(tokens, **inputs):
    """Return a datum as early SDKs send it, which leave the type of a chunk out."""
    kinds = {name: "int64" if name == "target_tokens" else "float32" for name in inputs}
    tensors = {name: {"data": list(own), "dtype": kinds[name], "shape": [len(own)]} for name, own in inputs.items()}
    return {"model_input": {"chunks": [{"tokens": list(tokens)}]}, "loss_fn_inputs": tensors}


def test_early_sdks_send_and_read_the_same_in_json(client):
    model, values = client.model(), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}
    [expected], metrics = model.run([datum([1, 2, 3], **values)], forward_only=True)
    norms = []
    for form in ("proto", "json"):
        trained = client.model(seed=5)
        if form == "proto":
            trained.run([datum([1, 2, 3], **values)])
        else:
            given = {"data": [in_json([1, 2, 3], **values)], "loss_fn": "cross_entropy"}
            answer = trained.call("forward_backward", forward_backward_input=given)
            assert answer["metrics"] == metrics and answer["loss_fn_output_type"] == "ArrayRecord"
            [output] = answer["loss_fn_outputs"]
            assert output["logprobs"]["shape"] == [3] and output["logprobs"]["dtype"] == "float32"
            assert np.array(output["logprobs"]["data"], np.float32).tolist() == expected["logprobs"].tolist()
        norms.append(trained.step()["grad_norm"])
    assert norms[0] == norms[1]
    again = model.call("forward", forward_input={"data": [in_json([1, 2, 3], **values)], "loss_fn": "cross_entropy"})
    assert again["metrics"] == metrics
    sampler, extra = client.sampler(), {"prompt_logprobs": True, "topk_prompt_logprobs": 1}
    sent = sampler.send([1, 2, 3], max_tokens=4, seed=1, stop=[], extra=extra).json()["request_id"]
    plain, encoded = (
        client.http.post("retrieve_future", json={"request_id": sent}, headers=headers)
        for headers in ({}, {"Accept": "application/x-protobuf, application/json"})
    )
    found, drawn = plain.json(), tinker_client.read_samples(encoded.content)
    assert found["sequences"][0]["tokens"] == drawn["sequences"][0]["tokens"]
    assert found["sequences"][0]["logprobs"] == drawn["sequences"][0]["logprobs"]
    assert found["sequences"][0]["stop_reason"] == "length"
    assert found["prompt_logprobs"][0] is None and found["prompt_logprobs"][1:] == drawn["prompt_logprobs"][1:]
    assert found["topk_prompt_logprobs"][0] is None and len(found["topk_prompt_logprobs"][1]) == 1


def test_long_messages_are_parsed_beside_the_event_loop(client, monkeypatch):
    model, threads = client.model(rank=1), []
    parse = models.pass_request
    monkeypatch.setattr(
        models, "pass_request", lambda data: (threads.append(threading.current_thread()), parse(data))[1]
    )
    for num in (1, 2000):
        model.run([datum([1], target_tokens=[1])] * num, forward_only=True)
    short, long = threads
    assert short.name == "lockstep-tinker-http" != long.name


def test_broken_data_in_json_are_named(client):
    model = client.model(rank=1)
    good = in_json([1, 2], target_tokens=[1, 2])
    wrong = {"data": [1, 2, 3], "dtype": "int64", "shape": [2]}
    for one, reason in (
        ({**good, "loss_fn_inputs": {"target_tokens": wrong}}, r"data\[1\]: target_tokens has 3 numbers"),
        (
            {**good, "loss_fn_inputs": {"target_tokens": {**wrong, "shape": [-1, -3]}}},
            r"data\[1\]: target_tokens has 3",
        ),
        (in_json([1], target_tokens=[1.5]), r"data\[1\]: target_tokens must be whole numbers"),
        (in_json([1], target_tokens=[2**70]), r"data\[1\]: target_tokens must be whole numbers"),
        ({**good, "model_input": {"chunks": [{"tokens": [2**70]}]}}, r"data\[1\]: "),
        ({**good, "model_input": {"chunks": [{"type": "image"}]}}, r"data\[1\]: model_input.chunks\[0\]: .*'image'"),
    ):
        with pytest.raises(tinker_client.Failed, match=reason):
            model.call("forward", forward_input={"data": [good, one], "loss_fn": "cross_entropy"})
