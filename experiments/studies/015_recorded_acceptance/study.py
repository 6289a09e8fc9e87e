"""015: recorded acceptance of drafts in this engine's scheduler, after SpecDecode-Bench (arXiv
2601.11580).

The benchmark recorded, at every output token of real requests, how many tokens a step with drafts
would give there. Its own simulator turns them into speed-ups. Here the scheduler plans the steps,
with the same fitted times.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis import figures
from experiments.core import config
from experiments.simulation.cost import SHAPES
from experiments.simulation.simulate import Guess, Guesses, SimulatedEngine, num_accepted, resolved
from experiments.studies.findings import Claim, Findings, NoTraces, exactly, markdown, rounded
from experiments.studies.fitted_h100 import EAGLE, NGRAM, seconds
from pagedjax.host.types import Finished, Seq
from pagedjax.options.params import SamplingParams

QUESTION = "How much faster is an engine with the recorded acceptance of EAGLE and n-gram drafts?"
PAPER = "SpecDecode-Bench (arXiv 2601.11580), its simulator"
TRACES = {"gsm8k": "combined_gsm8k.jsonl", "instructcoder": "combined_instructcoder.jsonl"}
FETCH = (
    f"Fetch {' and '.join(TRACES.values())} from data/llama3.1-8B of "
    "github.com/SpecDecode-Bench/simulator, and give their folder"
)
# times as fast as plain decoding with 3 drafts, as the benchmark's simulator prints it for its
# traces; by (data, drafter), then by batch
PUBLISHED = {
    ("gsm8k", EAGLE): {1: 1.81, 32: 1.52},
    ("gsm8k", NGRAM): {1: 1.15, 32: 1.08},
    ("instructcoder", EAGLE): {1: 2.03, 32: 1.65},
    ("instructcoder", NGRAM): {1: 1.86, 32: 1.46},
}
# Where the recording has no right n-gram draft: the share of places at which n-gram still proposes
# drafts, all of them wrong. The numbers are the benchmark's.
MATCHED = {
    "gsm8k": 0.2,
    "instructcoder": 0.8,
}
DRAFTS = 3
ADAPTIVE = "adaptive"
BATCHES = (1, 8, 32)
WITHIN = 1.02
WHY = (
    "the scheduler drafts no token beyond a request's end, and its batch shares each step's "
    "time of drafting"
)


class Recorded(NamedTuple):
    """A request.

    gains: for each drafter, by output position, the tokens that a step with enough drafts gives
        there; at least 1.
    """

    prompt: int  # tokens
    gains: Mapping[str, tuple[int, ...]]


class Setting(NamedTuple):
    data: str
    method: str | None  # None: plain decoding
    batch: int
    adaptive: bool = False


# --- recorded files -------------------------------------------------------------------------------


def read(traces: Path, data: str, count: int) -> list[Recorded]:
    """The first `count` requests of a recorded file.

    Raises:
        NoTraces: the folder does not have the file.
        ValueError: a line is not of the format.
    """
    file = traces / TRACES[data]
    if not file.is_file():
        raise NoTraces(f"there is no {file.name} in the folder of --traces. {FETCH}")
    with file.open(encoding="utf-8") as lines:
        return [
            request(line, f"{file.name}, line {n}")
            for n, line in zip(range(1, count + 1), lines, strict=False)
        ]


def request(line: str, place: str) -> Recorded:
    """The request of a line. place: names the line in errors.

    Raises ValueError if the line is not of the format.
    """
    try:
        row = json.loads(line)
        gains = {method: tuple(row[f"acc_{method}"]["acc_len"]) for method in (EAGLE, NGRAM)}
        recording = Recorded(len(row["prompt_token_ids"]), gains)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place}: {type(error).__name__} {error}; it must be a JSON object with "
            f"prompt_token_ids, acc_eagle.acc_len and acc_ngram.acc_len. {FETCH}"
        ) from None
    for method, lengths in gains.items():
        wrong_lengths = [length for length in lengths if not isinstance(length, int) or length < 1]
        if wrong_lengths or not lengths:
            fault = f"has {wrong_lengths[0]!r}" if wrong_lengths else "is empty"
            raise ValueError(
                f"{place}: acc_{method}.acc_len {fault}; a step gives at least 1 token. {FETCH}"
            )
    return recording


# --- runs -----------------------------------------------------------------------------------------


def recorded_guesses(records: Sequence[Recorded], method: str, matched: float) -> Guesses:
    """A drafter that is right as often as recorded.

    The id of a request begins with the index of its record. matched: see MATCHED.
    """

    def guess(seq: Seq, length: int, k: int) -> Guess:
        record = records[int(seq.request_id.partition("-")[0])]
        num_right = record.gains[method][length - record.prompt - 1] - 1
        if method == NGRAM and not num_right and not num_accepted(seq.arrival, length, 1, matched):
            return Guess(0, 0)
        return Guess(k, min(num_right, k))

    return guess


def engine(folder: Path, setting: Setting, records: Sequence[Recorded]) -> SimulatedEngine:
    """An engine with room for a batch of the longest request."""
    data, method, batch, adaptive = setting
    longest = max(record.prompt + max(map(len, record.gains.values())) for record in records)
    drafts = []
    if method:
        drafts.append(
            f"engine.speculative={{num_tokens: {DRAFTS}, adaptive: {str(adaptive).lower()}}}"
        )
    sizes = [f"engine.max_num_seqs={batch}", f"engine.max_num_batched_tokens={batch * longest}"]
    blocks = f"engine.num_blocks={batch * (longest // 128 + 2)}"
    (point,) = config.load(folder / "config.yaml", (*sizes, *drafts, blocks))
    simulate = point.experiment.simulate
    shape = SHAPES[point.experiment.model]
    assert simulate is not None, "the config has it"
    return SimulatedEngine(
        resolved(point.experiment.engine_config, shape, None),
        partial(seconds, method=method),
        vocab_size=shape.vocabulary,
        simulate=simulate,
        guesses=recorded_guesses(records, method, MATCHED[data]) if method else None,
    )


def rates(
    engine: SimulatedEngine, records: Sequence[Recorded], method: str, batch: int
) -> list[float]:
    """Output tokens/s for each record: a batch of copies of its request, run alone."""
    rates_of_records = []
    for i, record in enumerate(records):
        start = engine.now
        output = len(record.gains[method])
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for copy in range(batch):
            engine.add(f"{i}-{copy}", [0] * record.prompt, params)
        ends: list[float] = []
        while engine.has_work:
            result = engine.step()
            assert result is not None, "there is work"
            ends += [
                result.finished - start for event in result.events if isinstance(event, Finished)
            ]
        rates_of_records.append(batch * output / statistics.fmean(ends))
    return rates_of_records


def faster(folder: Path, records: Sequence[Recorded], settings: Sequence[Setting]) -> list[float]:
    """The mean output tokens/s with drafts over that of plain decoding, for each setting.

    The settings differ in `adaptive` only.
    """
    method = settings[0].method
    batch = settings[0].batch
    assert method is not None, "plain decoding is what they are compared with"

    def mean_rate(setting: Setting) -> float:
        return statistics.fmean(rates(engine(folder, setting, records), records, method, batch))

    plain = mean_rate(settings[0]._replace(method=None))
    return [mean_rate(setting) / plain for setting in settings]


def published_claims(folder: Path, read_files: Mapping[str, Sequence[Recorded]]) -> list[Claim]:
    claims = []
    for (data, method), published_by_batch in PUBLISHED.items():
        for batch, published in published_by_batch.items():
            (ratio,) = faster(folder, read_files[data], [Setting(data, method, batch)])
            quantity = f"{data}, {method}, {DRAFTS} drafts, batch {batch}"
            claims.append(Claim(PAPER, quantity, published, exactly(ratio), WITHIN, "x", WHY))
    return claims


def ratios(
    folder: Path, records: Sequence[Recorded], data: str, method: str
) -> tuple[list[float], list[float]]:
    """Times as fast as plain decoding, by batch: a fixed number of drafts, and an adaptive one."""
    by_batch = [
        faster(
            folder, records, [Setting(data, method, batch, adaptive) for adaptive in (False, True)]
        )
        for batch in BATCHES
    ]
    fixed, adaptive = zip(*by_batch, strict=True)
    return list(fixed), list(adaptive)


def run(folder: Path, quick: bool, traces: Path) -> Findings:
    count, table_count = (6, 3) if quick else (300, 30)
    read_files = {data: read(traces, data, count) for data in TRACES}
    claims = published_claims(folder, read_files)
    rows = []
    panels = {}
    for data, method in PUBLISHED:
        fixed, adaptive = ratios(folder, read_files[data][:table_count], data, method)
        rows += [
            (data, method, batch, *pair)
            for batch, pair in zip(BATCHES, zip(fixed, adaptive, strict=True), strict=True)
        ]
        panels[f"{data}, {method}"] = {
            f"{DRAFTS} drafts": list(zip(BATCHES, fixed, strict=True)),
            ADAPTIVE: list(zip(BATCHES, adaptive, strict=True)),
            "plain": [(BATCHES[0], 1.0), (BATCHES[-1], 1.0)],
        }
    figure = figures.curves(
        panels, "sequences", "times as fast", log_x=2, lowest=0, dashed=("plain",)
    )
    head = (
        "data",
        "drafter",
        "batch",
        f"{DRAFTS} drafts, times as fast",
        f"adaptive, at most {DRAFTS}",
    )
    return Findings(
        claims, answer(claims, rows, table_count), {"faster.svg": figure}, [markdown(head, rows)]
    )


def answer(claims: Sequence[Claim], rows: Sequence[tuple[Any, ...]], table_count: int) -> list[str]:
    worst = max(abs((claim.ratio or 0.0) - 1) for claim in claims)
    slowest = min(rows, key=lambda row: row[4])
    return [
        "With the recorded acceptance and the fitted times, the scheduler's speed-ups differ from "
        f"the benchmark's simulator by {100 * worst:.1f} % at most.",
        f"In the table, of the first {table_count} requests of each file, adaptive drafts are "
        f"never less than {rounded(slowest[4])} times as fast as none ({slowest[0]}, {slowest[1]}, "
        f"batch {slowest[2]}).",
        f"The recordings are not shipped here. {FETCH} with `--traces`.",
    ]
