"""How long does a CPU wait for the host between decode steps, according to XLA's own trace?

    python -m experiments.bench.idle [--sequences 1 64 256] [--lookahead 0 1] [--steps 20] [--json out.json]

The default model decodes greedily; `idle` is the time from the end of one step on XLA's threads to
the beginning of the next one. It is the whole cost of the host's work (schedule, pack, dispatch,
transfer, commit) that is not hidden behind the step before. `host` is the host time of a
`StepResult`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from experiments.bench.harness import bench_parser, computes_prompts, markdown, write_report
from pagedjax import LLM, Engine, SamplingParams
from pagedjax.weights.pretrained import LoadedModel, load_model

PROMPT = 24  # tokens; their content does not matter
WARM_STEPS = 5  # decode steps before the traced ones
# the names of the events at the beginning and the end of a program
BEGIN_EVENT = "ThunkExecutor::Execute"
END_EVENT = "ThunkExecutor::Execute (wait for completion)"
# threads that begin programs; others run parts of them under the same event names
CALLERS = "tf_XLAPjRtCpuClient"


class Idle(NamedTuple):
    """The times of one setting over the traced steps, in milliseconds."""

    sequences: int
    lookahead: int
    step: float  # median, begin to end
    idle: float  # median, end to begin
    longest: float  # the longest idle time
    host: float  # median


def measure(model: LoadedModel, sequences: int, lookahead: int, steps: int) -> Idle:
    """Trace `steps` decode steps of `sequences` sequences. Returns their times."""
    length = PROMPT + WARM_STEPS + steps + 2 * (lookahead + 1)
    budget = max(sequences, min(512, sequences * PROMPT))
    llm = LLM(
        model,
        max_num_seqs=sequences,
        max_model_len=length,
        max_num_batched_tokens=budget,
        token_buckets=sorted({sequences, budget}),
        lookahead=lookahead,
        compilation="eager",
    )
    decode_all(llm, sequences, output=length - PROMPT)
    spans, host_ms = trace_steps(llm.engine, steps)
    # the steps are the longest programs; the others are small helpers
    step_times = sorted((end - begin for begin, end in spans), reverse=True)[:steps]
    # the median, because one step may have waited for another process
    median_step = statistics.median(step_times) if step_times else 0.0
    spans = [(begin, end) for begin, end in spans if end - begin > median_step / 10]
    if len(spans) < 2:
        raise RuntimeError(
            f"the trace has {len(spans)} steps; this version of XLA does not name them "
            f"{BEGIN_EVENT!r}"
        )
    idle = [(begin - last_end) / 1e6 for (_, last_end), (begin, _) in pairwise(spans)]
    step = statistics.median(end - begin for begin, end in spans) / 1e6
    return Idle(
        sequences, lookahead, step, statistics.median(idle), max(idle), statistics.median(host_ms)
    )


def decode_all(llm: LLM, sequences: int, output: int) -> None:
    """Add requests, and make steps until all of them decode, and WARM_STEPS more.

    output: tokens of each request.
    """
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(sequences):
        prompt = rng.integers(1, llm.engine.model.config.vocab_size, PROMPT).tolist()
        llm.engine.add(str(i), prompt, params)
    while computes_prompts(llm):
        llm.engine.step()
    for _ in range(WARM_STEPS):
        llm.engine.step()


def trace_steps(engine: Engine, steps: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Make steps under XLA's tracer.

    Returns (begin, end) of each program in nanoseconds, and the host's milliseconds of each step.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 2
    options.python_tracer_level = 0
    host_ms = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                result = engine.step()
                assert result is not None, "the requests are long enough for all steps"
                host_ms.append(1e3 * result.host_seconds)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return sorted(programs(ProfileData.from_file(os.fspath(file)))), host_ms


def programs(trace: Any) -> Iterator[tuple[float, float]]:
    """Yields (begin, end) in nanoseconds of each program whose caller waited for its end."""
    for plane in trace.planes:
        for line in plane.lines:
            if not (line.name or "").startswith(CALLERS):
                continue
            begin = None
            for event in sorted(line.events, key=lambda event: event.start_ns):
                if event.name == BEGIN_EVENT:
                    begin = event.start_ns
                elif event.name == END_EVENT and begin is not None:
                    yield begin, event.end_ns
                    begin = None


def table(rows: Sequence[Idle]) -> str:
    columns = (
        "sequences",
        "lookahead",
        "step, ms",
        "idle, ms",
        "longest",
        "idle / step",
        "host, ms",
    )
    cells = (
        (
            str(row.sequences),
            str(row.lookahead),
            f"{row.step:.1f}",
            f"{row.idle:.2f}",
            f"{row.longest:.2f}",
            f"{100 * row.idle / row.step:.1f} %",
            f"{row.host:.2f}",
        )
        for row in rows
    )
    return markdown(columns, cells, texts=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    if jax.default_backend() != "cpu":
        parser.error(
            "this benchmark reads the trace of a CPU, and the default device is a "
            f"{jax.default_backend()}"
        )
    if min(args.sequences) < 1 or args.steps < 3 or min(args.lookahead) < 0:
        parser.error(
            "--sequences must be at least 1, --steps at least 3 and --lookahead at least 0"
        )
    model = load_model(args.model, dtype="float32")
    rows = [
        measure(model, n, lookahead, args.steps)
        for n in args.sequences
        for lookahead in args.lookahead
    ]
    print(table(rows))
    write_report(args.json, {"steps": args.steps, "rows": [row._asdict() for row in rows]})


if __name__ == "__main__":
    main()
