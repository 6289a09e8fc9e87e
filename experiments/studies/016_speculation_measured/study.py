"""016: up to how many sequences drafts pay, measured on JAX's device with drafts of a known
acceptance.

It has no config, because experiments.bench.speculation serves the requests. That module also checks
that drafts change no token.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from experiments.analysis import figures
from experiments.bench.speculation import Pass, Workload, measure
from experiments.bench.speculation import run as serve
from experiments.studies.findings import Claim, Findings, markdown, rounded, span
from pagedjax import LLM, load_model
from pagedjax.engine import compilations
from pagedjax.weights.pretrained import DEFAULT_MODEL, LoadedModel

QUESTION = "Up to how many sequences do drafts pay on this machine?"
PAPER = "Speculative decoding (Leviathan et al. 2023), equation 1"
DRAFTS = 3
PROMPT = 64  # tokens
BUDGET = 256  # tokens of a step at most
FIXED = f"{DRAFTS} drafts"
ADAPTIVE = "adaptive"
WITHIN = 1.05
WHY = "outputs are short, and a request's last steps have fewer drafts"


class Size(NamedTuple):
    batches: tuple[int, ...]
    acceptances: tuple[float, ...]
    output: int  # tokens of a request
    rounds: int


FULL = Size(batches=(1, 4, 16, 32), acceptances=(0.5, 0.8), output=48, rounds=3)
QUICK = Size(batches=(1, 4), acceptances=(0.8,), output=24, rounds=1)
CHARACTERS = 40  # of text for each token of prompts: more than any token has on average

Row = dict[str, Any]


class Label(NamedTuple):
    """The columns of a row that name its engine."""

    acceptance: float | None
    drafts: str


def work_of(encode: Any, batch: int, output: int) -> Workload:
    """Requests that continue Python's documentation, all at once."""
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = list(encode(text[: CHARACTERS * PROMPT * batch]))
    prompts = [tokens[i * PROMPT : (i + 1) * PROMPT] for i in range(batch)]
    # a step with k drafts is not padded
    sizes = {batch * (1 + k) for k in range(DRAFTS + 1)} | {BUDGET}
    engine = {
        "max_num_seqs": batch,
        "max_num_batched_tokens": BUDGET,
        "token_buckets": tuple(sorted(sizes)),
        "max_model_len": PROMPT + output,
    }
    return Workload(f"batch of {batch}", prompts, [output] * batch, engine)


def drafter(place: Path, work: Workload, plain: Pass, acceptance: float) -> str:
    """Write the files of a drafter that knows the outputs to `place`. Returns the engine's option
    `method` for it.
    """
    place.mkdir()
    shutil.copy(Path(__file__).with_name("oracle.py"), place)
    outputs = {
        str(i): (len(prompt), tokens)
        for i, (prompt, tokens) in enumerate(zip(work.prompts, plain.tokens, strict=True))
    }
    text = json.dumps({"acceptance": acceptance, "outputs": outputs})
    (place / "known.json").write_text(text, encoding="utf-8")
    return f"{place / 'oracle.py'}:ORACLE"


def batch_rows(model: LoadedModel, batch: int, size: Size, place: Path) -> list[Row]:
    """The rows of experiments.bench.speculation for a batch, with the acceptance of each engine's
    drafter.
    """
    work = work_of(model.tokenizer.encode, batch, size.output)
    engines = {"plain": LLM(model, progress=False, compilation="eager", **work.engine)}
    plain = serve(engines["plain"], work)
    labels = {"plain": Label(None, "none")}
    for acceptance in size.acceptances:
        method = drafter(place / f"{batch}-{acceptance:g}", work, plain, acceptance)
        for name, adaptive in ((FIXED, False), (ADAPTIVE, True)):
            options = {"method": method, "num_tokens": DRAFTS, "adaptive": adaptive}
            engine = f"{name}, a = {acceptance:g}"
            engines[engine] = LLM(model, progress=False, speculative=options, **work.engine)
            labels[engine] = Label(acceptance, name)
    rows = measure(work, engines, size.rounds)
    return [row | {"batch": batch} | labels[row["engine"]]._asdict() for row in rows]


@compilations.disk_cache()
def run(folder: Path, quick: bool) -> Findings:
    size = QUICK if quick else FULL
    model = load_model(DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as place:
        rows = [
            row for batch in size.batches for row in batch_rows(model, batch, size, Path(place))
        ]
    return Findings(claims_of(rows), answer(rows), {"faster.svg": figure(rows)}, [table(rows)])


# --- findings -------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Claims about the tokens of a step with a fixed number of drafts, over all batches."""
    tokens_by_acceptance: dict[float, list[float]] = {}
    for row in rows:
        if row["drafts"] == FIXED:
            tokens = tokens_by_acceptance.setdefault(row["acceptance"], [])
            tokens.append(row["tokens_a_step"])
    return [
        Claim(
            PAPER,
            f"tokens of a step, a = {a:g}, g = {DRAFTS}",
            expected_tokens(a),
            span(tokens_of_steps),
            WITHIN,
            "",
            WHY,
        )
        for a, tokens_of_steps in tokens_by_acceptance.items()
    ]


def expected_tokens(acceptance: float) -> float:
    """Equation 1: expected tokens of a step."""
    return (1 - acceptance ** (DRAFTS + 1)) / (1 - acceptance)


def speedups(rows: Sequence[Row]) -> Mapping[str, list[tuple[float, float]]]:
    """For each engine with drafts: (batch, times as fast as without drafts)."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["acceptance"] is not None:
            points.setdefault(row["engine"], []).append((row["batch"], row["ratio"]))
    return points


def answer(rows: Sequence[Row]) -> list[str]:
    sentences = []
    for name, points in speedups(rows).items():
        paying = [batch for batch, ratio in points if ratio > 1]
        batches = f"batches of {', '.join(map(str, paying))}" if paying else "no batch"
        ratios = [ratio for _, ratio in points]
        low = min(ratios)
        high = max(ratios)
        sentences.append(
            f"{name}: faster with {batches}; {rounded(low)} to {rounded(high)} times as fast."
        )
    middle = statistics.median(
        row["most"] / row["least"] for row in rows if row["acceptance"] is not None
    )
    return [
        " ".join(sentences),
        f"Rounds of one point differ by a factor of {middle:.2f} (median).",
    ]


def figure(rows: Sequence[Row]) -> str:
    curves = speedups(rows)
    batches = [batch for batch, _ in next(iter(curves.values()))]
    panel = {**curves, "without drafts": [(batches[0], 1.0), (batches[-1], 1.0)]}
    labels = "sequences at once", "times as fast"
    return figures.curves(
        {"measured": panel}, *labels, log_x=2, lowest=0, dashed=("without drafts",)
    )


def table(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["batch"],
            row["drafts"],
            "" if row["acceptance"] is None else row["acceptance"],
            row["tokens_per_s"],
            f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
            "" if row["tokens_a_step"] is None else f"{row['tokens_a_step']:.2f}",
        )
        for row in rows
    ]
    head = (
        "batch",
        "drafts",
        "acceptance",
        "output tokens/s",
        "times as fast (range)",
        "tokens of a step with drafts",
    )
    return markdown(head, cells)
