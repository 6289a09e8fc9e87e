"""Is a real model right on this GPU through the attention kernels?

    python -m experiments.hardware.gpu_goldens --json goldens.json
    python -m experiments.hardware.gpu_goldens --model SmolLM2-135M-Instruct.Q4_1.gguf
    python -m experiments.hardware.gpu_goldens --rehearse         # on a CPU: its implementations, in float32

The reference is tests/goldens/greedy.json: greedy continuations of SmolLM2-135M by transformers, in float32 on a CPU.
For each dtype, one engine has the kernels and one has plain XLA. Each runs in a process of its own.

forced     The prompt with its golden continuation is a prompt. The log-probabilities of the golden tokens are compared
           with the reference: mean and largest difference. This runs chunks.
decoded    All prompts are continued greedily, in one batch. This runs decodes. As long as tokens equal the golden ones,
           their log-probabilities are compared too.

Wrong is: a mean difference above the limit of the dtype (`MOST`); a mean or largest difference of the kernels above
`FACTOR` times that of XLA; another token where the reference has no near tie. A token other than the golden one needs
two errors whose sum is the reference's margin, so the bound of a margin is twice the largest difference. In float32 all
tokens must be equal. Plain XLA on a CPU has a mean of 0.0016 in float16, with 28 of 31 continuations identical, and of
0.011 in bfloat16, with 17.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.core.environment import environment
from experiments.hardware.processes import results
from pagedjax.weights.locate import located
from pagedjax.weights.pretrained import DEFAULT_MODEL

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens" / "greedy.json"
MOST = {"float32": 1e-4, "float16": 0.005, "bfloat16": 0.04}  # of the mean difference
FACTOR = 2.0
TOKENS = 64  # of each golden continuation
BLOCK, ROWS, BUDGET = 16, 32, 512


class Job(NamedTuple):
    """One engine, and what it is compared with. tokens: of each continuation."""

    dtype: str
    impl: str
    model: str
    goldens: Sequence[Mapping[str, Any]]
    tokens: int


def measured(job: Job) -> dict[str, Any]:
    """The differences of an engine from the goldens, see `forced` and `decoded`."""
    import jax

    from pagedjax import LLM, load_model

    began, length = (
        time.perf_counter(),
        max(len(one["prompt_token_ids"]) for one in job.goldens) + job.tokens + 1,
    )
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
    startup = time.perf_counter() - began
    return {
        "decoded": decoded(
            llm, job.goldens, job.tokens
        ),  # first, so that no prompt is found in the cache
        "forced": forced(llm, job.goldens, job.tokens),
        "device": jax.devices()[0].device_kind,
        "startup_s": round(startup, 1),
        "seconds": round(time.perf_counter() - began, 1),
    }


def forced(llm: Any, goldens: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, float]:
    """The differences of log-probabilities of the golden tokens, where each follows its golden prefix."""
    from pagedjax import SamplingParams

    prompts = [[*one["prompt_token_ids"], *one["token_ids"][:tokens]] for one in goldens]
    params, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for one, out in zip(goldens, llm.generate(prompts, params, use_tqdm=False), strict=True):
        entries = out.prompt_logprobs[-tokens:]
        found += [
            e[t].logprob - p
            for e, t, p in zip(entries, one["token_ids"], one["logprobs"], strict=False)
        ]
    return differences(found)


def decoded(llm: Any, goldens: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """How many greedy continuations are the golden ones, and where the others differ first."""
    from pagedjax import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    found, differ = [], []
    outputs = llm.generate([one["prompt_token_ids"] for one in goldens], params, use_tqdm=False)
    for one, out in zip(goldens, outputs, strict=True):
        got, entries = list(out.outputs[0].token_ids), out.outputs[0].logprobs
        same = next(
            (i for i in range(tokens) if got[i : i + 1] != one["token_ids"][i : i + 1]), tokens
        )
        found += [entries[i][got[i]].logprob - one["logprobs"][i] for i in range(same)]
        if same < tokens:
            differ.append({"prompt": one["name"], "at": same, "margin": one["margins"][same]})
    return {
        **differences(found),
        "identical": len(goldens) - len(differ),
        "of": len(goldens),
        "differ": differ,
    }


def differences(found: Sequence[float]) -> dict[str, float]:
    """Mean and largest absolute value; infinite if one is not finite, or there is none."""
    sizes = np.abs(np.array(found, np.float64))
    if not sizes.size or not np.isfinite(sizes).all():
        return {"mean": float("inf"), "largest": float("inf")}
    return {"mean": float(sizes.mean()), "largest": float(sizes.max())}


def faults(one: Mapping[str, Any], xla: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with the result of an engine, as sentences. xla: that of plain XLA in the same dtype."""
    if "failed" in one:
        return [one["failed"]]
    wrong, least, dtype = [], 2 * one["forced"]["largest"], one["dtype"]
    for kind in ("forced", "decoded"):
        if not one[kind]["mean"] <= MOST[dtype]:
            wrong.append(
                f"{kind}: the mean difference is {one[kind]['mean']:.2g}; the limit is {MOST[dtype]:g}"
            )
        for name in ("mean", "largest"):
            limit = FACTOR * xla[kind][name] if xla and "failed" not in xla else float("inf")
            if dtype != "float32" and one[kind][name] > limit:
                wrong.append(
                    f"{kind}: the {name} difference is {one[kind][name]:.2g}; XLA's allows {limit:.2g}"
                )
    if dtype == "float32":
        least = 0.0
    for at in one["decoded"]["differ"]:
        if at["margin"] > least:
            where = f"token {at['at']} of {at['prompt']!r}"
            wrong.append(
                f"{where} is another, and the reference's margin is {at['margin']:.3g}, not below {least:.2g}"
            )
    return wrong


