"""This engine beside transformers on workload W1, and a decode step beside its physical floors, in one run.

    python -m experiments.bench_transformers [--repeats 3] [--file w1.json] [--json out.json] [--budget 512]
                                             [--only floors|throughput]

Needs the `oracle` extra (torch). Workload W1: 64 requests at time 0, prompts uniform 16-256 and outputs uniform
16-128 random tokens, greedy, EOS ignored. Contenders take turns, so that a slow minute of the machine hits all of
them; quoted are medians. transformers runs one request at a time and in static batches of 8 and 16 in order of
arrival, each batch as long as its longest request; only tokens that were asked for count. On a shared machine a pass
is repeated when its host gave processor time to others. This engine takes `--budget` tokens a step: 512 keep the
activations in a CPU's cache, and leave less of the last prompt step empty than the default of 2,048.

Floors of a decode step, timed in turn with it: reading every weight once (at batch 1), and the step's own matrix
products alone, both without and with the products of attention over contiguous keys and values.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.environment import processor_time, stolen_share
from pagedjax import LLM, SamplingParams

STOLEN = 0.05  # a pass during which the host gave more of the processors to others is shown, not counted
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 512, 1024)  # 24 and 48, because a W1 decode shrinks through them
EXTRA = 2  # times as many passes as were asked for, at most, to replace those

Work = list[tuple[list[int], int]]  # prompt token ids, tokens to generate


def w1(file: str | None, vocab: int, seed: int = 1234) -> Work:
    """The workload from a JSON list of {"prompt": [ids], "n": count}, or drawn with the same shape."""
    if file:
        return [(entry["prompt"], entry["n"]) for entry in json.loads(Path(file).read_text())]
    rng = np.random.default_rng(seed)
    lengths = rng.integers(16, 257, 64), rng.integers(16, 129, 64)
    return [(rng.integers(17, vocab, p).tolist(), int(n)) for p, n in zip(*lengths, strict=True)]


def run_engine(llm: LLM, work: Work) -> list[tuple[int, ...]]:
    llm.engine.reset()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
    outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def transformers_model() -> Any:
    import torch  # pyright: ignore[reportMissingImports]  (the oracle extra)
    from transformers import AutoModelForCausalLM

    from pagedjax.weights.checkpoint import embedded_file

    file = embedded_file("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def run_transformers(model: Any, work: Work, batch: int) -> list[tuple[int, ...]]:
    """Static batches, left-padded, each run until its longest request has its tokens."""
    import torch  # pyright: ignore[reportMissingImports]  (the oracle extra)

    tokens: list[tuple[int, ...]] = []
    for start in range(0, len(work), batch):
        part = work[start : start + batch]
        width, steps = max(len(p) for p, _ in part), max(n for _, n in part)
        ids = torch.tensor([[2] * (width - len(p)) + p for p, _ in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        tokens += [tuple(row[width : width + n].tolist()) for row, (_, n) in zip(out, part, strict=True)]
    return tokens


def throughput(work: Work, repeats: int, budget: int) -> dict[str, Any]:
    llm = LLM(
        max_num_batched_tokens=budget,
        max_num_seqs=64,
        max_model_len=512,
        dtype="float32",
        token_buckets=[size for size in BUCKETS if size < budget] + [budget],
    )
    model = transformers_model()
    contenders: dict[str, Callable[[], list[tuple[int, ...]]]] = {"this engine": lambda: run_engine(llm, work)}
    for batch in (1, 8, 16):
        name = "transformers, one at a time" if batch == 1 else f"transformers, static batch {batch}"
        contenders[name] = lambda batch=batch: run_transformers(model, work, batch)
    run_engine(llm, work[:8])
    run_transformers(model, work[:2], 2)

    count = sum(n for _, n in work)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for left in range((1 + EXTRA) * repeats, 0, -1):
        for name, contender in contenders.items():
            if len(rates[name]) == repeats:
                continue
            started, processors = time.perf_counter(), processor_time()
            answers[name] = contender()
            rate, stolen = count / (time.perf_counter() - started), stolen_share(processors) or 0.0
            counts = stolen <= STOLEN or left <= repeats - len(rates[name])
            if counts:
                rates[name].append(rate)
            note = f"  {stolen:.0%} of the processors stolen{'' if counts else ': not counted'}"
            print(f"  {name:32} {rate:7.1f} output tokens/s{note if stolen > 0.005 else ''}", flush=True)

    ours = answers["this engine"]
    agree = sum(a == b for a, b in zip(ours, answers["transformers, one at a time"], strict=True))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name != "this engine")
    print(f"\n{'':32}  median     min     max   ratio to the best of transformers")
    for name, values in rates.items():
        print(f"{name:32} {medians[name]:7.1f} {min(values):7.1f} {max(values):7.1f} {medians[name] / best:7.2f}")
    print(f"greedy tokens equal to transformers' (one at a time): {agree} of {len(work)} requests\n")
    return {"rates": rates, "ratio": medians["this engine"] / best, "agree": agree, "requests": len(work)}


def floors(batches: Sequence[int], context: int, repeats: int) -> list[dict[str, Any]]:
    """The median decode step of each batch size beside what it cannot be faster than."""
    from experiments.floors import attention_products, read_weights, weight_products

    llm = LLM(max_num_batched_tokens=2048, max_num_seqs=max(batches), max_model_len=512, dtype="float32")
    model, rows = llm.engine.model, []
    for batch in batches:
        parts = {
            "read weights": read_weights(model),
            "weight products": weight_products(model, batch),
            "attention products": attention_products(model, batch, context),
        }
        prompts = [(np.random.default_rng(i).integers(17, 40000, context - 20).tolist(), 64) for i in range(batch)]
        llm.engine.reset()
        for i, (prompt, n) in enumerate(prompts):
            llm.engine.add(str(i), prompt, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
        while sum(seq.computed for seq in llm.engine.state.running.seqs) == 0 or _prefilling(llm):
            llm.engine.step()
        times: dict[str, list[float]] = {"step": [], "host": [], **{name: [] for name in parts}}
        for _ in range(repeats):
            result = llm.engine.step()
            assert result is not None
            times["step"].append(result.device_seconds)
            times["host"].append(result.host_seconds)
            for name, run in parts.items():
                started = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - started)
        ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        rows.append({"batch": batch, "context": context, **ms})
    _print_floors(rows)
    return rows


def _prefilling(llm: LLM) -> bool:
    state = llm.engine.state
    return bool(state.waiting) or any(n - c > 1 for n, c in zip(*state.running[1:], strict=True))


def _print_floors(rows: Sequence[dict[str, Any]]) -> None:
    print("median milliseconds; context", rows[0]["context"])
    print("batch    step   host   read weights (step/it)   weight products (step/them)   with attention's (step/them)")
    for r in rows:
        step, read, weights = r["step"], r["read weights"], r["weight products"]
        both = weights + r["attention products"]
        print(f"{r['batch']:5} {step:7.1f} {r['host']:6.2f} {read:9.1f} ({step / read:5.2f})", end="")
        print(f" {weights:14.1f} ({step / weights:5.2f}) {both:20.1f} ({step / both:5.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=512, help="tokens a step of this engine")
    parser.add_argument("--file", help="a JSON list of requests instead of drawn ones")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--only", choices=("floors", "throughput"))
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": platform.machine(), "python": platform.python_version()}
    if args.only != "throughput":
        figures["floors"] = floors((1, 8, 64), 253, 15)
    if args.only != "floors":
        figures["throughput"] = throughput(w1(args.file, 49152), args.repeats, args.budget)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
