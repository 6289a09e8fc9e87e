"""Splitwise's designs of clusters, a fifth of their size: machines, their cost and power, and how a
config names them.

Prices and powers are those of its notebook (notebooks/utils.py of
https://github.com/Mutinifni/splitwise-sim, commit 8f99e7d). A GPU of a DGX-A100 costs 2.21 $/h, and
a GPU of a DGX-H100 4.76 $/h. The machines take 24.8 and 44 units of power. Table I of the paper
agrees with these prices: 17.6 and 38 $/h for a machine of 8 GPUs. Its Table V does not: there a
DGX-H100 costs 2.35 times as much as a DGX-A100.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Machines of Baseline-H100. Every other design may take as much power, or cost as much, as these.
H100S = 8
SCALE = 5  # the paper's machines over ours
PRICE = {"a100": 2.21, "h100": 4.76}  # $/h of a GPU
POWER = {"a100": 24.8, "h100": 44.0}  # units of the notebook
# seconds of a transfer that no computation hides (section VI-A), by the machine that sends
LATENCY = {"a100": 0.008, "h100": 0.005}


class Design(NamedTuple):
    """Machines for prompts, and others for tokens. If `tokens` is None, all machines do both."""

    system: str
    prompts: tuple[str, int]  # the kind of machine, and how many
    tokens: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        name = f"{self.system}, {self.prompts[1]}"
        return f"{name} + {self.tokens[1]}" if self.tokens else name

    @property
    def price(self) -> float:
        """$/h of a GPU of each machine, summed."""
        return self._sum(PRICE)

    def _sum(self, value_by_kind: Mapping[str, float]) -> float:
        pools = [self.prompts, self.tokens] if self.tokens else [self.prompts]
        return sum(value_by_kind[kind] * count for kind, count in pools)

    @property
    def power(self) -> float:
        return self._sum(POWER)

    def overrides(self, times: str) -> tuple[str, ...]:
        """The --set options of experiments.run for these machines.

        times: a prefix of names of profiles, see measured.py.
        """

        def simulate(kind: str) -> str:
            return f"{{profile: {times}/bloom-176b/{kind}, padded: false, model: bloom-176b}}"

        kind, count = self.prompts
        if self.tokens is None:
            return (
                f"simulate={simulate(kind)}",
                f"replicas={{count: {count}, router: least_loaded}}",
            )

        def pool(kind: str, count: int) -> str:
            return f"{{count: {count}, simulate: {simulate(kind)}}}"

        prefill = pool(*self.prompts)
        decode = pool(*self.tokens)
        pools = f"prefill: {prefill}, decode: {decode}, latency_s: {LATENCY[kind]:g}"
        return (f"pools={{{pools}}}",)


def fitting(kind: str, budget: float, value_by_kind: Mapping[str, float]) -> int:
    """How many machines a budget of cost (PRICE) or power (POWER) allows."""
    return int(budget / value_by_kind[kind] + 1e-9)  # 1e-9: a quotient may be rounded down


MOST_POWER = H100S * POWER["h100"]
MOST_PRICE = H100S * PRICE["h100"]
A100S = fitting("a100", MOST_POWER, POWER)  # at equal power: a fifth of 70, as in the paper
PRICED_A100S = fitting("a100", MOST_PRICE, PRICE)  # at equal cost: a fifth of 86, rounded down

BASELINE_A100 = Design("Baseline-A100", ("a100", A100S))
BASELINE_H100 = Design("Baseline-H100", ("h100", H100S))


def of_a100s(machines: int) -> list[Design]:
    """Splitwise-AA with one machine for prompts, then with two, and so on."""
    return [Design("Splitwise-AA", ("a100", n), ("a100", machines - n)) for n in range(1, machines)]


def mixed_designs() -> list[Design]:
    """Splitwise-HA with one H100 for prompts, then with two, and so on.

    The number of A100s is what the power allows.
    """
    designs = []
    for n in range(1, H100S):
        count = fitting("a100", MOST_POWER - n * POWER["h100"], POWER)
        designs.append(Design("Splitwise-HA", ("h100", n), ("a100", count)))
    return designs
