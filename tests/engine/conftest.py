"""Fixtures of tests of engines."""

from __future__ import annotations

import pytest

from pagedjax.device import attention
from tests.device.test_step_tpu import interpreted


@pytest.fixture
def on_a_tpu(monkeypatch):
    """An engine on a CPU accepts the TPU kernels and interprets them."""
    monkeypatch.setitem(attention.IMPLS, "pallas_tpu", interpreted(attention.IMPLS["pallas_tpu"]))
