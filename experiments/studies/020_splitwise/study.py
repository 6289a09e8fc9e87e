"""020: the load of machines for prompts and others for tokens, after Splitwise (Patel et al. 2024, arXiv 2311.18677).

Published numbers are sentences of the paper's evaluation, of BLOOM-176B and the conversation trace:

    VI-B  equal power: "Compared to Baseline-A100, Splitwise-AA delivers 2.15x more throughput at the same power and
          cost. Splitwise-HA delivers 1.18x more throughput at 10% lower cost and the same power."
    VI-C  equal cost: "Splitwise-AA provides the best throughput for the same cost, namely 1.4x more throughput than
          Baseline-H100". The sentence names no trace; its neighbour in Fig. 18 is of conversations.
    VI-E  without targets: "Baseline-A100 and Splitwise-AA have the best throughput per cost at 0.89 RPS/$", and
          Splitwise-HH and Baseline-H100 "achieve 0.75 RPS/$".

1.18 is compared with Baseline-H100: by the prices, Splitwise-HA costs less than that, and more than Baseline-A100.

Throughput is the highest rate that meets nine targets (splitwise_requests.py). Clusters have a fifth of the paper's
machines (splitwise_machines.py). Splitwise's simulator comes with the measured times that it interpolates, but it takes
decodes from them in a way of its own (simulation/measured.py). So everything is computed twice: with its decodes, and
with decodes as measured.

The paper was read in copies that others made of its text: two have the sentences of VI-C and VI-E, one those of VI-B.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.core.drive import Measured
from experiments.core.workloads import AZURE
from experiments.studies import splitwise_machines as machines
from experiments.studies import splitwise_requests as requests
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    NoTraces,
    interval,
    markdown,
    rounded,
    simulated,
)

QUESTION = "What load do machines for prompts and others for tokens serve at the cost or power of machines that do both?"
TRACES = {"conversations": "conv", "code": "code"}
FETCH = AZURE
POWER, COST, STRESS = (f"Splitwise, section VI-{part}" for part in "BCE")
TIMES = {"splitwise-sim": "decodes as its simulator takes them", "splitwise": "decodes as measured"}
HIGHEST, WITHIN = (
    40.0,
    0.625,
)  # requests/s of a fifth of a cluster: where the search ends, and how close it comes
SEEDS, SECONDS = 3, 40.0  # of arrivals at each rate
STRESSED, STRESSED_SECONDS = (
    180.0,
    600.0,
)  # requests/s of a whole cluster, and how long: notebooks/plots.ipynb
WHY_FIXED = (
    "not known; here pools are fixed (Splitwise's mixed pool moves machines between them), and clusters have a fifth "
    "of the machines"
)
WHY_DECODES = (
    "64 decodes take up to 2 times as long as one in the measurements, and hardly longer in Splitwise's simulator; "
    "pools are fixed here"
)
WHY_STRESS = "not known; the published simulator stops decodes for prompts and reserves memory for whole answers"
WHYS = {
    "splitwise-sim": (WHY_FIXED, WHY_STRESS),
    "splitwise": (WHY_DECODES, WHY_DECODES),
}  # within targets, stressed


def systems(kind: str) -> dict[str, tuple[str, Sequence[machines.Design], int]]:
    """The systems that are compared on a trace, by name: their budget, their divisions into pools by machines for
    prompts, and the index of the division that the notebook has for that budget and trace, where a search begins.
    """
    talks, a100s, priced = kind == "conversations", machines.A100S, machines.PRICED_A100S
    return {
        "baseline a100": ("equal power", (machines.BASELINE_A100,), 0),
        "baseline h100": ("equal power and cost", (machines.BASELINE_H100,), 0),
        "aa": ("equal power", machines.of_a100s(a100s), (9 if talks else 11) - 1),
        "ha": ("equal power", machines.mixed(), (5 if talks else 7) - 1),
        "aa, cost": ("equal cost", machines.of_a100s(priced), (10 if talks else 13) - 1),
    }


class Found(NamedTuple):
    """The highest rate of a design with one trace of requests. failed: the targets that the next rate missed."""

    rate: float
    design: machines.Design
    failed: tuple[str, ...]


Missed = Callable[
    [machines.Design, float], tuple[str, ...]
]  # the targets that a design misses at a rate


def highest(missed: Missed, design: machines.Design, within: float, served: float = 0.0) -> Found:
    """The highest rate of a design above one that it serves, by halves."""
    low, high, failed = served, HIGHEST, ()
    while high - low > within:
        rate = (low + high) / 2
        if served and not failed:  # a division serves little more than its neighbour
            rate = min(rate, low + 4 * within)
        if wrong := missed(design, rate):
            high, failed = rate, wrong
        else:
            low = rate
    return Found(low, design, failed)


def best(missed: Missed, designs: Sequence[machines.Design], within: float, first: int) -> Found:
    """The division that serves most: from one of them, a machine more for prompts, or one less, while that helps."""
    found, where = highest(missed, designs[first], within), first
    for step in (1, -1):
        while 0 <= where + step < len(designs):
            more = found.rate + within
            if more > HIGHEST or missed(designs[where + step], more):
                break
            where += step
            found = highest(missed, designs[where], within, more)
    return found


Best = Mapping[str, Sequence[Found]]  # system -> one for each seed


class Run(NamedTuple):
    """What all runs of the study share. place: a folder for traces of requests."""

    config: Path
    place: Path
    seconds: float  # of arrivals
    within: float = WITHIN

    def requests(self, trace: Path, rate: float, seed: int) -> Path:
        """A file of the requests of `seconds` at a rate, of which lower rates take the first ones."""
        return requests.write(trace, self.place, max(1, round(rate * self.seconds)), seed)

    def measured(self, design: machines.Design, times: str, file: Path, rate: float) -> Measured:
        runs: list[Measured] = []
        limit = max(1, round(rate * self.seconds))
        options = (
            f"workload.file={file}",
            f"workload.time_scale={1 / rate}",
            f"workload.limit={limit}",
        )
        simulated(
            self.config,
            *options,
            *design.overrides(times),
            also=lambda point, one: runs.append(one),
        )
        return runs[0]

    def searched(self, kind: str, times: str, trace: Path, seeds: int) -> Best:
        """Every system's best rates, one for each seed."""
        found: dict[str, list[Found]] = {}
        for name, (_, designs, first) in systems(kind).items():
            for seed in range(seeds):
                file = self.requests(trace, HIGHEST, seed)

                def missed(
                    design: machines.Design, rate: float, file: Path = file
                ) -> tuple[str, ...]:
                    return requests.missed(
                        requests.slowdowns(self.measured(design, times, file, rate).requests)
                    )

                one = best(missed, designs, self.within, first)
                first = designs.index(one.design)
                found.setdefault(name, []).append(one)
        return found

    def stressed(self, kind: str, times: str, trace: Path, seeds: int) -> list[float]:
        """Requests/s of one machine that ends fewer than arrive, for each $ of its price; one number for each seed.

        It gets its share of STRESSED. Ends count from a tenth of the time to nine tenths of it, as in the notebook.
        """
        count = {"a100": machines.A100S, "h100": machines.H100S}[kind] * machines.SCALE
        rate, design, found = STRESSED / count, machines.Design("", (kind, 1)), []
        for seed in range(seeds):
            records = self.measured(
                design, times, self.requests(trace, rate, 100 + seed), rate
            ).requests
            ends = [one.arrival + (one.e2e or 0.0) for one in records]
            within = sum(self.seconds / 10 <= end < self.seconds * 9 / 10 for end in ends)
            found.append(within / (self.seconds * 8 / 10) / design.price)
        return found


