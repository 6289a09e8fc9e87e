"""Study 027: its search, and the two GPUs in each way."""

from __future__ import annotations

import importlib

import pytest

from experiments import reproduce
from experiments.core import config

split = importlib.import_module("experiments.studies.027_split_requests.study")


def test_each_way_has_two_gpus():
    for options in split.engines().values():
        (point,) = config.load(reproduce.STUDIES / "027_split_requests/config.yaml", options)
        experiment = point.experiment
        fleet = experiment.pools or experiment.replicas
        assert fleet is not None
        assert fleet.count == 2
    assert experiment.pools is not None
    assert experiment.pools.split == split.SHARES[-1]


@pytest.mark.parametrize(("capacity", "rate_below"), [(1.3, 1.25), (0.1, 0.0), (9.0, 1.75)])
def test_the_search_ends_below_the_capacity(monkeypatch, capacity, rate_below):
    """Three halves of 2 requests/s."""

    def runs(file, arrivals, *options):
        rate = float(arrivals.split("=")[1])
        return [
            (None, [{"itl_s": {"p99": 0.05}, "ttft_s": {"p99": 9.0 if rate > capacity else 1}}])
        ]

    monkeypatch.setattr(split, "simulated", runs)
    assert split.highest(reproduce.STUDIES, 2.0, 3) == rate_below
