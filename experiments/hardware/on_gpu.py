"""All measurements on a GPU in one command, the most important first; results go to a folder.

    python -m experiments.hardware.on_gpu --name h200 --out experiments/results/h200

    first     experiments.hardware.gpu_attention --quick: are the kernels correct, and how fast before tuning?
    tune      pallas_kernels.tune: better tiles, written to pallas_kernels/tiles/<name>.json
    kernels   experiments.hardware.gpu_attention: all shapes with the tuned tiles, compared with alternatives, and rows
              with 3 and 7 drafts compared with rows without
    llama     experiments.bench.random_llama: a Llama of 1.1 B parameters, through the kernels and through plain XLA

A failed part is reported and the next one runs. A failure of `first` ends the session: wrong kernels are not timed.
Each part writes its output to <out>/<part>.log and its figures to <out>/<part>.json. `--minutes` limits the session;
parts that do not fit are listed. Needs JAX 0.11 with CUDA; torch is included if it is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PARTS = ("first", "tune", "kernels", "llama")
LEAST = 30.0  # seconds; with less time left, no part is started


class Part(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    must: bool = False  # the session ends if this part fails


def parts(name: str, out: Path) -> list[Part]:
    def figures(part: str) -> tuple[str, str]:
        return "--json", str(out / f"{part}.json")

    llama = ("experiments.bench.random_llama", "--impls", "pallas_gpu", "xla", "--context", "2048")
    return [
        Part("first", ("experiments.hardware.gpu_attention", "--quick", *figures("first")), must=True),
        Part("tune", ("pallas_kernels.tune", "--name", name)),
        Part("kernels", ("experiments.hardware.gpu_attention", *figures("kernels"))),
        Part("llama", (*llama, *figures("llama"))),
    ]


def run(part: Part, out: Path, seconds: float) -> str:
    """Run the part in a process, stopped after `seconds`. Returns "ok" or the reason of the failure."""
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-u", "-m", *part.arguments], stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
    return "ok" if done.returncode == 0 else f"failed with exit code {done.returncode}"


def session(plan: list[Part], out: Path, minutes: float) -> bool:
    """Run the parts in order. Returns True if all succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    end, succeeded = time.monotonic() + 60 * minutes, True
    for i, part in enumerate(plan):
        left = end - time.monotonic()
        if left < LEAST:
            print(f"not run, no time left: {', '.join(one.name for one in plan[i:])}", flush=True)
            return False
        result = run(part, out, left)
        print(f"{part.name}: {result}, {60 * minutes - (end - time.monotonic()):.0f} s so far", flush=True)
        tail = (out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        print("\n".join(f"  | {line[:160]}" for line in tail), flush=True)
        succeeded = succeeded and result == "ok"
        if part.must and result != "ok":
            print("the other parts are not run: they depend on this one", flush=True)
            return False
    return succeeded


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="the device's file in pallas_kernels/tiles, such as h200")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some of the parts", metavar="PART")
    args = parser.parse_args(argv)
    plan = [part for part in parts(args.name, args.out) if args.only is None or part.name in args.only]
    return 0 if session(plan, args.out, args.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
