"""Images that are none, too many or too large, and texts that pretend to have some: refused by name."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.image_utils import load_image

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.images.pictures import pixels_of, sent_picture
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.images.folders import data_url, picture, png
from lockstep.tests.integration.http.images.served import CHAT, Served, image_part, text_part
from lockstep.tests.support.callers import soon, submit
from lockstep.tests.support.random_models import random_model

GOOD = png(picture(1))
CHATS = "/v1/chat/completions"


def animation(kind: str) -> bytes:
    out = io.BytesIO()
    picture(1).save(out, format=kind, save_all=True, append_images=[picture(2)])
    return out.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG whose head says this size, with hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


BAD_URLS = {
    "http://127.0.0.1:1/a.png": "http: addresses are not fetched",
    "https://example.org/a.png": "https: addresses are not fetched",
    "file:///etc/passwd": "file: addresses are not fetched",
    "FILE:/etc/passwd": "file: addresses are not fetched",
    "ftp://a/b": "ftp: addresses are not fetched",
    "/etc/passwd": "must be data:image/...;base64,...",
    base64.b64encode(GOOD).decode(): "must be data:image/...;base64,...",
    "data:image/png,abc": "must be data:image/...;base64,...",
    "data:text/plain;base64,abcd": "must be data:image/...;base64,...",
    "data:image/png;base64,": "has no data",
    "data:image/png;base64,!!!!": "is not base64",
    "data:image/png;base64,äöü": "is not base64",
    "data:image/png;base64,abc": "is not base64",
    data_url(b"not an image"): "is no image of a known format (PNG, JPEG, WEBP, GIF, BMP)",
    data_url(GOOD[:40]): "is no image of a known format|cannot be decoded",
    data_url(GOOD[: len(GOOD) // 2]): "cannot be decoded",
    data_url(GOOD[:60] + bytes(200) + GOOD[260:]): "cannot be decoded",
    data_url(png(picture(1), format="TIFF"), "tiff"): "is no image of a known format",
    data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "eps"): "is no image of a known format",
    data_url(animation("GIF"), "gif"): "is an animation: send one image",
    data_url(animation("WEBP"), "webp"): "is an animation: send one image",
    data_url(animation("PNG"), "png"): "is an animation: send one image",
    data_url(png_of_size(60_000, 60_000)): "max_image_pixels",
    data_url(png_of_size(12_000, 12_000)): "max_image_pixels",
    data_url(png_of_size(8_000, 8_000)): "8000 x 8000 pixels: the images of a request may have 33554432",
    data_url(png_of_size(0, 9)): "is no image of a known format|cannot be decoded",
}


def ask(served: Served, *content: object, **fields: object) -> tuple[str, str]:
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": list(content)}]
    return served.refused(CHATS, **{"messages": messages, **CHAT, **fields})


@pytest.mark.parametrize("url", BAD_URLS, ids=range(len(BAD_URLS)))
def test_what_is_no_image_is_refused_by_its_place(served: Served, url: str) -> None:
    param, message = ask(served, text_part("the"), image_part(data_url(GOOD)), image_part(url))
    assert param == "messages.1.content.2.image_url.url"
    assert any(said in message for said in BAD_URLS[url].split("|")), message
    assert len(message) < 300 and "_io." not in message and " at 0x" not in message
    if not url.startswith("data:image/") and "://" not in url:
        return
    param, message = served.refused("/generate", text="the", image_data=[data_url(GOOD), url])
    assert param in ("image_data.1", "text")


@pytest.mark.parametrize("size", [(1, 1), (1, 60), (60, 1), (3, 2)], ids=str)
def test_tiny_images_are_answered_or_refused_by_the_processor(served: Served, size: tuple[int, int]) -> None:
    messages = [{"role": "user", "content": [image_part(data_url(png(picture(1, *size))))]}]
    answer = served.client.post(CHATS, json={"messages": messages, "max_tokens": 2})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert "Processor refuses the images" in answer.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_images_of_every_mode_become_rgb(served: Served, mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = picture(1).convert("L").convert("I").convert(mode) if mode == "I;16" else picture(1).convert(mode)
    assert served.chat(image_part(data_url(png(image, format=kind), kind.lower())))["choices"]


@pytest.mark.parametrize("mode", ["upright", "1", "L", "LA", "P", "RGBA", "CMYK"])
def test_pixels_are_those_that_transformers_loads(mode: str) -> None:
    image, options = picture(4, 33, 21), dict[str, Any]()
    if mode == "upright":
        options["exif"] = image.getexif()
        options["exif"][0x0112] = 6  # a camera that was turned by a quarter
    else:
        image = image.convert(mode)
    url = data_url(png(image, format="JPEG" if mode in ("upright", "CMYK") else "PNG", **options))
    [found] = pixels_of([sent_picture(url, "url", HttpConfig())], HttpConfig())
    expected = load_image(url)
    assert (found.mode, found.size, found.tobytes()) == ("RGB", expected.size, expected.tobytes())


def test_a_jpeg_of_parts_without_end_is_refused_before_it_is_decoded() -> None:
    config, photo = HttpConfig(), png(picture(1), format="JPEG", progressive=True)
    scan = photo[photo.rindex(b"\xff\xda") : -2]
    named = photo[:2] + b"\xff\xe1" + struct.pack(">H", 9) + b"Exif\0\0a"
    for many, message in (
        (photo[:-2] + 200 * scan + photo[-2:], "is a JPEG of 210 scans, more than 100"),
        (photo[:2] + 2000 * named[2:] + photo[2:], "is a JPEG of 2000 segments of metadata, more than 1000"),
    ):
        with pytest.raises(BadField, match=message):
            pixels_of([sent_picture(data_url(many, "jpeg"), "url", config)], config)
    [image] = pixels_of([sent_picture(data_url(photo, "jpeg"), "url", config)], config)
    assert image.size == (70, 50)


def test_a_photo_with_a_small_copy_behind_it_is_the_photo() -> None:
    config, out = HttpConfig(), io.BytesIO()
    picture(1).save(out, format="MPO", save_all=True, append_images=[picture(1).resize((7, 5))])
    [image] = pixels_of([sent_picture(data_url(out.getvalue(), "jpeg"), "url", config)], config)
    [alone] = pixels_of([sent_picture(data_url(png(picture(1), format="JPEG"), "jpeg"), "url", config)], config)
    assert image.size == (70, 50) and image.tobytes() == alone.tobytes()


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "JPEG"])
def test_images_of_every_format_are_answered(served: Served, kind: str) -> None:
    data = png(picture(1), format=kind)
    assert served.chat(image_part(data_url(data, kind.lower())))["choices"]
    assert served.chat(image_part("data:image/png;base64," + base64.encodebytes(data).decode()))["choices"]


def test_damaged_files_are_refused_and_never_an_error_of_ours() -> None:
    dice, config, seen = random.Random(5), HttpConfig(), set()
    files = [png(picture(3, 33, 21), format=kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    for _ in range(400):
        data = bytearray(dice.choice(files))
        for _ in range(dice.choice((1, 4, 16))):
            data[dice.randrange(min(len(data), dice.choice((40, 100, 10_000))))] = dice.randrange(256)
        try:
            [image] = pixels_of([sent_picture(data_url(bytes(data)), "url", config)], config)
            seen.add(image.mode)
        except BadField as error:
            seen.add(error.param)
    assert seen == {"RGB", "url"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "must be a text, not NoneType"),
        ({"type": "image_url", "image_url": 5}, "must be a text, not int"),
        ({"type": "image_url", "image_url": {"url": ["a"]}}, "must be a text, not list"),
        ({"type": "input_audio", "input_audio": {}}, "content of the type input_audio"),
        ({"type": "video_url", "video_url": {"url": "a"}}, "only the type text or image_url is supported"),
        ({"type": "image", "image": "a"}, "content of the type image"),
        ({"type": "image_url", "image_url": {"url": data_url(GOOD), "max_dynamic_patch": 2}}, "max_dynamic_patch: is"),
    ],
)
def test_other_parts_are_refused(served: Served, part: dict[str, object], message: str) -> None:
    assert message in ask(served, part)[1]


def test_placeholders_that_a_text_spells_are_refused(served: Served) -> None:
    placeholder = served.server.app.state.hub.limits.images.processor("messages").placeholder
    spelled = text_part(f"look: {placeholder}")
    param, message = ask(served, spelled, image_part(data_url(GOOD)))
    assert param == "messages.1.content" and f"spells {placeholder}" in message
    if served.model_type != "gemma3":  # whose placeholder is no token of an image, but opens them
        param, message = ask(served, spelled)
        assert "placeholders of image input, which is not supported" in message


def test_fields_that_do_not_go_with_images_are_refused(served: Served) -> None:
    image = image_part(data_url(GOOD))
    assert ask(served, image, truncate_prompt_tokens=5)[0] == "truncate_prompt_tokens"
    assert ask(served, image, continue_final_message=True)[0] == "continue_final_message"
    assert ask(served, image, chat_template_kwargs={"chat_template": "x"})[0] == "chat_template_kwargs"
    assert "exceeds the maximum allowed length" in ask(served, image, text_part("type " * 600))[1]
    for name, value in (("images_config", {"a": 1}), ("max_dynamic_patch", 2), ("image_max_dynamic_patch", 2)):
        assert served.refused("/generate", text="1", image_data=data_url(GOOD), **{name: value})[0] == name


def test_images_beyond_the_limits_are_refused(served: Served) -> None:
    limits = HttpConfig(port=0, max_images=2, max_image_bytes=len(GOOD), max_image_pixels=2 * 70 * 50)
    with serve_in_background(served.service, limits) as server, Served(server) as limited:
        good, larger = image_part(data_url(GOOD)), image_part(data_url(png(picture(1, 80, 50))))
        assert limited.chat(good, good)["choices"]
        assert "3 images are more than the 2 of a request (max_images)" in ask(limited, good, good, good)[1]
        assert "(max_image_bytes)" in ask(limited, larger)[1]
        small = image_part(data_url(png(picture(1, 120, 60), format="JPEG")))
        assert "(max_image_pixels)" in ask(limited, small)[1]
        param, message = limited.refused("/generate", text=["a"] * 3, image_data=data_url(GOOD))
        assert param == "image_data" and "3 images are more than the 2" in message
        wide = data_url(png(picture(1, 80, 50), format="JPEG"))  # its prompt has fewer pixels, but not the batch
        param, message = limited.refused("/generate", text=["a", "a"], image_data=[wide, wide])
        assert param == "image_data.1" and "together (max_image_pixels)" in message


def test_the_bytes_of_open_images_are_limited_and_given_back(served: Served, until: Callable[..., None]) -> None:
    image = image_part(data_url(GOOD))
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 4}
    config = HttpConfig(port=0, max_open_image_bytes=len(GOOD))
    with serve_in_background(served.service, config) as server, Served(server) as limited:
        served.engine.pause_generation("in_place")
        first = submit(limited.client.post, CHATS, json=body)
        until(lambda: "hub" in server.app.state._state and server.app.state.hub.image_bytes.num > 2 * len(GOOD))
        refused = limited.client.post(CHATS, json=body)
        assert refused.status_code == 503 and "max_open_image_bytes" in refused.json()["error"]["message"]
        served.engine.continue_generation()
        assert soon(first).status_code == 200
        until(lambda: server.app.state.hub.image_bytes.num == 0)
        assert limited.chat(image)["choices"]
        until(lambda: server.app.state.hub.image_bytes.num == 0)


@pytest.fixture
def of_texts(tmp_path: Path) -> Iterator[Served]:
    """Serve a model of texts."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = random_model("qwen3", vocab_size=128, max_position_embeddings=256)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=64), tokenizer=tokenizer))
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server, Served(server) as served:
        yield served
    service.close()