def over(above: Sequence[Found], below: Sequence[Found]) -> Interval:
    """The ratio of two systems' rates, seed by seed."""
    return interval([a.rate / b.rate for a, b in zip(above, below, strict=True)])


def claims_of(times: str, found: Best, stress: Mapping[str, Sequence[float]]) -> list[Claim]:
    """The published factors, with one of TIMES."""
    of, (why, why_stress) = f"BLOOM-176B, conversations, {TIMES[times]}: ", WHYS[times]
    within = "requests/s within the targets"
    return [
        Claim(
            *(
                POWER,
                f"{of}{within}, Splitwise-AA over Baseline-A100 at equal power and cost",
                2.15,
            ),
            *(over(found["aa"], found["baseline a100"]), 1.1, "x", why),
        ),
        Claim(
            *(POWER, f"{of}{within}, Splitwise-HA over Baseline-H100 at equal power", 1.18),
            *(over(found["ha"], found["baseline h100"]), 1.1, "x", why),
        ),
        Claim(
            *(COST, f"{of}{within}, Splitwise-AA over Baseline-H100 at equal cost", 1.4),
            *(over(found["aa, cost"], found["baseline h100"]), 1.1, "x", why),
        ),
        *(
            Claim(
                *(
                    STRESS,
                    f"{of}stressed, requests/s for each $/h of a GPU, Baseline-{kind.upper()}",
                    published,
                ),
                *(interval(stress[kind]), 1.1, "RPS/$", why_stress),
            )
            for kind, published in (("a100", 0.89), ("h100", 0.75))
        ),
    ]


