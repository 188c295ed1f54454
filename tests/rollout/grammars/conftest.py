"""The small vocabulary that grammars are compiled for, and its compiler."""

from __future__ import annotations

import pytest

from lockstep.rollout.grammars.compiler import GrammarCompiler
from lockstep.rollout.grammars.library import load_library
from lockstep.rollout.grammars.token_text import TokenText

EOS = 0
VOCAB = 1024


@pytest.fixture(scope="module")
def text(bpe_tokenizer):
    return TokenText(bpe_tokenizer, VOCAB)


@pytest.fixture(scope="module")
def compiler(text):
    return GrammarCompiler(load_library(), text, [EOS])
