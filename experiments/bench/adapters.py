"""What do adapters cost? An engine without adapters and engines with eight take turns.

    python -m experiments.bench.adapters [--ranks 8 16] [--rounds 5] [--json out.json]

A batch of 32 requests, each with one of eight adapters of all matrices of attention and MLP.
"decodes" has prompts of 16 tokens and outputs of 96: almost all steps are decodes of 32 requests.
"prompts" has prompts of 256 tokens and outputs of 8. For each rank one engine runs both "8
adapters" and "no adapter", where no request uses any. A share is the seconds of the engine without
adapters over those of the other one, in the same round: how much of the speed is left.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Workload, cell, ratios, requests_of, run_rounds, seconds
from pagedjax import LLM, LoRARequest, load_model
from pagedjax.device.adapters import Adapter, sizes_of
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.weights.adapter_files import adapter_of, modules_of

ADAPTERS = 8
WORKLOADS = {
    "decodes": Workload(32, (16, 16), (96, 96)),
    "prompts": Workload(32, (256, 256), (8, 8)),
}
ENGINE: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "num_blocks": 1024,
}


def random_adapter(config: DecoderConfig, name: str, rank: int, seed: int) -> Adapter:
    """An adapter of every matrix that may have one."""
    rng = np.random.default_rng(seed)
    factors = {}
    for module, places in modules_of(config).items():
        sizes = [sizes_of(config, place) for place in places]
        inputs, _ = sizes[0]  # the same for all parts of a module
        outputs = sum(part_outputs for _, part_outputs in sizes)
        a = rng.standard_normal((rank, inputs))
        b = rng.standard_normal((outputs, rank))
        # 24 is the root of SmolLM2's hidden size
        factors[module] = a.astype(np.float32) / 24, b.astype(np.float32) / 24
    return adapter_of(factors, {"lora_alpha": rank}, config, name)


def measure(plain_llm: LLM, engines: dict[int, LLM], name: str, num_rounds: int) -> dict[str, Any]:
    """Run a workload in all engines, for some rounds.

    Returns the seconds of each run, and the shares of the speed that are left.

    Args:
        plain_llm: the engine without adapters.
        engines: the engines by rank, each with the adapters "0" to "7" loaded.
    """
    vocab = plain_llm.engine.model.config.vocab_size
    prompts, params = requests_of(WORKLOADS[name], vocab, seed=1234)
    adapters = [LoRARequest(str(i % ADAPTERS)) for i in range(len(prompts))]
    runs = {"without": partial(seconds, plain_llm, prompts, params)}
    for rank, llm in engines.items():
        run = partial(seconds, llm, prompts, params)
        runs[f"rank {rank}, no adapter"] = run
        runs[f"rank {rank}, {ADAPTERS} adapters"] = partial(run, lora_request=adapters)
    seconds_by_run = run_rounds(runs, num_rounds)
    shares = {
        run: ratios(seconds_by_run["without"], times)
        for run, times in seconds_by_run.items()
        if run != "without"
    }
    return {"workload": name, "seconds": seconds_by_run, "shares": shares}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--rounds", type=harness.at_least_1, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=harness.at_least_1, nargs="+", default=[8, 16])
    args = parser.parse_args(argv)
    model = load_model(args.model, dtype=args.dtype)
    plain_llm = LLM(model, progress=False, compilation="eager", **ENGINE)
    engines = {}
    for rank in args.ranks:
        options = {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": rank}
        engines[rank] = LLM(model, progress=False, compilation="eager", **ENGINE, **options)
        for i in range(ADAPTERS):
            engines[rank].engine.load_adapter(
                random_adapter(model.model.config, str(i), rank, seed=i)
            )
    results = [measure(plain_llm, engines, name, args.rounds) for name in WORKLOADS]
    rows = []
    for result in results:
        for run, times in result["seconds"].items():
            speed_left = cell(result["shares"][run]) if run in result["shares"] else ""
            rows.append((result["workload"], run, f"{statistics.median(times):.2f}", speed_left))
    columns = ("workload", "engine", "median seconds", "share of the speed without adapters")
    print(harness.markdown(columns, rows, texts=2))
    figures = {"model": args.model, "dtype": args.dtype, "workloads": results}
    harness.write_report(args.json, figures)


if __name__ == "__main__":
    main()
