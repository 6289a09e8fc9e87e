"""Is a real model right on this GPU through the attention kernels?

    python -m experiments.hardware.gpu_goldens --json goldens.json
    python -m experiments.hardware.gpu_goldens --model SmolLM2-135M-Instruct.Q4_1.gguf
    python -m experiments.hardware.gpu_goldens --rehearse  # on a CPU: its implementations, in float32

The reference is tests/goldens/greedy.json: greedy continuations of SmolLM2-135M by transformers, in
float32 on a CPU. For each dtype, one engine has the kernels and one has plain XLA. Each engine runs
in a process of its own.

forced     The prompt with its golden continuation is a prompt. The log-probabilities of the golden
           tokens are compared with the reference: mean and largest difference. This runs chunks.
decoded    All prompts are continued greedily, in one batch. This runs decodes. As long as tokens
           equal the golden ones, their log-probabilities are compared too.

These are faults:

- a mean difference above the limit of the dtype (`MAX_MEAN_DIFFERENCE`);
- a mean or largest difference of the kernels above `MAX_RATIO` times that of XLA;
- another token where the reference has no near tie. A token other than the golden one needs two
  errors whose sum is the reference's margin, so the bound of a margin is twice the largest
  difference. In float32 all tokens must be equal.

Plain XLA on a CPU has a mean of 0.0016 in float16, with 28 of 31 continuations identical, and of
0.011 in bfloat16, with 17.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import arguments_of, bench_parser
from experiments.core.environment import environment
from experiments.core.json_files import write_json
from experiments.hardware.processes import results
from pagedjax.weights.locate import located
from pagedjax.weights.pretrained import DEFAULT_MODEL

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens" / "greedy.json"
# limits of the mean difference
MAX_MEAN_DIFFERENCE = {"float32": 1e-4, "float16": 0.005, "bfloat16": 0.04}
MAX_RATIO = 2.0  # of a difference of the kernels to that of XLA
TOKENS = 64  # of each golden continuation
BLOCK = 16
ROWS = 32
BUDGET = 512


class Job(NamedTuple):
    """One engine, and what it is compared with. tokens: how many of each continuation."""

    dtype: str
    impl: str
    model: str
    goldens: Sequence[Mapping[str, Any]]
    tokens: int


def run_job(job: Job) -> dict[str, Any]:
    """Start the engine of a job. Returns its differences from the goldens, and its times."""
    import jax

    from pagedjax import LLM, load_model

    start = time.perf_counter()
    length = max(len(golden["prompt_token_ids"]) for golden in job.goldens) + job.tokens + 1
    llm = LLM(
        load_model(job.model, dtype=job.dtype),
        attention_impl=job.impl,
        block_size=BLOCK,
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        max_model_len=length,
        token_buckets=(ROWS, BUDGET),
        num_blocks=ROWS * -(-length // BLOCK) + 1,
        progress=False,
        compilation="eager",
    )
    startup = time.perf_counter() - start
    return {
        # this is first, so that no prompt is in the cache yet
        "decoded": greedy_differences(llm, job.goldens, job.tokens),
        "forced": forced_differences(llm, job.goldens, job.tokens),
        "device": jax.devices()[0].device_kind,
        "startup_s": round(startup, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def forced_differences(
    llm: Any, goldens: Sequence[Mapping[str, Any]], tokens: int
) -> dict[str, float]:
    """Compare the log-probability of each golden token, after its golden prefix."""
    from pagedjax import SamplingParams

    prompts = [[*golden["prompt_token_ids"], *golden["token_ids"][:tokens]] for golden in goldens]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    errors = []
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for golden, output in zip(goldens, outputs, strict=True):
        entries = output.prompt_logprobs[-tokens:]
        errors += [
            entry[token].logprob - logprob
            for entry, token, logprob in zip(
                entries, golden["token_ids"], golden["logprobs"], strict=False
            )
        ]
    return differences(errors)


def greedy_differences(
    llm: Any, goldens: Sequence[Mapping[str, Any]], tokens: int
) -> dict[str, Any]:
    """Continue all prompts greedily.

    Returns the differences of log-probabilities, how many continuations equal the golden ones, and
    where each other continuation first differs.
    """
    from pagedjax import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    errors = []
    differ = []
    outputs = llm.generate(
        [golden["prompt_token_ids"] for golden in goldens], params, use_tqdm=False
    )
    for golden, output in zip(goldens, outputs, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        entries = output.outputs[0].logprobs
        other_places = [
            i for i in range(tokens) if token_ids[i : i + 1] != golden["token_ids"][i : i + 1]
        ]
        equal_tokens = other_places[0] if other_places else tokens
        errors += [
            entries[i][token_ids[i]].logprob - golden["logprobs"][i] for i in range(equal_tokens)
        ]
        if equal_tokens < tokens:
            differ.append(
                {
                    "prompt": golden["name"],
                    "at": equal_tokens,
                    "margin": golden["margins"][equal_tokens],
                }
            )
    return {
        **differences(errors),
        "identical": len(goldens) - len(differ),
        "of": len(goldens),
        "differ": differ,
    }


def differences(errors: Sequence[float]) -> dict[str, float]:
    """The mean and the largest absolute error; infinite if an error is not finite, or there is no
    error.
    """
    sizes = np.abs(np.array(errors, np.float64))
    if not sizes.size or not np.isfinite(sizes).all():
        return {"mean": float("inf"), "largest": float("inf")}
    return {"mean": float(sizes.mean()), "largest": float(sizes.max())}


def faults(run: Mapping[str, Any], xla: Mapping[str, Any] | None) -> list[str]:
    """The faults of an engine's run, as sentences. xla: the run of plain XLA in the same dtype."""
    if "failed" in run:
        return [run["failed"]]
    sentences = []
    dtype = run["dtype"]
    # a margin of the reference up to which another token is no fault
    near_tie = 0.0 if dtype == "float32" else 2 * run["forced"]["largest"]
    for kind in ("forced", "decoded"):
        if not run[kind]["mean"] <= MAX_MEAN_DIFFERENCE[dtype]:
            sentences.append(
                f"{kind}: the mean difference is {run[kind]['mean']:.2g}; the limit is "
                f"{MAX_MEAN_DIFFERENCE[dtype]:g}"
            )
        for name in ("mean", "largest"):
            limit = MAX_RATIO * xla[kind][name] if xla and "failed" not in xla else float("inf")
            if dtype != "float32" and run[kind][name] > limit:
                sentences.append(
                    f"{kind}: the {name} difference is {run[kind][name]:.2g}; XLA's allows "
                    f"{limit:.2g}"
                )
    for difference in run["decoded"]["differ"]:
        if difference["margin"] > near_tie:
            place = f"token {difference['at']} of {difference['prompt']!r}"
            sentences.append(
                f"{place} is another, and the reference's margin is {difference['margin']:.3g}, "
                f"not below {near_tie:.2g}"
            )
    return sentences


