"""How many seconds pass from a command to its first token, by stage, with empty and with full
caches on disk?

    python -m experiments.bench.startup                                       # SmolLM2, three processes of each kind
    python -m experiments.bench.startup --model folder --repeats 5 --json out.json
    python -m experiments.bench.startup --kinds generate-answer serve serve-eager    # until a whole answer

Each measurement is a separate process that loads the model, makes an engine and generates one
token. `generate` is the engine of `pagedjax generate`, for one request. `LLM()` is the library with
its defaults, which compiles the largest bucket at start-up and the others behind its steps.
`LLM(eager)` compiles every bucket at start-up, `LLM(lazy)` a bucket when it is first needed. `cold`
processes find no XLA program and no attention kernel on disk; `warm` processes find those of the
process before them. `start` is Python itself and all time that is in no other stage. The stages sum
to the total, which is measured from outside, until the token is printed. Processes that lost more
than 5 % of the processors to other machines are shown but not counted.

`generate-answer`, `serve` and `serve-eager` are the commands themselves, until an answer of 16
tokens: that of `pagedjax generate`, or the first one of a client that asks as soon as the server
listens. `serve` compiles behind its steps, `serve-eager` everything first. Then the client asks
again; it waits until all programs are there, and asks a last time. So a warm server finds all of
its programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.harness import bench_parser, check_least
from experiments.bench.peers import STOLEN
from experiments.core.environment import cpu_model, git_state, processor_time, stolen_share
from experiments.core.json_files import write_json
from pagedjax.commands import cli

STAGES = ("start", "import", "load", "compile", "warmup", "first token")
KINDS: dict[str, dict[str, Any]] = {
    "generate": cli.engine_options(cli.parser().parse_args(["generate", ""])),
    "LLM()": {},
    "LLM(eager)": {"compilation": "eager"},
    "LLM(lazy)": {"compilation": "lazy"},
}
PROMPT = "The capital of France is"
COMMANDS: dict[str, list[str]] = {
    "generate-answer": ["generate", PROMPT, "--only-new", "--max-tokens", "16", "--model"],
    "serve": ["serve", "--port", "0"],
    "serve-eager": ["serve", "--port", "0", "--compilation", "eager"],
}
TIMES = ("listening", "total", "second answer", "all programs", "last answer")  # of a command
CHILD = """
import json, sys, time
from pagedjax import LLM, SamplingParams
llm = LLM(sys.argv[1], progress=False, **json.loads(sys.argv[2]))
began = time.perf_counter()
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate(sys.argv[3], params, use_tqdm=False)
from pagedjax.engine import compilations
seconds = time.perf_counter() - began
stages = {**llm.startup, "first token": seconds, "programs": compilations.counts()}
print(json.dumps(stages), flush=True)
"""


def run_engine(model: str, options: dict[str, Any], caches: Path) -> dict[str, Any]:
    """Run a process that makes an engine and generates one token.

    Returns the seconds of each stage and in total, and the numbers of programs that it compiled and
    that it read from disk.

    Raises:
        RuntimeError: the process failed; the message has its output.
    """
    command = [sys.executable, "-c", CHILD, model, json.dumps(options), PROMPT]
    start = time.perf_counter()
    processors = processor_time()
    with subprocess.Popen(
        command,
        env=environment(caches),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        line = child.stdout.readline()
        total = time.perf_counter() - start
        stolen = stolen_share(processors)
        _, errors = child.communicate()
    if child.returncode:
        raise RuntimeError(f"the process ended with {child.returncode}:\n{errors[-2000:]}")
    report = json.loads(line)
    programs, cached = report.pop("programs")
    stages = {name: report[name] for name in STAGES[1:]}
    return {
        "start": total - sum(stages.values()),
        **stages,
        "total": total,
        "programs": programs,
        "cached": cached,
        "stolen": stolen or 0.0,
    }


def environment(caches: Path) -> dict[str, str]:
    """The environment of a process that keeps compiled programs in the folder `caches`."""
    root = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(caches),  # XLA's programs and the attention kernel
        # the library's setting for its own folder
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def run_command(words: Sequence[str], caches: Path) -> dict[str, Any]:
    """Run a command of pagedjax until its answer.

    Returns the seconds from its start, and the answer. For a server it also returns the times until
    it listens and until it has all programs, and the times of two later answers.

    Raises:
        RuntimeError: the process ended without an answer; the message has its output.
    """
    start = time.perf_counter()
    processors = processor_time()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", "pagedjax", *words],
            env=environment(caches),
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as child,
    ):
        assert child.stdout
        try:
            if words[0] == "generate":
                result = read_answer(child, start)
            else:
                url = child.stdout.readline().decode().partition(" at ")[2].strip()
                result = ask_server(url, start) if url else {}
        finally:
            child.terminate()
        if "total" not in result:
            errors.seek(0)
            raise RuntimeError(f"{words[0]} gave no answer:\n{errors.read().decode()[-2000:]}")
    return result | {"stolen": stolen_share(processors) or 0.0}


def read_answer(child: subprocess.Popen[bytes], start: float) -> dict[str, Any]:
    """Read all that a process prints.

    Returns the text, and the seconds until its last character.
    """
    assert child.stdout
    text = b""
    end = start
    while piece := os.read(child.stdout.fileno(), 4096):
        text += piece
        end = time.perf_counter()
    return {"total": end - start, "text": text.decode().removesuffix("\n")} if text else {}


def ask_server(url: str, start: float) -> dict[str, Any]:
    """Ask a server that has begun to listen. Returns its first answer, and the times of `TIMES`."""
    result: dict[str, Any] = {"listening": time.perf_counter() - start}
    result["text"] = ask(url)
    result["total"] = time.perf_counter() - start
    result["second answer"] = time_answer(url)
    while missing_programs(url):
        time.sleep(0.1)
    result["all programs"] = time.perf_counter() - start
    return result | {"last answer": time_answer(url)}


def time_answer(url: str) -> float:
    """Ask a server. Returns the seconds until its answer."""
    start = time.perf_counter()
    ask(url)
    return time.perf_counter() - start


def ask(url: str) -> str:
    """Ask a server for 16 greedy tokens after the prompt. Returns them as text."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 16, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{url}/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["text"]


