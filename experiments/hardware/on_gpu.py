"""Everything worth running on a GPU, in one command and the order in which it matters: results to a folder.

    python -m experiments.hardware.on_gpu --name h200 --out experiments/results/h200

    1. hardware.kernels --quick   are the kernels right, and where do they stand before any tuning
    2. pallas_kernels.tune        better tiles, written to pallas_kernels/tiles/<name>.json
    3. hardware.kernels           all shapes, with the tuned tiles, beside what a user would take instead
    4. bench.random_llama         a Llama of 1.1 B parameters end to end, through the kernels and through plain XLA

A part that fails is reported and the next one runs, but for 1: kernels that are wrong are not timed. Each part's output
goes to <out>/<part>.log as it appears, its figures to <out>/<part>.json. `--minutes` bounds the whole; what does not
fit is named. Needs JAX 0.11 with CUDA; torch is compared with where it is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

PARTS = ("first", "tune", "kernels", "llama")
LEAST = 30.0  # seconds that are worth starting a part for


class Part(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    must: bool = False  # nothing after it makes sense if it fails


def parts(name: str, out: Path) -> list[Part]:
    def figures(part: str) -> tuple[str, str]:
        return "--json", str(out / f"{part}.json")

    llama = ("experiments.bench.random_llama", "--impls", "pallas_gpu", "xla", "--context", "2048")
    return [
        Part("first", ("experiments.hardware.kernels", "--quick", *figures("first")), must=True),
        Part("tune", ("pallas_kernels.tune", "--name", name)),
        Part("kernels", ("experiments.hardware.kernels", *figures("kernels"))),
        Part("llama", (*llama, *figures("llama"))),
    ]


def run(part: Part, out: Path, seconds: float) -> str:
    """How the part ended: "ok", or why not. It gets its own process, and is stopped after `seconds`."""
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-u", "-m", *part.arguments], stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
    return "ok" if done.returncode == 0 else f"failed with exit code {done.returncode}"


def session(plan: list[Part], out: Path, minutes: float) -> bool:
    """Run the parts in order; whether all ended well."""
    out.mkdir(parents=True, exist_ok=True)
    end, well = time.monotonic() + 60 * minutes, True
    for i, part in enumerate(plan):
        left = end - time.monotonic()
        if left < LEAST:
            print(f"not run for want of time: {', '.join(one.name for one in plan[i:])}", flush=True)
            return False
        result = run(part, out, left)
        print(f"{part.name}: {result}, {60 * minutes - (end - time.monotonic()):.0f} s so far", flush=True)
        tail = (out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        print("\n".join(f"  | {line[:160]}" for line in tail), flush=True)
        well = well and result == "ok"
        if part.must and result != "ok":
            print("the rest is not run: it builds on this", flush=True)
            return False
    return well


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
