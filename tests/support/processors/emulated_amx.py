"""Kernels with emulated AMX (emulated_amx.h), where nothing forbids it: for processors without.

As a pytest plugin (`-p lockstep.tests.support.processors.emulated_amx`) it has all kernels of the process built so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.kernels.machine import native

FLAGS = ("-include", str(Path(__file__).with_suffix(".h")))
_own_flags = native.compile_flags


def compile_flags(environ: Mapping[str, str]) -> list[str]:
    """Return the flags of native.compile_flags, and those of the emulation if AMX is not forbidden."""
    permits_amx = (environ.get("LOCKSTEP_MAX_ISA") or "amx") == "amx"
    return [*_own_flags(environ), *(FLAGS if permits_amx else ())]


def pytest_configure() -> None:
    native.compile_flags = compile_flags
