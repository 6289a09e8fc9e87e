"""How many seconds pass from a command to its first token, by stage, with empty and with full caches on disk?

    python -m experiments.bench.startup                                       # SmolLM2, three processes of each kind
    python -m experiments.bench.startup --model folder --repeats 5 --json out.json

Each measurement is a separate process that loads the model, makes an engine and generates one token. `generate` is the
engine of `pagedjax generate`, for one request. `LLM()` is the library with its defaults, which compiles every bucket at
start-up. `LLM(lazy)` compiles a bucket when it is first needed. `cold` processes find no XLA program and no attention
kernel on disk; `warm` processes find those of the process before them. `start` is Python itself and all time that is in
no other stage. The stages sum to the total, which is measured from outside, until the token is printed. Processes that
lost more than 5 % of the processors to other machines are shown but not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.peers import STOLEN
from experiments.core.environment import cpu_model, git_state, processor_time, stolen_share
from pagedjax import cli

STAGES = ("start", "import", "load", "compile", "warmup", "first token")
KINDS: dict[str, dict[str, Any]] = {
    "generate": cli.engine_options(cli.parser().parse_args(["generate", ""])),
    "LLM()": {},
    "LLM(lazy)": {"compilation": "lazy"},
}
PROMPT = "The capital of France is"
CHILD = """
import json, sys, time
from pagedjax import LLM, SamplingParams
llm = LLM(sys.argv[1], progress=False, **json.loads(sys.argv[2]))
began = time.perf_counter()
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate(sys.argv[3], params, use_tqdm=False)
from pagedjax.engine import compilations
seconds = time.perf_counter() - began
print(json.dumps({**llm.startup, "first token": seconds, "programs": compilations.counts()}), flush=True)
"""


def start(model: str, options: dict[str, Any], caches: Path) -> dict[str, Any]:
    """Seconds of each stage of one process and in total; the numbers of programs it compiled and found on disk.

    Raises:
        RuntimeError: the process failed; the message has its output.
    """
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(caches),  # XLA's programs and the attention kernel
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # the library's setting for its own folder
    }
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", CHILD, model, json.dumps(options), PROMPT]
    began, processors = time.perf_counter(), processor_time()
    with subprocess.Popen(
        command,
        env={**os.environ, **kept, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        line = child.stdout.readline()
        total, stolen = time.perf_counter() - began, stolen_share(processors)
        _, errors = child.communicate()
    if child.returncode:
        raise RuntimeError(f"the process ended with {child.returncode}:\n{errors[-2000:]}")
    found = json.loads(line)
    programs, cached = found.pop("programs")
    stages = {name: found[name] for name in STAGES[1:]}
    return {
        "start": total - sum(stages.values()),
        **stages,
        "total": total,
        "programs": programs,
        "cached": cached,
        "stolen": stolen or 0.0,
    }


def measure(model: str, kinds: dict[str, dict[str, Any]], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """By "kind, cold" and "kind, warm": `repeats` processes each, in turn. The cold one fills the caches."""
    runs: dict[str, list[dict[str, Any]]] = {f"{kind}, {state}": [] for kind in kinds for state in ("cold", "warm")}
    for _ in range(repeats):
        for kind, options in kinds.items():
            with tempfile.TemporaryDirectory() as caches:
                for state in ("cold", "warm"):
                    run = start(model, options, Path(caches))
                    runs[f"{kind}, {state}"].append(run)
                    note = f", {run['stolen']:.0%} of the processors stolen" if run["stolen"] > 0.005 else ""
                    print(f"  {kind}, {state}: {run['total']:.2f} s{note}", file=sys.stderr, flush=True)
    return runs


def table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Medians of the counted processes. Medians of stages need not sum to the median of the totals."""
    columns = (*STAGES, "total")
    lines = [" ".join([f"{'seconds':16}", *(f"{name:>11}" for name in columns), f"{'programs':>9} {'from disk':>9}"])]
    for name, several in runs.items():
        several = counted(several)
        medians = [statistics.median(run[column] for run in several) for column in columns]
        counts = f"{several[-1]['programs']:9} {several[-1]['cached']:9}"
        lines.append(" ".join([f"{name:16}", *(f"{value:11.2f}" for value in medians), counts]))
    return "\n".join(lines)


def counted(several: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Processes that lost at most `STOLEN` of the processors to other machines; all processes if there is none."""
    return [run for run in several if run["stolen"] <= STOLEN] or several


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as in LLM(model=...)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind, cold and warm")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    kinds = {kind: KINDS[kind] | {"dtype": args.dtype} for kind in args.kinds}
    try:
        runs = measure(args.model, kinds, args.repeats)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(runs))
    if args.json:
        facts = {**git_state(Path(__file__).parent), "cpu": cpu_model(), "cores": os.cpu_count(), "model": args.model}
        Path(args.json).write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