def missing_programs(url: str) -> int:
    """The number of programs that a server has still to compile, by its metrics."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60) as answer:
        (value,) = re.findall(
            r"^pagedjax:missing_programs\S* (\S+)$", answer.read().decode(), re.MULTILINE
        )
    return round(float(value))


def measure(
    model: str, kinds: Sequence[str], dtype: str, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Run `repeats` processes of each kind, cold and warm, in turn. The cold one fills the caches.

    Returns the runs by "kind, cold" and "kind, warm".
    """
    runs: dict[str, list[dict[str, Any]]] = {
        f"{kind}, {state}": [] for kind in kinds for state in ("cold", "warm")
    }
    for _ in range(repeats):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as caches:
                for state in ("cold", "warm"):
                    if kind in COMMANDS:
                        run = run_command([*COMMANDS[kind], model, "--dtype", dtype], Path(caches))
                    else:
                        run = run_engine(model, KINDS[kind] | {"dtype": dtype}, Path(caches))
                    runs[f"{kind}, {state}"].append(run)
                    line = f"  {kind}, {state}: {run['total']:.2f} s"
                    if run["stolen"] > 0.005:
                        line += f", {run['stolen']:.0%} of the processors stolen"
                    print(line, file=sys.stderr, flush=True)
    return runs


def table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Medians of the counted processes.

    Medians of stages need not sum to the median of the totals.
    """
    columns = (*STAGES, "total")
    lines = [
        " ".join(
            [
                f"{'seconds':16}",
                *(f"{name:>11}" for name in columns),
                f"{'programs':>9} {'from disk':>9}",
            ]
        )
    ]
    for name, runs_of_kind in runs.items():
        valid = valid_runs(runs_of_kind)
        medians = [statistics.median(run[column] for run in valid) for column in columns]
        counts = f"{valid[-1]['programs']:9} {valid[-1]['cached']:9}"
        lines.append(" ".join([f"{name:16}", *(f"{value:11.2f}" for value in medians), counts]))
    return "\n".join(lines)


def answers_table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Medians and extremes of the counted commands.

    The last column has the times until the answer, over those of the first kind.
    """
    lines = [
        " ".join(
            [f"{'seconds':22}", *(f"{name:>20}" for name in TIMES), f"{'times the first':>20}"]
        )
    ]
    first = next(iter(runs)).partition(",")[0]
    for name, runs_of_kind in runs.items():
        first_runs = runs[f"{first},{name.partition(',')[2]}"]
        ratios = [
            run["total"] / base["total"]
            for run, base in zip(runs_of_kind, first_runs, strict=True)  # of the same round
            if max(run["stolen"], base["stolen"]) <= STOLEN
        ]
        valid = valid_runs(runs_of_kind)
        cells = [spread([run[column] for run in valid if column in run]) for column in TIMES]
        lines.append(
            " ".join([f"{name:22}", *(f"{cell:>20}" for cell in (*cells, spread(ratios)))])
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """The median and the extremes as text; "" for no values."""
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def valid_runs(runs: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The runs that lost at most `STOLEN` of the processors to other machines; all runs if there
    are no such ones.
    """
    return [run for run in runs if run["stolen"] <= STOLEN] or runs


def startup_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *COMMANDS], default=list(KINDS))
    parser.add_argument(
        "--repeats", type=int, default=3, help="processes of each kind, cold and warm"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = startup_parser()
    args = parser.parse_args(argv)
    check_least(parser, args, repeats=1)
    try:
        runs = measure(args.model, args.kinds, args.dtype, args.repeats)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    commands = {name: runs[name] for name in runs if name.partition(",")[0] in COMMANDS}
    engines = {name: runs[name] for name in runs if name not in commands}
    if engines:
        print(table(engines))
    if commands:
        print(answers_table(commands))
        answers = {
            name: sorted({run["text"] for run in runs_of_command})
            for name, runs_of_command in commands.items()
        }
        print("answers:", answers)
    if args.json:
        facts = {
            **git_state(Path(__file__).parent),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "model": args.model,
        }
        write_json(args.json, {**facts, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
