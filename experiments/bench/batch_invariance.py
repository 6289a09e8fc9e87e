"""What does batch invariance cost? Two engines of one model, with and without it, in turn, several
rounds.

    python -m experiments.bench.batch_invariance [--rounds 5] [--json out.json]

"W1" is the workload of configs/w1.yaml: 64 requests, prompts of 16 to 256 tokens, outputs of 16 to
128. "long prompts" has 8 requests with prompts of 1,000 to 1,500 tokens and 16 output tokens:
almost all of its time is in chunks, whose attention is what the mode changes. A ratio is seconds
without it over seconds with it, in the same round: the share of the speed that is left.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.bench import harness
from experiments.bench.harness import Workload, cell, ratios, requests_of, run_rounds, seconds
from pagedjax import LLM, load_model

WORKLOADS = {
    "W1": Workload(64, (16, 256), (16, 128)),
    "long prompts": Workload(8, (1000, 1500), (16, 16)),
}
ENGINE: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 1536,
    "num_blocks": 1536,
}


def measure(engines: Mapping[str, LLM], name: str, count: int) -> dict[str, Any]:
    """Run a workload in both engines, `count` rounds. Returns the seconds of each run and the share
    of the speed that is left.

    engines: "without" and "with" batch invariance.
    """
    vocab = engines["without"].engine.model.config.vocab_size
    prompts, params = requests_of(WORKLOADS[name], vocab, seed=1234)
    runs = {mode: partial(seconds, llm, prompts, params) for mode, llm in engines.items()}
    seconds_by_mode = run_rounds(runs, count)
    times = {f"seconds_{mode}": seconds_by_mode[mode] for mode in engines}
    return {
        "workload": name,
        **times,
        **ratios(seconds_by_mode["without"], seconds_by_mode["with"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--rounds", type=harness.at_least_1, default=5)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(argv)
    model = load_model(args.model, dtype=args.dtype)
    modes = {"without": False, "with": True}
    options: dict[str, Any] = {"progress": False, "compilation": "eager", **ENGINE}
    engines = {
        mode: LLM(model, **options, batch_invariant=invariant) for mode, invariant in modes.items()
    }
    results = [measure(engines, name, args.rounds) for name in WORKLOADS]
    rows = []
    for result in results:
        without = statistics.median(result["seconds_without"])
        invariant = statistics.median(result["seconds_with"])
        rows.append((result["workload"], f"{without:.2f} / {invariant:.2f}", cell(result)))
    print(harness.markdown(("workload", "seconds without / with", "ratio"), rows))
    figures = {"model": args.model, "dtype": args.dtype, "workloads": results}
    harness.write_report(args.json, figures)


if __name__ == "__main__":
    main()