def test_a_model_of_texts_refuses_images_by_name(of_texts: Served) -> None:
    param, message = ask(of_texts, image_part(data_url(GOOD)))
    assert param == "messages.1.content.0.image_url.url"
    assert "images are not supported: Qwen3ForCausalLM takes no images" in message
    param, message = of_texts.refused("/generate", text="1", image_data=data_url(GOOD))
    assert param == "image_data" and "takes no images" in message
    param, message = of_texts.refused("/v1/completions", prompt="1", image_data=data_url(GOOD))
    assert param == "image_data" and "is not supported" in message
    param, message = of_texts.refused("/tokenize", messages=[{"role": "user", "content": [image_part(data_url(GOOD))]}])
    assert param == "messages.0.content.0.image_url.url"
    assert of_texts.ok("/model_info")["has_image_understanding"] is False


def test_a_folder_without_a_processor_refuses_images_by_name(folder: Path, served: Served, tmp_path: Path) -> None:
    other = tmp_path / "bare"
    other.mkdir()
    for path in folder.iterdir():
        if path.name not in ("processor_config.json", "preprocessor_config.json"):
            (other / path.name).symlink_to(path)
    config = HttpConfig(port=0, processor_path=str(other))
    with serve_in_background(served.service, config) as server, Served(server) as bare:
        for _ in range(2):
            param, message = ask(bare, image_part(data_url(GOOD)))
            assert param == "messages.1.content.0.image_url.url"
            assert "images are not supported: bare has no processor of images" in message
            assert str(tmp_path) not in message


def test_a_server_without_pillow_refuses_images_by_name(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    missing: Any = lambda name, *more: None if name == "PIL" else found(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with serve_in_background(served.service, HttpConfig(port=0)) as server, Served(server) as bare:
        assert "the server has no Pillow" in ask(bare, image_part(data_url(GOOD)))[1]
