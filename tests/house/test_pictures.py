"""Check that the documentation's pictures are the output of the scripts beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS, IMAGES = ROOT / "docs" / "pictures", ROOT / "docs" / "images"
MAX_BYTES = 60_000


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    subprocess.run([sys.executable, SCRIPTS / "draw.py", folder], cwd=folder, check=True, timeout=60)
    return folder


def test_drawing_again_gives_the_committed_bytes(drawn):
    names = {path.name for path in drawn.iterdir()}
    assert names == {path.name for path in IMAGES.iterdir()}
    differing = [name for name in sorted(names) if (drawn / name).read_bytes() != (IMAGES / name).read_bytes()]
    assert differing == [], "what they show has changed: run `make pictures` and look at them"


def test_pictures_are_small_and_stand_alone(drawn):
    for path in drawn.iterdir():
        text = path.read_text(encoding="utf-8")
        assert len(text.encode()) < MAX_BYTES, path.name
        assert text.count("://") == 1 and "href" not in text, path.name  # the one is the name of SVG's namespace
        title = ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text, path.name
