"""The section `pools` of a config: simulated engines for prompts, and others that decode."""

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
                "simulate.fit: a pool takes a chip, step_s or a profile; set fit in the section "
                "simulate at the top, where it holds for both pools"
            )


@dataclass(frozen=True)
class Pools:
    """Engines that compute prompts and first tokens, and others that go on with them (pools.py).

    split: the share of a request's tokens that `prefill` computes before it hands the request over,
        in the middle of its prompt or of its output. Its tokens are its prompt and its predicted
        output; max_tokens, if nothing is predicted. null: its prompt, and its first token.
    link_gb_s: GB/s (1e9 bytes) at which each engine of `prefill` sends pages, one sequence after
        the other; None: sending takes no time.
    latency_s: seconds that sending a sequence takes in addition.
    """

    prefill: Pool = field(default_factory=Pool)
    decode: Pool = field(default_factory=Pool)
    link_gb_s: float | None = None
    latency_s: float = 0.0
    split: float | None = None

    def __post_init__(self) -> None:
        if self.split is not None and not 0 < self.split <= 1:
            raise ValueError(
                f"split is {self.split!r}; it must be a share above 0 and at most 1, or null to "
                "split requests behind their prompts"
            )
        if self.link_gb_s is not None and self.link_gb_s <= 0:
            raise ValueError(
                f"link_gb_s is {self.link_gb_s}; it must be above 0, or null for no time"
            )
        if self.latency_s < 0:
            raise ValueError(f"latency_s is {self.latency_s}; it must be at least 0 seconds")

    @property
    def count(self) -> int:
        """The number of engines of both pools."""
        return self.prefill.count + self.decode.count


def pool_experiment(experiment: Experiment, name: str) -> Experiment:
    """The experiment of one engine of a pool: the pool's own values replace those of the
    experiment, and there is no section `pools`.

    Raises:
        ValueError: see `Experiment`.
    """
    pool: Pool = getattr(experiment.pools, name)
    values: dict[str, Any] = {"pools": None, "simulate": pool.simulate or experiment.simulate}
    engine_values: dict[str, Any] = {}
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(pool, key) is not None:
            engine_values[key] = getattr(pool, key)
    if pool.cache_tokens is not None:
        values["cache_tokens"] = pool.cache_tokens
        engine_values["num_blocks"] = None
    engine = dataclasses.replace(experiment.engine, **engine_values)
    return dataclasses.replace(experiment, engine=engine, **values)


def check_pools(experiment: Experiment) -> None:
    """Check the section `pools`.

    Raises:
        ValueError: the experiment has an option that two pools of engines cannot have.
    """
    pools = experiment.pools
    engine = experiment.engine
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
    sections = {name: getattr(pools, name).simulate or experiment.simulate for name in POOLS}
    if sections["prefill"].model != sections["decode"].model:
        models = " and ".join(
            f"pools.{name} simulates {simulate.model or experiment.model}"
            for name, simulate in sections.items()
        )
        raise ValueError(
            f"{models}; blocks are those of one model, so give both the same simulate.model"
        )
    no_kv_cache = not all(simulate.kv_cache for simulate in sections.values())
    whole_batches = any(simulate.whole_batches for simulate in sections.values())
    reservation = f"engine.reservation {engine.reservation!r}"
    for option, is_set, remedy in (
        ("engine.speculative", engine.speculative, "leave it out"),
        (reservation, engine.reservation != "none", "set it to none"),
        ("simulate.kv_cache false", no_kv_cache, "leave it out"),
        ("simulate.whole_batches", whole_batches, "leave it out"),
    ):
        if is_set:
            raise ValueError(
                f"pools and {option} are both given, and such sequences are not handed over; "
                f"{remedy}"
            )
    for name in POOLS:
        try:
            pool_experiment(experiment, name)
        except ValueError as error:
            raise ValueError(f"pools.{name}: {error}") from None
