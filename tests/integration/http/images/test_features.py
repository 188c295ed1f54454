"""Images on vLLM's token-in, token-out wire: tensors of the client's processor, and images as they are."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from lockstep.rollout.media.reader import image_token
from lockstep.tests.integration.http.images.folders import data_url, load_processor, picture, png
from lockstep.tests.integration.http.images.served import Served, trained_logprobs

ONE, TWO = picture(1), picture(2, 40, 40)
PATH = "/inference/v1/generate"
Entry = dict[str, Any]


def packed(value: object, kind: str = "batched", **settings: object) -> Entry:
    """Encode an entry of a tensor, or of what is none, as vLLM does."""
    return {"data": as_wire(value), "field": [kind, {"keep_on_cpu": False, **settings}]}


def as_wire(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), msgpack.ExtType(3, data)]


def item(**entries: Entry) -> str:
    return base64.b64encode(msgpack.packb(entries)).decode()


def items_of(inputs: Any) -> list[str]:
    """Encode the images of a processor's output, as vLLM's classes of the family have their fields."""
    pixels, grid = inputs["pixel_values"], inputs.get("image_grid_thw")
    if grid is None:
        return [item(pixel_values=packed(one)) for one in pixels]
    parts = pixels.split(grid.prod(-1).tolist())
    return [
        item(pixel_values=packed(part, "flat", slices=[[0, len(part), None]], dim=0), image_grid_thw=packed(size))
        for part, size in zip(parts, grid, strict=True)
    ]


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return load_processor(folder)


@pytest.fixture(scope="module")
def prompt(processor: Any) -> Any:
    token = processor.boi_token if hasattr(processor, "boi_token") else processor.image_token
    return processor(text=[f"the {token} and {token} name"], images=[[ONE, TWO]], return_tensors="pt")


@pytest.fixture(scope="module")
def places(served: Served, prompt: Any) -> list[Entry]:
    """The runs of the token of images, joined where the processor writes rows: one for each of the two images."""
    images = served.engine.requests.read_images(prompt).images
    begins = [images.tokens[0], images.tokens[images.ends[0]]]
    ends = [images.tokens[images.ends[0] - 1] + 1, images.tokens[-1] + 1]
    return [{"offset": begin, "length": end - begin} for begin, end in zip(begins, ends, strict=True)]


@pytest.fixture(scope="module")
def body(served: Served, prompt: Any, places: list[Entry]) -> Entry:
    features = {
        "mm_hashes": {"image": ["one", "two"]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": items_of(prompt)},
    }
    params = {"max_tokens": 6, "seed": 4, "logprobs": 1, "ignore_eos": True, "logit_bias": served.no_media}
    return {"token_ids": prompt["input_ids"][0].tolist(), "features": features, "sampling_params": params}


def drawn(answer: Any) -> list[tuple[int, float]]:
    content = answer["choices"][0]["logprobs"]["content"]
    return [(one["token_id"], one["logprob"]) for one in content]


def test_tensors_of_the_clients_processor_have_the_logprobs_of_the_trainer(
    served: Served, prompt: Any, body: Entry, places: list[Entry]
) -> None:
    answer = served.ok(PATH, **body, return_token_ids=True)
    ids, logprobs = map(list, zip(*drawn(answer), strict=True))
    assert logprobs == trained_logprobs(served.engine, prompt, ids)
    assert answer["prompt_token_ids"] == body["token_ids"]
    assert answer["mm_placeholders"] == {"image": places}
    data = body["features"]["kwargs_data"]["image"][::-1]
    turned = {**body["features"], "mm_placeholders": {"image": places[::-1]}, "kwargs_data": {"image": data}}
    assert drawn(served.ok(PATH, **{**body, "features": turned})) == drawn(answer)  # in any order


def test_streams_have_the_same_tokens_and_say_where_the_images_are(
    served: Served, body: Entry, places: list[Entry]
) -> None:
    expected = drawn(served.ok(PATH, **body))
    found, heads = [], []
    with served.client.stream("POST", PATH, json={**body, "stream": True, "return_token_ids": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                found += drawn(event) if event["choices"] else []
                heads.append(event.get("mm_placeholders"))
    assert found == expected
    assert heads[0] == {"image": places} and not any(heads[1:])


def test_images_as_they_are_expand_their_placeholders(served: Served, processor: Any, prompt: Any, body: Entry) -> None:
    short = shortened(processor)
    parts = [{"type": "image_url", "url": data_url(png(one))} for one in (ONE, TWO)]
    given = {**body, "token_ids": short, "content_parts": parts, "return_token_ids": True}
    given.pop("features")
    answer = served.ok(PATH, **given)
    assert len(short) < len(body["token_ids"]) and answer["prompt_token_ids"] == body["token_ids"]
    assert drawn(answer) == drawn(served.ok(PATH, **body))
    for place in answer["mm_placeholders"]["image"]:
        inside = body["token_ids"][place["offset"] : place["offset"] + place["length"]]
        assert inside.count(image_token(served.engine.model.module)) > 1
    # Without max_tokens the answer may take what the context leaves behind the prompt with its images.
    del given["sampling_params"]
    whole = served.ok(PATH, **given, sampling_params={"seed": 1, "ignore_eos": True, "logit_bias": served.no_media})
    room = served.engine.max_model_len - len(body["token_ids"])
    assert whole["usage"]["completion_tokens"] == room


def shortened(processor: Any) -> list[int]:
    """Return the token ids of the fixture's text, with one placeholder for each image."""
    texts = ("the ", " and ", " name")
    one, two, three = (processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    placeholder = processor.image_token_id
    return [*one, placeholder, *two, placeholder, *three]


def spoil(body: Entry, **changes: object) -> Entry:
    return {**body, "features": {**body["features"], **changes}}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (lambda b, p: {"kwargs_data": None}, "kwargs_data.image.0: is null"),
        (lambda b, p: {"kwargs_data": {"image": [b[0], None]}}, "kwargs_data.image.1: is null"),
        (lambda b, p: {"kwargs_data": {"image": b[:1]}}, "has 1 entries for 2 hashes"),
        (lambda b, p: {"mm_placeholders": {"image": p[:1]}}, "has 1 entries for 2 hashes"),
        (lambda b, p: {"mm_placeholders": {"image": [p[0], p[0]]}}, "which others do not take"),
        (lambda b, p: {"mm_placeholders": {"image": [p[0], {"offset": 10**6, "length": 1}]}}, "tokens of the prompt"),
        (lambda b, p: {"mm_placeholders": {"image": [p[0] | {"length": 1}, p[1]]}}, "image 0 has"),
        (lambda b, p: {"mm_placeholders": {"image": [{"offset": -1, "length": 1}, p[1]]}}, "offset"),
        (lambda b, p: {"mm_hashes": {"image": ["1", "2"], "audio": ["3"]}}, "mm_hashes.audio"),
        (lambda b, p: {"kwargs_data": {"image": [b[0], "?"]}}, "is not base64 of msgpack"),
        (lambda b, p: {"kwargs_data": {"image": [b[0], ""]}}, "has no data"),
        (lambda b, p: {"kwargs_data": {"image": [b[0], b[1][:40]]}}, "is not base64 of msgpack"),
        (lambda b, p: {"kwargs_data": {"image": [b[0], item(other=packed(torch.zeros(3)))]}}, "different tensors"),
        (lambda b, p: {"kwargs_data": {"image": [base64.b64encode(b"\x91\x01").decode()] * 2}}, "must be a map"),
    ],
)  # fmt: skip
def test_wrong_features_are_named(
    served: Served, body: Entry, places: list[Entry], what: Callable[..., Entry], named: str
) -> None:
    _, message = served.refused(PATH, **spoil(body, **what(body["features"]["kwargs_data"]["image"], places)))
    assert named in message


