"""All measurements on a GPU in one command, the most important first; results go to a folder.

    python -m experiments.hardware.on_gpu --name h200 --out experiments/results/h200
    python -m experiments.hardware.on_gpu --name h200 --out /tmp/session --only goldens predict \\
        --model FILE.gguf
    python -m experiments.hardware.on_gpu --name h200 --out /tmp/session --rehearse      # on a CPU

    right     experiments.hardware.gpu_numerics: are the kernels right? Wrong kernels are not timed:
              the session ends
    tune      pallas_kernels.tune: better tiles, written to pallas_kernels/tiles/<name>.json, which
              later parts read
    kernels   experiments.hardware.gpu_attention: how fast are the kernels, beside alternatives?
    engine    experiments.hardware.gpu_engine: a Llama of random weights in the engine, and what its
              steps consist of
    peers     experiments.hardware.gpu_peers: the engine's requests in a plain loop with CUDA
              graphs, and in transformers' continuous batching; needs torch
    overlapped  gpu_numerics of the other kernel for prompts, `pallas_gpu_overlapped`: is it right?
    prompts   gpu_attention of prompts alone: that kernel beside `pallas_gpu` and cuDNN
    writes    experiments.hardware.gpu_writes: is the kernel that rotates and writes right, and are
              steps of `pallas_gpu_fused` faster?
    products  experiments.hardware.gpu_products: are products of floats with what follows them right,
              and how fast are they beside XLA's?
    goldens   experiments.hardware.gpu_goldens: a real model against transformers
    predict   experiments.hardware.gpu_prediction: study 010, a simulation against measured runs
    stored    experiments.hardware.gpu_stored: decodes of a model with weights of 4 bits: are the
              kernel's products right, and how fast are they beside XLA's?
    latents   experiments.hardware.gpu_latents: is the kernel for latents right?

Each part has a limit of seconds and a process group of its own, of which nothing is left when the
part ends or is stopped: a kernel that deadlocks never returns. A failed part is reported and the
next one runs. Each part writes its output to <out>/<part>.log, and its figures to <out>/<part>.json
as they come. <out>/session.json has the results of the parts, versions, commit and device.
`--minutes` limits the session; parts that do not fit are listed.

`--rehearse` runs the same parts with interpreted kernels or other implementations, tiny shapes and
the same files. Its limits are four times as long.

Needs JAX 0.11 and so Python 3.12, with CUDA unless it is a rehearsal. torch is included if it is
installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.processes import gpu
from pagedjax.weights.pretrained import DEFAULT_MODEL
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu

# Seconds. On an H200 with 16 processors `kernels` took 78, two engines of `engine` with three programs
# each 66, and `goldens` 25. An engine of `engine` has some 30 programs now, which no GPU has compiled.
LIMITS = {
    "right": 110,
    "tune": 60,
    "kernels": 110,
    "engine": 240,
    "peers": 150,
    "overlapped": 60,
    "prompts": 60,
    "writes": 110,
    "products": 150,
    "goldens": 60,
    "predict": 120,
    "stored": 110,
    "latents": 60,
}
PARTS = tuple(LIMITS)
MINUTES = 9.5  # of a session on a GPU
SLOWER = 4  # times the seconds, on a GPU, that a part and a session may take in a rehearsal
OVERLAPPED = pallas_gpu.OVERLAPPED.name
REMEDY = "use Python 3.12 or newer, where pip installs it"
MIN_SECONDS = 20.0  # seconds; with less time left, no part is started
GRACE = 10.0  # seconds that a part has, after its own limit, to write what it found


class Part(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    seconds: float = 600.0
    ends_session: bool = False  # if this part fails


def parts(
    name: str, out: Path, model: str, limits: Mapping[str, float], rehearse: bool = False
) -> list[Part]:
    """All parts of a session.

    Args:
        name: the device's name.
        model: the model of `goldens` and `predict`.
        limits: seconds by the name of a part.
    """

    def part(part_name: str, module: str, *options: str, ends_session: bool = False) -> Part:
        arguments = [module, *options, "--json", str(out / f"{part_name}.json")]
        if rehearse:
            arguments.append("--rehearse")
        return Part(part_name, tuple(arguments), limits[part_name], ends_session)

    time_limits = {
        part_name: ("--seconds", f"{max(limits[part_name] - GRACE, 1):g}")
        for part_name in ("right", "overlapped", "goldens", "peers", "latents")
    }
    # plain XLA's engines take minutes on a GPU
    impls = () if rehearse else ("--impls", "pallas_gpu")
    return [
        part(
            "right", "experiments.hardware.gpu_numerics", *time_limits["right"], ends_session=True
        ),
        part("tune", "pallas_kernels.tune", "--name", name),
        part("kernels", "experiments.hardware.gpu_attention"),
        part("engine", "experiments.hardware.gpu_engine"),
        part("peers", "experiments.hardware.gpu_peers", *time_limits["peers"]),
        part(
            "overlapped",
            "experiments.hardware.gpu_numerics",
            "--impl",
            OVERLAPPED,
            "--every",
            "3",
            *time_limits["overlapped"],
        ),
        part(
            "prompts",
            "experiments.hardware.gpu_attention",
            "--prompts",
            "--contenders",
            *("pallas_gpu", OVERLAPPED, "cudnn, contiguous"),
        ),
        part("writes", "experiments.hardware.gpu_writes"),
        part("products", "experiments.hardware.gpu_products"),
        part(
            "goldens",
            "experiments.hardware.gpu_goldens",
            *impls,
            "--model",
            model,
            *time_limits["goldens"],
        ),
        part("predict", "experiments.hardware.gpu_prediction", "--model", model),
        part("stored", "experiments.hardware.gpu_stored"),
        part("latents", "experiments.hardware.gpu_latents", *time_limits["latents"]),
    ]


def rates(out: Path) -> list[str]:
    """The card's limits as options of `engine`; none if `kernels` has not measured them."""
    try:
        card = json.loads((out / "kernels.json").read_text(encoding="utf-8"))["card"]
    except (OSError, ValueError, KeyError):
        return []
    bandwidth = str(card["copy_bytes_per_s"])
    return ["--bandwidth", bandwidth, "--rate", str(card["product_flops_per_s"])]


