"""What all tests of images need."""

from __future__ import annotations

import pytest

from lockstep.tests.optional_packages import needs_transformers


@pytest.fixture(autouse=True)
def _modules_that_take_features_of_images() -> None:
    needs_transformers(5, 23)