def trace_of(traces: Path, kind: str) -> Path:
    """The recorded trace in a folder. Raises NoTraces if there is none."""
    files = sorted(traces.glob(f"*{TRACES[kind]}*.csv"))
    if not files:
        raise NoTraces(f"there is no *{TRACES[kind]}*.csv in the folder of --traces. {FETCH}")
    return files[0]


def run(folder: Path, quick: bool, traces: Path) -> Findings:
    seeds, seconds = (1, 1.0) if quick else (SEEDS, SECONDS)
    files = {kind: trace_of(traces, kind) for kind in TRACES}
    talks = files["conversations"]
    with tempfile.TemporaryDirectory() as name:
        short = Run(folder / "config.yaml", Path(name), seconds, 8 * WITHIN if quick else WITHIN)
        long = short._replace(seconds=20.0 if quick else STRESSED_SECONDS)
        found = {
            (kind, times): short.searched(
                kind, times, file, seeds if kind == "conversations" else 1
            )
            for kind, file in files.items()
            for times in TIMES
        }
        stress = {
            times: {
                one: long.stressed(one, times, talks, min(seeds, 2)) for one in ("a100", "h100")
            }
            for times in TIMES
        }
    claims = [
        claim
        for times in TIMES
        for claim in claims_of(times, found["conversations", times], stress[times])
    ]
    return Findings(
        claims, answer(found, stress, claims), {"rates.svg": figure(found)}, [table(found)]
    )


All = Mapping[tuple[str, str], Best]


def middle(found: Sequence[Found]) -> float:
    return interval([one.rate for one in found]).middle


def usual(found: Sequence[Found]) -> machines.Design:
    """The design that most seeds chose."""
    return Counter(one.design for one in found).most_common(1)[0][0]


def figure(found: All) -> str:
    panels = {
        title: {
            one.replace(" ", "\n").replace(",", ""): {"requests/s": machines.SCALE * middle(rates)}
            for one, rates in found["conversations", times].items()
        }
        for times, title in TIMES.items()
    }
    return figures.stacks(panels, "requests/s of a whole cluster")


def table(found: All) -> str:
    head = (
        "trace",
        "times",
        "budget",
        "machines, a fifth",
        "$/h of a GPU",
        "power",
        "requests/s",
        "missed beyond",
    )
    rows = []
    for (kind, times), systems_found in found.items():
        for name, rates in systems_found.items():
            design = usual(rates)
            failed = Counter(what for one in rates for what in one.failed)
            rows.append(
                (
                    *(
                        kind,
                        TIMES[times],
                        systems(kind)[name][0],
                        design.name,
                        design.price,
                        design.power,
                    ),
                    *(middle(rates), ", ".join(what for what, _ in failed.most_common(2))),
                )
            )
    return markdown(head, rows)


