"""A tokenizer of texts."""

from __future__ import annotations

from lockstep.tests.rollout.engine.conftest import tokenizer

__all__ = ["tokenizer"]