def raw(dtype: str, shape: list[int], code: int = 3, data: bytes = b"1234") -> Entry:
    return {"data": [dtype, shape, msgpack.ExtType(code, data)], "field": ["batched", {}]}


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (packed(torch.zeros(2), "shared", batch_size=1), "a field of the kind batched or flat"),
        (packed(torch.zeros(2), "flat", dim=1), "only 0 is supported"),
        (raw("float32", [2], 1), "pickles are not read"),
        (raw("float32", [3]), "has 4 bytes for float32"),
        (raw("float32", [-1]), "has the shape"),
        (raw("float32", [2**62, 4]), "has 4 bytes"),
        (raw("float8", [4]), "has the dtype 'float8'"),
        (packed([1, [2]]), "several shapes"),
        (packed("text"), "must be a tensor"),
        (packed(2**63 + 1), "more than 64 bits"),
        ({"field": ["batched", {}]}, "must have data"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(served: Served, body: Entry, entry: Entry, named: str) -> None:
    data = base64.b64encode(msgpack.packb({"pixel_values": entry})).decode()
    _, message = served.refused(PATH, **spoil(body, kwargs_data={"image": [data, data]}))
    assert message.startswith("features.kwargs_data.image.0") and named in message


def test_nested_lists_end_and_unknown_names_are_told(served: Served, body: Entry) -> None:
    deep: object = 1
    for _ in range(200):
        deep = [deep]
    data = item(pixel_values=packed(deep))
    assert "must be a tensor" in served.refused(PATH, **spoil(body, kwargs_data={"image": [data] * 2}))[1]
    data = item(video_values=packed(torch.zeros(2)))
    assert "video_values" in served.refused(PATH, **spoil(body, kwargs_data={"image": [data] * 2}))[1]


def test_parts_and_features_do_not_go_together_and_wrong_parts_are_named(served: Served, body: Entry) -> None:
    parts: list[object] = [{"type": "image_url", "url": data_url(png(ONE))}]
    assert "does not go with features" in served.refused(PATH, **body, content_parts=parts)[1]
    given = {**body, "features": None}
    for part, named in (
        ("text", "content_parts.0: must be an object"),
        ({"type": "video_url", "url": "x"}, 'content_parts.0.type: must be "image_url"'),
        ({"type": "image_url"}, "content_parts.0.url: must be a text"),
        ({"type": "image_url", "url": "https://example.com/a.png"}, "addresses are not fetched"),
    ):
        assert named in served.refused(PATH, **given, content_parts=[part])[1]
