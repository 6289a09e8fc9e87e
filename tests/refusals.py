"""Errors of what is refused."""

from __future__ import annotations

import pytest


def refused(message: str) -> pytest.RaisesExc[ValueError]:
    """The block raises a ValueError with a text that matches `message`, a regular expression."""
    return pytest.raises(ValueError, match=message)
