"""Engines whose weights change while sequences run. They have one thread."""

from __future__ import annotations

from lockstep.tests.rollout.speculation.conftest import _one_thread, make_engine, small

__all__ = ["_one_thread", "make_engine", "small"]