def with_faults(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The runs, each with its faults as `wrong`."""
    xla = {run["dtype"]: run for run in runs if run["impl"] == "xla"}
    return [{**run, "wrong": faults(run, xla.get(run["dtype"]))} for run in runs]


def line(run: Mapping[str, Any]) -> str:
    """The run of an engine as a line to print."""
    name = f"{run['dtype']:9} {run['impl']:11}"
    if "failed" in run:
        return name + run["failed"][:100]
    parts = [
        f"{kind} {run[kind]['mean']:.5f} {run[kind]['largest']:.4f}"
        for kind in ("forced", "decoded")
    ]
    identical = f"{run['decoded']['identical']} of {run['decoded']['of']} identical"
    return f"{name}{'   '.join(parts)}   {identical}   {run['seconds']:.0f} s"


def checked_model(model: str, expected: str) -> str:
    """The file of the model.

    Raises ValueError if it is missing, or not the model of the goldens.
    """
    file = located(model)
    if not file.is_file():
        raise ValueError(
            f"--model is {model}, which is no file; give the .gguf file of {DEFAULT_MODEL}"
        )
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 != expected:
        raise ValueError(
            f"--model is {file}, with sha256 {sha256[:12]}..., not that of the goldens, "
            f"{expected[:12]}..."
        )
    return str(file)


def main(argv: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="the .gguf file, if the wheel is not installed"
    )
    parser.add_argument("--impls", nargs="+", default=["xla", "pallas_gpu"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=sorted(MAX_MEAN_DIFFERENCE), default=["bfloat16", "float16"]
    )
    parser.add_argument(
        "--prompts", type=int, default=ROWS, help="the shortest ones (default: all)"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of each continuation (default, and most: 64)"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: few prompts and tokens, in float32"
    )
    args = arguments_of(parser, argv, impls=["xla", "cpu"], dtypes=["float32"], prompts=8, tokens=8)
    if not 1 <= args.tokens <= TOKENS:
        parser.error(f"--tokens is {args.tokens}; the reference has {TOKENS}, and one is the least")
    reference = json.loads(GOLDENS.read_text(encoding="utf-8"))
    try:
        model = checked_model(args.model, reference["sha256"])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    goldens = sorted(reference["prompts"], key=lambda golden: len(golden["prompt_token_ids"]))
    goldens = goldens[: args.prompts]
    jobs = [
        Job(dtype, impl, model, goldens, args.tokens)
        for dtype in args.dtypes
        for impl in args.impls
    ]
    machine = environment(device=False)
    runs = []
    for job, result in results(run_job, jobs, len(jobs), args.seconds):
        if isinstance(result, BaseException):
            result = {"failed": f"{type(result).__name__}: {str(result)[:1000]}"}
        run = {"dtype": job.dtype, "impl": job.impl, **result}
        runs.append(run)
        print(line(run), flush=True)
        write_json(args.json, {"where": machine, "runs": with_faults(runs)}, end="")
    sentences = [
        f"{run['dtype']} {run['impl']}: {fault}"
        for run in with_faults(runs)
        for fault in run["wrong"]
    ]
    for fault in sentences:
        print(f"wrong: {fault}")
    print(
        f"{len(runs)} engines, {len(sentences)} faults; differences of log-probabilities: mean "
        "and largest"
    )
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
