"""How well does a simulation predict runs on this GPU? It is study 010
(experiments/studies/010_prediction) with the GPU's kernels.

    python -m experiments.hardware.gpu_prediction --json prediction.json
    python -m experiments.hardware.gpu_prediction --model SmolLM2-135M-Instruct.Q4_1.gguf
    python -m experiments.hardware.gpu_prediction --rehearse      # on a CPU: one other run of few requests

The steps of one run are fitted, and other runs are predicted: other requests, other arrivals, and a
smaller budget, which needs a second engine. The study's engine with blocks of 128 is left out,
because compiling an engine takes long. The study's kept findings are those of a CPU, and stay as
they are.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.harness import arguments_of, bench_parser
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from pagedjax.weights.locate import located
from pagedjax.weights.pretrained import DEFAULT_MODEL

STUDY = "experiments.studies.010_prediction.study"
RUNS = ("four fifths of the load", "budget of 64", "other requests", "half the load")


def summary(study: Any, runs_by_name: Mapping[str, Any], fit_error: float) -> dict[str, Any]:
    """The mean errors in per cent by metric, and the values of every run and repeat."""

    def mean(values: Sequence[float]) -> float | None:
        return round(statistics.fmean(values), 3) if values else None

    fitted = runs_by_name[study.FIT]
    return {
        "fit_error": fit_error,
        "errors": {
            metric: {
                "fitted to another run": mean(study.held_out(runs_by_name, study.FITTED, path)),
                "the fitted run itself": mean(study.errors(fitted.fitted, fitted.measured, path)),
                "roofline alone": mean(study.held_out(runs_by_name, study.ROOFLINE, path)),
                "a repeat of the run": mean(study.repeat_differences(runs_by_name, path)),
            }
            for metric, path in study.METRICS.items()
        },
        "runs": {name: _values(study, runs) for name, runs in runs_by_name.items()},
    }


def _values(study: Any, runs: Any) -> dict[str, dict[str, list[Any]]]:
    """The values of a run: of each metric, by the way they were made, one for each repeat."""
    values = {}
    for metric, path in study.METRICS.items():
        values[metric] = {
            way: [study.dig(repeat, path) for repeat in summaries]
            for way, summaries in runs._asdict().items()
        }
    return values


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="the .gguf file, if the wheel is not installed"
    )
    parser.add_argument("--impl", default="pallas_gpu", help="attention implementation")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help="to predict"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: one other run of few requests"
    )
    args = arguments_of(
        parser,
        argv,
        impl="xla",
        dtype="float32",
        requests=8,
        repeats=2,
        runs=["four fifths of the load"],
    )
    try:
        model = located(args.model).resolve(strict=True)
    except FileNotFoundError as error:
        print(f"error: --model {args.model}: {error}", file=sys.stderr)
        return 2
    study = importlib.import_module(STUDY)
    machine = environment()
    file = Path(study.__file__ or "").parent / "config.yaml"
    overrides = [
        f"model={model}",
        f"workload.count={args.requests}",
        f"engine.attention_impl={args.impl}",
        f"engine.dtype={args.dtype}",
    ]

    def keep(runs: Mapping[str, Any], fit_error: float) -> None:
        """Write the figures of the repeats so far."""
        figures = {"where": machine, "overrides": overrides[1:], **summary(study, runs, fit_error)}
        write_json(args.json, figures, end="")
        print(f"{len(runs[study.FIT].measured)} of {args.repeats} repeats", flush=True)

    runs, fit_error = study.compare(file, overrides, args.repeats, False, only=args.runs, keep=keep)
    for metric, means in summary(study, runs, fit_error)["errors"].items():
        print(f"{metric:22} " + ", ".join(f"{name} {value} %" for name, value in means.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
