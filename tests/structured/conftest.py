"""The compiler of grammars for the tokenizer that tests share: every byte, some runs of letters,
320 tokens.
"""

from __future__ import annotations

import pytest

from pagedjax.text.structured.grammars import Grammars


@pytest.fixture(scope="session")
def grammars(tiny):
    return Grammars(tiny.tokenizer, tiny.model.config.vocab_size, tiny.eos_token_ids)
