"""What a run says of the machine it ran on."""

from __future__ import annotations

import sys

import pytest

from experiments.environment import processor_time, stolen_share


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a virtual machine what its host takes")
def test_the_share_that_the_host_took_is_of_what_was_asked_for():
    now = processor_time()
    assert now is not None
    used, stolen = now
    assert used > 0
    since = used - 900_000, stolen - 100_000  # jiffies: so many that what happens meanwhile is no part of it
    assert stolen_share(since) == pytest.approx(0.1, abs=0.001)


def test_where_nothing_is_told_nothing_is_claimed():
    assert stolen_share(None) is None
