"""Splitwise's designs of clusters, a fifth of their size: machines, their cost and power, and how a
config names them.

Prices and powers are those that its notebook compares by (notebooks/utils.py of
https://github.com/Mutinifni/splitwise-sim, commit 8f99e7d): 2.21 and 4.76 $/h a GPU of a DGX-A100
and a DGX-H100, and 24.8 and 44 units of power a machine. Table I of the paper has 17.6 and 38 $/h a
machine, which is the same; its Table V has 2.35 times the cost of a DGX-A100 for a DGX-H100, which
is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# machines of Baseline-H100, a fifth of the paper's 40, whose power or cost every design may have
H100S = 8
SCALE = 5
PRICE = {"a100": 2.21, "h100": 4.76}  # $/h of a GPU
POWER = {"a100": 24.8, "h100": 44.0}
# s: the part of a transfer that is not hidden (section VI-A), by its sender
LATENCY = {"a100": 0.008, "h100": 0.005}


class Design(NamedTuple):
    """Machines for prompts, and others for tokens; without the latter, all do both."""

    system: str
    prompts: tuple[str, int]  # the kind of machine, and how many
    tokens: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        counts = f"{self.prompts[1]} + {self.tokens[1]}" if self.tokens else str(self.prompts[1])
        return f"{self.system}, {counts}"

    @property
    def price(self) -> float:
        """$/h of a GPU of each machine, summed."""
        return self._sum(PRICE)

    def _sum(self, of: Mapping[str, float]) -> float:
        return sum(of[pool[0]] * pool[1] for pool in (self.prompts, self.tokens) if pool)

    @property
    def power(self) -> float:
        return self._sum(POWER)

    def overrides(self, times: str) -> tuple[str, ...]:
        """--set of experiments.run for these machines. times: a prefix of names of profiles, see
        measured.py."""

        def simulate(kind: str) -> str:
            return f"{{profile: {times}/bloom-176b/{kind}, padded: false, model: bloom-176b}}"

        kind, count = self.prompts
        if self.tokens is None:
            return (
                f"simulate={simulate(kind)}",
                f"replicas={{count: {count}, router: least_loaded}}",
            )
        prefill, decode = (
            f"{{count: {machines}, simulate: {simulate(machine)}}}"
            for machine, machines in (self.prompts, self.tokens)
        )
        pools = f"prefill: {prefill}, decode: {decode}, latency_s: {LATENCY[kind]:g}"
        return (f"pools={{{pools}}}",)


def fitting(kind: str, budget: float, of: Mapping[str, float]) -> int:
    """How many machines a budget of cost (PRICE) or power (POWER) allows."""
    return int(budget / of[kind] + 1e-9)


MOST_POWER = H100S * POWER["h100"]
MOST_PRICE = H100S * PRICE["h100"]
A100S = fitting("a100", MOST_POWER, POWER)  # at equal power: a fifth of 70, as in the paper
PRICED_A100S = fitting("a100", MOST_PRICE, PRICE)  # at equal cost: of 86 / 5

BASELINE_A100 = Design("Baseline-A100", ("a100", A100S))
BASELINE_H100 = Design("Baseline-H100", ("h100", H100S))


def of_a100s(machines: int) -> list[Design]:
    """Splitwise-AA with one machine for prompts, then with two, and so on."""
    return [Design("Splitwise-AA", ("a100", n), ("a100", machines - n)) for n in range(1, machines)]


def mixed() -> list[Design]:
    """Splitwise-HA with one H100 for prompts, then with two, and so on.

    The number of A100s is what the power allows.
    """
    counts = ((n, fitting("a100", MOST_POWER - n * POWER["h100"], POWER)) for n in range(1, H100S))
    return [Design("Splitwise-HA", ("h100", n), ("a100", count)) for n, count in counts]
