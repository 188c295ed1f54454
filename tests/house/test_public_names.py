"""The public names of `lockstep`."""

import subprocess
import sys
from typing import get_type_hints

import pytest

import lockstep


def test_importing_the_package_imports_nothing_heavy_and_its_names_import_themselves():
    script = (
        "import sys, lockstep\n"
        "assert set(lockstep.__all__) <= set(dir(lockstep))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'import lockstep is heavy'\n"
        "from lockstep import EngineConfig, SamplingParams\n"
        "assert SamplingParams.__module__ == 'lockstep.rollout.sampling_params'\n"
        "assert 'lockstep.rollout.engine' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_public_name_exists(name):
    assert getattr(lockstep, name).__name__ == name
    exec(f"from lockstep import {name} as found", namespace := {})
    assert namespace["found"] is getattr(lockstep, name)


@pytest.mark.parametrize("call", ["generate", "agenerate", "stream", "astream", "add"])
def test_the_options_that_a_public_call_takes_are_a_public_name(call):
    hints = str(get_type_hints(getattr(lockstep.Engine, call))["options"])
    assert f"{lockstep.RequestOptions.__module__}.RequestOptions" in hints


@pytest.mark.parametrize("kind", [lockstep.Engine, lockstep.RolloutService])
def test_the_settings_that_a_public_class_takes_are_a_public_name(kind):
    settings = [found for name in lockstep.__all__ if (found := getattr(lockstep, name)).__name__.endswith("Config")]
    hint = str(get_type_hints(kind.__init__)["config"])
    assert any(f"{found.__module__}.{found.__name__}" in hint for found in settings)


def test_the_version_is_the_packages():
    from lockstep.integration.version import version

    assert lockstep.__version__ == version()


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'Enigne'"):
        _ = lockstep.Enigne
