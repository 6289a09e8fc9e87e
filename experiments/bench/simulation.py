"""What it saves to make decode steps together, and to keep sums: processor time of a simulated config, in turn.

    python -m experiments.bench.simulation configs/day.yaml --set workload.file=TRACE.csv --set workload.rounds=1

    one by one   every step alone; all records
    together     decode steps together; the same records (docs/design/long-simulations.md)
    sums         decode steps together; sums in place of records

The first point of a sweep is run. The first round is a warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench.in_turn import at_least_1, cell, rounds, share
from experiments.core import config
from experiments.core.config import Point
from experiments.core.drive import measure
from experiments.core.engines import simulated
from experiments.core.environment import environment

WAYS = ("one by one", "together", "sums")


def seconds(point: Point, way: str) -> float:
    """Processor seconds of one run, with the making of its requests and of its summary."""
    records = "sums" if way == "sums" else "full"
    point = point._replace(experiment=dataclasses.replace(point.experiment, records=records))
    llm = simulated(point.experiment)
    for engine in llm.engines if way == WAYS[0] else ():
        engine.ahead = lambda: None  # no step waits for others
    began = time.process_time()
    measure(llm, point, 0)
    return time.process_time() - began


def _nameless(setting: str) -> str:
    """KEY=VALUE without the folders of a file."""
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).name}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=at_least_1, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        point = config.load(args.config, tuple(args.set))[0]
        if not point.experiment.simulate or point.experiment.pools:
            raise ValueError(
                f"{args.config} is not simulated, or has pools; give a config with `simulate` and no `pools`"
            )
    except ValueError as error:
        parser.error(str(error))
    found = rounds({way: lambda way=way: seconds(point, way) for way in args.ways}, args.rounds)
    shares = {way: share(found, args.ways[0], way) for way in args.ways[1:]}
    print("| way | seconds of a processor, median and all | times as fast |\n|---|---:|---:|")
    for way, times in found.items():
        middle = sorted(times)[len(times) // 2]
        print(f"| {way} | {middle:.1f} ({', '.join(map(str, times))}) | {cell(shares[way]) if way in shares else ''} |")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{most:.2f} GiB at most, all ways together")
    if args.json:
        kept = {
            "environment": environment(device=False),
            "config": args.config.name,
            "set": list(map(_nameless, args.set)),
        }
        kept |= {"seconds": found, "shares": shares, "most_gib": round(most, 2)}
        args.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
