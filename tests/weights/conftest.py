"""A folder that tests of formats convert."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.weights.tiny import tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("source") / "hf", tied=False, qkv_bias=True, o_bias=True
    )
