"""How much processor time does a simulation save if it makes decode steps together, and if it keeps
sums? The ways take turns.

    python -m experiments.bench.simulation configs/day.yaml --set workload.file=TRACE.csv \\
        --set workload.rounds=1

    one by one   every step alone; all records
    together     decode steps together; the same records (docs/design/long-simulations.md)
    sums         decode steps together; sums in place of records

The first point of a sweep is run. The first round is a warm-up.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.bench.harness import (
    at_least_1,
    bench_parser,
    cell,
    markdown,
    ratios,
    run_rounds,
    write_report,
)
from experiments.core import config
from experiments.core.config import Point
from experiments.core.drive import measure
from experiments.core.engines import simulated_llm

WAYS = ("one by one", "together", "sums")


def with_records(point: Point, way: str) -> Point:
    """The point with the records of a way. Raises ValueError if the point cannot keep them."""
    records = "sums" if way == "sums" else "full"
    return point._replace(experiment=dataclasses.replace(point.experiment, records=records))


def seconds(point: Point, way: str) -> float:
    """Run a point. Returns the processor seconds, with those of drawing requests and of the
    summary.
    """
    llm = simulated_llm(point.experiment)
    if way == WAYS[0]:
        for engine in llm.engines:
            engine.next_step_times = lambda: None  # no step waits for others
    start = time.process_time()
    measure(llm, point, 0)
    return time.process_time() - start


def facts(point: Point) -> dict[str, float]:
    """The numbers of requests, output tokens and steps, and the mean sequences of a step."""
    summary = measure(simulated_llm(point.experiment), point, 0).summary
    counts = {name: summary[name] for name in ("requests", "output_tokens", "steps")}
    return {**counts, "sequences_per_step": round(summary["sequences_per_step"]["mean"], 2)}


def _without_folder(setting: str) -> str:
    """KEY=VALUE without the folders of the workload's file."""
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).name}" if key == "workload.file" else setting


def points_of(config_file: Path, settings: Sequence[str]) -> dict[str, Point]:
    """The config's first point, by way.

    Raises:
        ValueError: the config cannot run in one of these ways.
    """
    point = config.load(config_file, tuple(settings))[0]
    if not point.experiment.simulate or point.experiment.pools:
        raise ValueError(
            f"{config_file} is not simulated, or has pools; "
            "give a config with `simulate` and no `pools`"
        )
    return {way: with_records(point, way) for way in WAYS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=at_least_1, default=3)
    args = parser.parse_args(argv)
    try:
        points = points_of(args.config, args.set)
    except ValueError as error:
        parser.error(str(error))
    about = facts(points[WAYS[-1]])
    print(", ".join(f"{name} {value:,g}" for name, value in about.items()))
    runs = {way: partial(seconds, point, way) for way, point in points.items()}
    seconds_by_way = run_rounds(runs, args.rounds)
    base = seconds_by_way[WAYS[0]]
    shares = {way: ratios(base, seconds_by_way[way]) for way in WAYS[1:]}
    rows = []
    for way, times in seconds_by_way.items():
        middle = sorted(times)[len(times) // 2]
        ratio = cell(shares[way]) if way in shares else ""
        rows.append((way, f"{middle:.1f} ({', '.join(map(str, times))})", ratio))
    columns = ("way", "seconds of a processor, median and all", "times as fast")
    print(markdown(columns, rows))
    peak_gib = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    print(f"{peak_gib} GiB at most, all ways together")
    figures = {
        "config": args.config.name,
        "set": list(map(_without_folder, args.set)),
        **about,
        "seconds": seconds_by_way,
        "shares": shares,
        "most_gib": peak_gib,
    }
    write_report(args.json, figures, device=False)


if __name__ == "__main__":
    main()
