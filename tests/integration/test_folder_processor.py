"""Tests of the loading of a folder's processor."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL.Image")

from PIL import Image

from lockstep.integration.folder_processor import load_processor
from lockstep.integration.grpo.tasks.picture_reader import PictureReader
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.images import models


@pytest.fixture(autouse=True)
def _processors_that_run_on_pillow() -> None:
    needs_transformers(5, 23)


def test_a_folder_is_loaded_without_its_part_for_videos(tmp_path: Path) -> None:
    _, processor = models.qwen2_5_vl()
    processor.save_pretrained(tmp_path)
    loaded = load_processor(tmp_path)
    assert type(loaded).__name__ == "Qwen2_5_VLProcessor" and not hasattr(loaded, "video_processor")
    prompt = PictureReader(str(tmp_path))("<|image_pad|> what", [Image.new("RGB", (16, 16))])
    assert set(prompt) >= {"input_ids", "pixel_values", "image_grid_thw"}


def test_a_folder_without_a_processor_is_refused_by_name(tmp_path: Path) -> None:
    model, _ = models.qwen2_5_vl()
    model.config.get_text_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no processor for prompts with pictures: no file names"):
        PictureReader(str(tmp_path))("<|image_pad|>", [Image.new("RGB", (16, 16))])
