"""The section `pools` of a config: simulated engines for prompts, and others that go on with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.simulation.cost import Simulate

if TYPE_CHECKING:
    from experiments.core.config import Experiment

POOLS = ("prefill", "decode")  # fields of Pools


@dataclass(frozen=True)
class Pool:
    """Equal engines of one of two pools, and the router that gives each request to one of them.

    simulate, cache_tokens, max_num_seqs, max_num_batched_tokens: of each engine; None: the
        experiment's own.
    """

    count: int = 1
    router: str = "least_loaded"
    simulate: Simulate | None = None
    cache_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}; it must be at least 1")
        if self.simulate and self.simulate.fit is not None:
            raise ValueError(
                "simulate.fit: a pool takes a chip, step_s or a profile; set fit for both, in "
                "simulate"
            )


@dataclass(frozen=True)
class Pools:
    """Engines that compute prompts and first tokens, and others that go on with them (pools.py).

    link_gb_s: GB/s (1e9 bytes) at which each engine of `prefill` sends pages, one sequence after
        the other; None: they take no time.
    latency_s: seconds that each sequence takes in addition.
    """

    prefill: Pool = field(default_factory=Pool)
    decode: Pool = field(default_factory=Pool)
    link_gb_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.link_gb_s is not None and self.link_gb_s <= 0:
            raise ValueError(
                f"link_gb_s is {self.link_gb_s}; it must be above 0, or null for no time"
            )
        if self.latency_s < 0:
            raise ValueError(f"latency_s is {self.latency_s}; it must be at least 0 seconds")

    @property
    def count(self) -> int:
        """Engines of both pools."""
        return self.prefill.count + self.decode.count


def of_pool(experiment: Experiment, name: str) -> Experiment:
    """The experiment of one engine of a pool: with what the pool has in place of other values, and
    without pools.

    Raises:
        ValueError: see `Experiment`.
    """
    pool: Pool = getattr(experiment.pools, name)
    changed: dict[str, Any] = {"pools": None, "simulate": pool.simulate or experiment.simulate}
    engine: dict[str, Any] = {
        key: value
        for key in ("max_num_seqs", "max_num_batched_tokens")
        if (value := getattr(pool, key)) is not None
    }
    if pool.cache_tokens is not None:
        changed["cache_tokens"], engine["num_blocks"] = pool.cache_tokens, None
    return dataclasses.replace(
        experiment, engine=dataclasses.replace(experiment.engine, **engine), **changed
    )


def check_pools(experiment: Experiment) -> None:
    """Raises ValueError for what two pools of engines cannot have."""
    pools, engine = experiment.pools, experiment.engine
    if pools is None:
        return
    if experiment.replicas:
        raise ValueError(
            "replicas and pools are both given; give one: pools.prefill.count is the number of "
            "engines there"
        )
    if not experiment.simulate:
        raise ValueError(
            "pools is given and there is no simulate section, but a measured run has 1 engine; "
            "add one at the top (also if each pool has a simulate of its own), or leave pools out"
        )
    of = {name: getattr(pools, name).simulate or experiment.simulate for name in POOLS}
    if of["prefill"].model != of["decode"].model:
        models = " and ".join(
            f"pools.{name} simulates {one.model or experiment.model}" for name, one in of.items()
        )
        raise ValueError(
            f"{models}; blocks are those of one model, so give both the same simulate.model"
        )
    for what, wrong, remedy in (
        ("engine.speculative", engine.speculative, "leave it out"),
        (
            f"engine.reservation {engine.reservation!r}",
            engine.reservation != "none",
            "set it to none",
        ),
        ("simulate.kv_cache false", not all(one.kv_cache for one in of.values()), "leave it out"),
        ("simulate.whole_batches", any(one.whole_batches for one in of.values()), "leave it out"),
    ):
        if wrong:
            raise ValueError(
                f"pools and {what} are both given, and such sequences are not handed over; {remedy}"
            )
    for name in POOLS:
        try:
            of_pool(experiment, name)
        except ValueError as error:
            raise ValueError(f"pools.{name}: {error}") from None
