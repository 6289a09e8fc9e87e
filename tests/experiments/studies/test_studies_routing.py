"""Study 021: its config, ratios and tables, against counts by hand."""

from __future__ import annotations

import importlib

import pytest

from experiments import reproduce
from experiments.core import config
from experiments.simulation.cost import CHIPS, SHAPES

routing = importlib.import_module("experiments.studies.021_prefix_routing.study")
FAST = routing.Run(rate=300.0, first=0.5, token=0.04, hits=0.9, used=0.6, waiting=0.0, uneven=1.2)
SLOW = routing.Run(rate=100.0, first=5.0, token=0.08, hits=0.1, used=0.9, waiting=80.0, uneven=1.0)
RUNS = {routing.PLAIN: SLOW, routing.LOADED: SLOW._replace(rate=150.0), routing.AWARE: FAST}


@pytest.fixture
def points() -> list[config.Point]:
    return config.load(reproduce.STUDIES / "021_prefix_routing/config.yaml")


def test_config_is_the_source_s_load(points):
    """9,000 requests with 256 tokens of output each in 840.2 s are 2,742 tokens/s, and in 358.7 s
    6,423.
    """
    assert [point.swept["replicas.router"] for point in points] == list(routing.ROUTERS)
    for point in points:
        experiment = point.experiment
        load = point.experiment.workload
        assert experiment.replicas is not None
        assert (experiment.replicas.count, experiment.cache_tokens) == (
            routing.REPLICAS,
            routing.CACHE,
        )
        assert (load.shared_prefix, load.prefixes, load.arrivals.clients) == (
            routing.PREFIX,
            routing.SOURCE_PREFIXES,
            routing.SOURCE_CLIENTS,
        )
        assert load.count * load.output.value / 840.2 == pytest.approx(2742, rel=1e-3)
        assert load.count * load.output.value / 358.7 == pytest.approx(6423, rel=1e-3)


def test_caches_are_shares_of_the_memory_less_the_weights():
    shape = SHAPES["qwen2.5-7b"]
    memory = CHIPS["a10g"].memory
    shares = [(shape.total_bytes + cache * shape.token_bytes) / memory for cache in routing.CACHES]
    assert shares == pytest.approx([0.85, 0.90, 0.95], abs=0.01)
    assert all(cache % 64 == 0 for cache in routing.CACHES)


def test_ratios_by_hand():
    assert routing.gain(RUNS) == 3.0
    assert routing.gain(RUNS, routing.LOADED) == 1.5
    assert routing.sooner(RUNS) == 10.0
    assert routing.caches_of(54) == pytest.approx(1.0)
    assert routing.lines({54: RUNS}, routing.gain) == {
        "least_loaded": [(1.0, 1.5)],
        "prefix": [(1.0, 3.0)],
    }