def run(part: Part, out: Path, seconds: float) -> str:
    """Run the part in a process group, and stop it after `seconds`.

    Returns "ok" or the reason of the failure.
    """
    command = [sys.executable, "-u", "-m", *part.arguments]
    if part.name == "engine":
        command += rates(out)
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            # Processes that a part has left would keep their memory of the device.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that waits for a device may not end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    return "ok" if code == 0 else f"failed with exit code {code}"


def session(
    plan: list[Part], out: Path, minutes: float, facts: Mapping[str, Any] | None = None
) -> bool:
    """Run the parts in order, and write session.json after each. Returns True if all succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    session_start = time.monotonic()
    finished = []
    not_run = [part.name for part in plan]

    def keep(**fields: Any) -> None:
        """Write session.json as the session stands, with these fields."""
        report = {**(facts or {}), "parts": finished, "not_run": not_run, **fields}
        write_json(out / "session.json", report)

    keep()
    for part in plan:
        start = time.monotonic()
        seconds_left = session_start + 60 * minutes - start
        if seconds_left < MIN_SECONDS:
            print(f"not run, no time left: {', '.join(not_run)}", flush=True)
            return False
        keep(running=part.name)
        result = run(part, out, min(seconds_left, part.seconds))
        end = time.monotonic()
        seconds = end - start
        not_run = not_run[1:]
        finished.append(
            {
                "part": part.name,
                "result": result,
                "seconds": round(seconds, 1),
                "limit": part.seconds,
            }
        )
        keep()
        print(
            f"{part.name}: {result}, {seconds:.0f} s; {end - session_start:.0f} s so far",
            flush=True,
        )
        log = (out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
        print("\n".join(f"  | {line[:160]}" for line in log.splitlines()[-12:]), flush=True)
        if part.ends_session and result != "ok":
            print("the other parts are not run: they depend on this one", flush=True)
            return False
    return all(part["result"] == "ok" for part in finished)


def facts_of(name: str, rehearse: bool) -> dict[str, Any]:
    """The fields of session.json beside the parts.

    JAX opens no device here, because it would take the device's memory.
    """
    machine = environment(device=False)
    machine.pop("device")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"name": name, "rehearsal": rehearse, "date": date, "gpu": gpu(), "where": machine}


def limit(text: str) -> tuple[str, float]:
    """The name and the seconds of "tune=60"."""
    name, _, seconds = text.partition("=")
    if name not in LIMITS or not seconds.isdecimal() or int(seconds) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no limit; write PART=SECONDS, and PART is one of {', '.join(PARTS)}"
        )
    return name, float(seconds)


def on_gpu_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--name", required=True, help="the device's file in pallas_kernels/tiles, such as h200"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the results; it may exist; no default"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=(
            f"of the session; default {MINUTES}, and {MINUTES * SLOWER:g} of a rehearsal; "
            f"the limits of all parts add up to {sum(LIMITS.values()) / 60:.1f}: the part that "
            "runs when the time is over is stopped, and those after it are not run and are listed"
        ),
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="some of the parts", metavar="PART"
    )
    parser.add_argument(
        "--limits", nargs="+", type=limit, default=[], help="other limits", metavar="PART=SECONDS"
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="of goldens and predict: its .gguf file"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, see above")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = on_gpu_parser().parse_args(argv)
    if jax.__version_info__ < pallas_gpu.JAX_NEEDED:
        print(
            f"error: the kernels need JAX 0.11 or newer, and this is {jax.__version__}; {REMEDY}",
            file=sys.stderr,
        )
        return 2
    if args.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"  # read by the parts
    slower = SLOWER if args.rehearse else 1
    limits = {name: seconds * slower for name, seconds in LIMITS.items()} | dict(args.limits)
    all_parts = parts(args.name, args.out, args.model, limits, args.rehearse)
    plan = [part for part in all_parts if args.only is None or part.name in args.only]
    minutes = args.minutes or MINUTES * slower
    return 0 if session(plan, args.out, minutes, facts_of(args.name, args.rehearse)) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the running part is then killed too
    sys.exit(main())
