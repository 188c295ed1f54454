"""SGLang's image_data: with texts that have placeholders, and with token ids, expanded or not."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.media.reader import image_tensors, images_digest
from lockstep.tests.integration.http.images.folders import data_url, load_processor, picture, png
from lockstep.tests.integration.http.images.served import Served, trained_logprobs

ONE, TWO = picture(1), picture(2, 40, 40)
URLS = [data_url(png(ONE)), data_url(png(TWO))]


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return load_processor(folder)


@pytest.fixture(scope="module")
def text(processor: Any) -> str:
    return f"the {processor.image_token} and {processor.image_token} name"


@pytest.fixture(scope="module")
def prompt(processor: Any, text: str) -> Any:
    return processor(text=[text], images=[[ONE, TWO]], return_tensors="pt")


@pytest.fixture(scope="module")
def params(served: Served) -> dict[str, object]:
    return {"max_new_tokens": 6, "sampling_seed": 4, "ignore_eos": True, "logit_bias": served.no_media}


def drawn(answer: Any) -> list[tuple[float, int]]:
    return [(logprob, id) for logprob, id, _ in answer["meta_info"]["output_token_logprobs"]]


def test_a_text_and_its_images_have_the_logprobs_of_the_trainer(
    served: Served, text: str, prompt: Any, params: dict[str, object]
) -> None:
    given = {"sampling_params": params, "return_logprob": True, "return_prompt_token_ids": True}
    answer = served.ok("/generate", text=text, image_data=URLS, **given)
    ids = prompt["input_ids"][0].tolist()
    assert answer["prompt_token_ids"] == ids and answer["meta_info"]["prompt_tokens"] == len(ids)
    logprobs = [logprob for logprob, _ in drawn(answer)]
    assert logprobs == trained_logprobs(served.engine, prompt, answer["output_ids"])
    bare = [base64.b64encode(png(ONE)).decode(), URLS[1]]
    assert drawn(served.ok("/generate", text=text, image_data=bare, **given)) == drawn(answer)


def test_a_receipt_has_the_images_and_is_proven_with_them(
    served: Served, text: str, prompt: Any, params: dict[str, object]
) -> None:
    answer = served.ok("/generate", text=text, image_data=URLS, sampling_params=params, return_receipt=True)
    receipt = answer["meta_info"]["receipt"]
    assert receipt["images"] == images_digest(image_tensors(prompt))
    [verdict] = served.service.replay([receipt], prompts=[prompt]).verdicts
    assert verdict.status == "equal", verdict.what


def test_token_ids_have_their_placeholders_expanded_or_not(
    served: Served, processor: Any, text: str, prompt: Any, params: dict[str, object]
) -> None:
    given = {"image_data": URLS, "sampling_params": params, "return_logprob": True}
    expected = drawn(served.ok("/generate", text=text, **given))
    expanded, short = prompt["input_ids"][0].tolist(), processor.tokenizer(text)["input_ids"]
    assert len(short) < len(expanded)
    for ids in (expanded, short):
        assert drawn(served.ok("/generate", input_ids=ids, **given)) == expected
    # As trainers send the next turn: all that they have, the answer too.
    longer = [*expanded, *processor.tokenizer(" type")["input_ids"]]
    answer = served.ok("/generate", input_ids=longer, return_prompt_token_ids=True, **given)
    assert answer["prompt_token_ids"] == longer


def test_a_batch_has_images_for_each_prompt(
    served: Served, processor: Any, text: str, params: dict[str, object]
) -> None:
    one = f"the {processor.image_token}"
    given = {"sampling_params": params, "return_logprob": True}
    alone = [
        served.ok("/generate", text=one, image_data=URLS[0], **given),
        served.ok("/generate", text=one, image_data=[URLS[1]], **given),
        served.ok("/generate", text="name", **given),
        served.ok("/generate", text=text, image_data=URLS, **given),
    ]
    assert drawn(alone[0]) != drawn(alone[1])
    texts = [one, one, "name", text]
    both = served.ok("/generate", text=texts, image_data=[[URLS[0]], [URLS[1]], None, URLS], **given)
    assert list(map(drawn, both)) == list(map(drawn, alone))
    flat = served.ok("/generate", text=[one, one], image_data=URLS, **given)
    assert list(map(drawn, flat)) == list(map(drawn, alone[:2]))
    shared = served.ok("/generate", text=[one, one], image_data=URLS[0], **given)
    assert list(map(drawn, shared)) == [drawn(alone[0])] * 2


def test_placeholders_that_do_not_fit_are_refused(served: Served, processor: Any, text: str, prompt: Any) -> None:
    ids, token = prompt["input_ids"][0].tolist(), processor.image_token
    for given, field, message in (
        ({"text": "the", "image_data": URLS[0]}, "text", f"0 placeholders of images ({token}) for 1 images"),
        ({"text": text, "image_data": URLS[0]}, "text", "2 placeholders"),
        ({"input_ids": ids, "image_data": URLS[0]}, "input_ids", "tokens of images (id "),
        ({"input_ids": ids[:-8], "image_data": URLS}, "input_ids", "tokens of images (id "),
        ({"input_ids": ids}, None, "placeholders of image input"),
        ({"text": ["a", "b"], "image_data": URLS[:1]}, "image_data", "has 1 entries for 2 prompts"),
        ({"text": text, "image_data": [URLS]}, "image_data.0", "must be a text, not list"),
        ({"text": text, "image_data": [{"url": URLS[0]}, URLS[1]]}, "image_data.0", "must be a text, not dict"),
        ({"text": text, "video_data": URLS}, "video_data", "is not supported"),
    ):
        param, said = served.refused("/generate", **given)
        assert message in said and (field is None or param == field), (param, said)