def answer(
    found: All, stress: Mapping[str, Mapping[str, Sequence[float]]], claims: Sequence[Claim]
) -> list[str]:
    theirs, measured = (found["conversations", times] for times in TIMES)

    def factors(one: Best) -> tuple[str, str, str]:
        pairs = ("aa", "baseline a100"), ("ha", "baseline h100"), ("aa, cost", "baseline h100")
        a, b, c = (rounded(over(one[above], one[below]).middle) for above, below in pairs)
        return a, b, c

    a, b, c = factors(theirs)
    x, y, z = factors(measured)
    code, code_measured = (factors(found["code", times]) for times in TIMES)
    counts = [sum(one.agrees for one in claims if TIMES[times] in one.what) for times in TIMES]
    each = len(claims) // len(TIMES)
    agreeing = f"{counts[0]} of {each} published numbers agree with these decodes, and {counts[1]} with measured ones."
    ha = usual(theirs["ha"])
    costs = {
        name: ha.price / one.price - 1
        for name, one in (("h", machines.BASELINE_H100), ("a", machines.BASELINE_A100))
    }
    same = {
        times: rounded(interval(one["a100"]).middle / interval(one["h100"]).middle)
        for times, one in stress.items()
    }
    return [
        f"With decodes as Splitwise's simulator takes them, Splitwise-AA serves {a} times the load of Baseline-A100 at "
        f"the same power and cost (published: 2.15), Splitwise-HA {b} times that of Baseline-H100 at the same power "
        f"(1.18), and Splitwise-AA {c} times that of Baseline-H100 at the same cost (1.4). {agreeing}",
        f"With decodes as they were measured, the same factors are {x}, {y} and {z}. That simulator looks up a step of "
        "n decodes where a prompt of n tokens was measured, so a batch of decodes takes hardly longer than one, and a "
        "few machines for tokens are enough. In the measurements 32 decodes of an A100 take 1.34 times as long as one "
        "and 64 take 1.98 times, and the median of TBT may be 1.25 times that of one request alone. "
        "Splitwise's mixed pool, which is not simulated, could raise these factors.",
        f"On code, whose answers are short, and with one seed, the same factors are {', '.join(code)} with its "
        f"decodes, and {', '.join(code_measured)} with measured ones.",
        "Without targets, $ for $, machines with A100s end "
        f"{same['splitwise-sim']} times as many requests as those with H100s with its decodes, and "
        f"{same['splitwise']} times with measured ones (published: 0.89 / 0.75 = 1.19). Splitwise-AA and -HH have no "
        "number here: under stress their mixed pool makes them the baselines, and it is not simulated.",
        "Not compared: the abstract's factors, 1.4 at 20 % lower cost and 2.35 at the same cost and power. No sentence "
        "of the evaluation that we found has them: 1.4 is there at equal cost, and 2.35 is in Table V as the cost of a "
        "DGX-H100 over that of a DGX-A100. Nor are Splitwise-HH and -HHcap, designs at equal throughput (VI-C), and a "
        "changed load or model (VI-D).",
        "The paper does not say clearly what 1.18 is over. It has 10 % lower cost, and with the machines found here "
        f"Splitwise-HA costs {100 * costs['h']:+.0f} % over Baseline-H100 and {100 * costs['a']:+.0f} % over "
        "Baseline-A100. Costs are the notebook's, 4.76 and 2.21 $/h of a GPU.",
        "Different here: a fifth of the machines; pools are fixed, and the best division into pools counts; a request "
        "goes to the machine with the fewest requests, there with the fewest tokens; decodes go on beside prompts; "
        "memory is taken in blocks and not for whole answers; "
        f"arrivals last {SECONDS:.0f} s, there 600. A step with prompts and decodes takes 1.1 times the time of "
        "prompts, as there.",
    ]