def judged(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results, each with `wrong`, what is wrong with it."""
    xla = {one["dtype"]: one for one in found if one["impl"] == "xla"}
    return [{**one, "wrong": faults(one, xla.get(one["dtype"]))} for one in found]


def line(one: Mapping[str, Any]) -> str:
    name = f"{one['dtype']:9} {one['impl']:11}"
    if "failed" in one:
        return name + one["failed"][:100]
    parts = [
        f"{kind} {one[kind]['mean']:.5f} {one[kind]['largest']:.4f}"
        for kind in ("forced", "decoded")
    ]
    same = f"{one['decoded']['identical']} of {one['decoded']['of']} identical"
    return f"{name}{'   '.join(parts)}   {same}   {one['seconds']:.0f} s"


def checked_model(model: str, expected: str) -> str:
    """The model, if it is the one of the goldens. Raises ValueError if it is another, or missing."""
    file = located(model)
    if not file.is_file():
        raise ValueError(
            f"--model is {model}, which is no file; give the .gguf file of {DEFAULT_MODEL}"
        )
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != expected:
        raise ValueError(
            f"--model is {file}, with sha256 {found[:12]}..., not that of the goldens, {expected[:12]}..."
        )
    return str(file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="the .gguf file, if the wheel is not installed"
    )
    parser.add_argument("--impls", nargs="+", default=["xla", "pallas_gpu"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=sorted(MOST), default=["bfloat16", "float16"]
    )
    parser.add_argument(
        "--prompts", type=int, default=ROWS, help="the shortest ones (default: all)"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of each continuation (default, and most: 64)"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time")
    parser.add_argument("--json", type=Path, help="write results to this file as they come")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: few prompts and tokens, in float32"
    )
    args = parser.parse_args(argv)
    if args.rehearse:
        parser.set_defaults(impls=["xla", "cpu"], dtypes=["float32"], prompts=8, tokens=8)
        args = parser.parse_args(argv)
    if not 1 <= args.tokens <= TOKENS:
        parser.error(f"--tokens is {args.tokens}; the reference has {TOKENS}, and one is the least")
    kept = json.loads(GOLDENS.read_text(encoding="utf-8"))
    try:
        model = checked_model(args.model, kept["sha256"])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    goldens = sorted(kept["prompts"], key=lambda one: len(one["prompt_token_ids"]))[: args.prompts]
    jobs = [
        Job(dtype, impl, model, goldens, args.tokens)
        for dtype in args.dtypes
        for impl in args.impls
    ]
    where, found = environment(device=False), []
    for job, result in results(measured, jobs, len(jobs), args.seconds):
        failed = {"failed": f"{type(result).__name__}: {str(result)[:1000]}"}
        one = {"dtype": job.dtype, "impl": job.impl} | (
            failed if isinstance(result, BaseException) else result
        )
        found.append(one)
        print(line(one), flush=True)
        if args.json:
            args.json.write_text(
                json.dumps({"where": where, "runs": judged(found)}, indent=1), encoding="utf-8"
            )
    wrong = [
        f"{one['dtype']} {one['impl']}: {fault}" for one in judged(found) for fault in one["wrong"]
    ]
    for fault in wrong:
        print(f"wrong: {fault}")
    print(
        f"{len(found)} engines, {len(wrong)} faults; differences of log-probabilities: mean and largest"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
