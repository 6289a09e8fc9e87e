"""017: when tensor parallelism pays: latency per token against throughput per chip, on 1 to 8
chips. The chips are simulated.

Sources: https://nvidia.github.io/TensorRT-LLM/0.20.0/performance/perf-overview.html, table "Llama
3.3 70B FP8", and https://jax-ml.github.io/scaling-book (Austin et al. 2025, as of February 2025),
parts 5 and 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.analysis import figures
from experiments.simulation import collectives, cost
from experiments.simulation.collectives import Exchange
from experiments.simulation.cost import CHIPS, SHAPES, Chip, Roofline, Shape, Work
from experiments.studies.findings import Claim, Findings, exactly, markdown, rounded, simulated
from pagedjax.options.config import MeshConfig

QUESTION = (
    "When does tensor parallelism pay: what do 2, 4 or 8 chips for one model do to latency "
    "and throughput?"
)
BOOK = "How to Scale Your Model (Austin et al. 2025), applied inference"
BOOK_TRAINING = "How to Scale Your Model (Austin et al. 2025), training and applied inference"
TABLE = "TensorRT-LLM v0.20, performance overview, Llama 3.3 70B FP8"
MODELS = ("llama-3-8b", "llama-3-70b")
SIZES: tuple[int, ...] = (1, 2, 4, 8)
SERVED = ("h100", "tpu-v5e")  # chips of the figure
CONTEXT = 1024
BATCHES = tuple(2**i for i in range(11))
LIMITS_MS = (5.0, 10.0, 20.0, 50.0)
WITHIN = 1.25
# The number of chips that other numbers are compared with. It is the smallest for which every kind
# of chip has enough room for the cache.
BASE = 2

# output tokens/s on 1, 2, 4 and 8 chips, by (input, output) tokens and by kind of chip
PUBLISHED: dict[tuple[int, int], dict[str, tuple[float, float, float, float]]] = {
    (1000, 1000): {
        "h200": (2744.32, 5119.72, 8685.44, 12744.51),
        "h100": (742.14, 4247.19, 7435.65, 11018.81),
    },
    (5000, 500): {
        "h200": (545.96, 997.15, 1698.22, 2655.28),
        "h100": (204.94, 862.91, 1552.68, 2369.84),
    },
}
REQUESTS = {(1000, 1000): 3000, (5000, 500): 1500}  # by (input, output) tokens
FEW_REQUESTS = 60  # with --quick
# (input, output) tokens that are run without exchanges too
IDEAL_LENGTHS: tuple[int, int] = (5000, 500)

# the step of the book: 32 sequences of 8,192 tokens
LONG = Work(tokens=32, sequences=32, sampled=32, context=32 * 8192, pairs=32 * 8192)
WHY_MEMORY = (
    "TensorRT-LLM keeps the embedding and the head in 16 bits and needs memory for a step, so one "
    "H100 has room for fewer tokens than ours beside the weights"
)
WHY_EXCHANGES = (
    "the source counts no time of exchanges; ours has two sums a layer in float32, and their hops"
)
WHY_KEYS = (
    "the source halves the time of 8 chips, as if the cache were split 16 ways; 8 key heads are "
    "split 8 ways, and each is kept twice. It counts no exchanges either"
)
WHY_TABLE = (
    "kernels and links reach less than their data sheets, and not by the same factor at every size"
)


class Decode(NamedTuple):
    """A decode step."""

    batch: int
    latency: float  # seconds of the step, which gives each sequence a token
    per_chip: float  # output tokens/s of a chip
    exchanged: float  # share of the time that exchanges take


def roofline(model: str, chip: str, n: int) -> Roofline:
    """Weights and cache of 8 bits, on a mesh of n chips."""
    return cost.of_mesh(Roofline(eight_bits(model), CHIPS[chip]), MeshConfig(tensor=n))


def eight_bits(model: str) -> Shape:
    return SHAPES[model]._replace(weight_bytes=1, kv_bytes=1)


def bytes_needed(roof: Roofline, tokens: int) -> float:
    """Bytes on one chip of its weights and of so many tokens' keys and values."""
    return roof.shape.total_bytes + tokens * roof.shape.token_bytes


def decodes(model: str, chip: str, n: int) -> list[Decode]:
    """Decode steps of the batches that fit, by batch. Each sequence has CONTEXT tokens."""
    roof = roofline(model, chip, n)
    steps = []
    for batch in BATCHES:
        if bytes_needed(roof, batch * CONTEXT) > roof.chip.memory:
            break
        work = Work(
            tokens=batch,
            sequences=batch,
            sampled=batch,
            context=batch * CONTEXT,
            pairs=batch * CONTEXT,
        )
        seconds = roof(work)
        steps.append(Decode(batch, seconds, batch / seconds / n, roof.exchange(work) / seconds))
    return steps


Rates = Mapping[tuple[tuple[int, int], str], Sequence[float]]  # tokens/s by lengths and chip
Grid = Mapping[tuple[str, str, int], Sequence[Decode]]  # by model, chip and number of chips


def grid() -> Grid:
    """The steps of every mesh that has room for its model."""
    steps_by_mesh = {
        (model, chip, n): decodes(model, chip, n)
        for model in MODELS
        for chip in SERVED
        for n in SIZES
    }
    return {mesh: steps for mesh, steps in steps_by_mesh.items() if steps}


def best(steps_by_mesh: Grid, model: str, chip: str, limit_s: float) -> tuple[int, Decode] | None:
    """The number of chips and the step with most tokens/s of a chip, within the limit."""
    choices = [
        (n, step)
        for n in SIZES
        for step in steps_by_mesh.get((model, chip, n), ())
        if step.latency <= limit_s
    ]
    return max(choices, key=lambda choice: choice[1].per_chip, default=None)


def crossing(shape: Shape, chip: Chip) -> float:
    """The number of chips from which the sum of an MLP's outputs takes longer than its products, by
    bytes and operations alone.

    The ratio of the two times is linear in n - 1, from three chips on (two chips have one link). So
    it is computed for four chips and extended to the number where it is 1.
    """
    assert chip.network is not None, "of a chip that has one"
    tokens = 4096
    n = 4
    matrices = 3 if shape.gated else 2
    products_s = 2 * matrices * shape.hidden * shape.intermediate * tokens / n / chip.rate
    summed = Exchange("all-reduce", collectives.SUM_BYTES * shape.hidden * tokens)
    sum_s = collectives.seconds(summed, n, chip.network._replace(hop=0.0))
    return 1 + (n - 1) * products_s / sum_s


def book_claims() -> list[Claim]:
    """The book's step: Llama-3-70B in 8 bits on TPU v5e, 32 sequences of 8,192 tokens."""
    step_name = "Llama-3-70B, 8 bits, 32 sequences of 8,192 tokens on TPU v5e"
    eight = roofline("llama-3-70b", "tpu-v5e", 8)
    sixteen = roofline("llama-3-70b", "tpu-v5e", 16)
    memory = exactly(8 * bytes_needed(eight, LONG.context) / 1e9)
    step_of_8 = eight(LONG)
    step_of_16 = sixteen(LONG)
    without_exchanges = (step_of_8 - eight.exchange(LONG)) * 1e3
    edge = exactly(crossing(SHAPES["llama-3-70b"], CHIPS["tpu-v5p"]))
    return [
        Claim(BOOK, f"{step_name}: memory of weights and cache", 112.0, memory, 1.1, "GB"),
        Claim(
            BOOK,
            f"{step_name}: step of 8 chips, without exchanges",
            17.0,
            exactly(without_exchanges),
            1.1,
            "ms",
        ),
        Claim(
            BOOK,
            f"{step_name}: step of 8 chips",
            17.0,
            exactly(step_of_8 * 1e3),
            1.1,
            "ms",
            WHY_EXCHANGES,
        ),
        Claim(
            BOOK,
            f"{step_name}: tokens/s of each of 8 chips",
            235.0,
            exactly(32 / step_of_8 / 8),
            1.1,
            "tokens/s",
            WHY_EXCHANGES,
        ),
        Claim(
            BOOK,
            f"{step_name}: step of 16 chips",
            8.5,
            exactly(step_of_16 * 1e3),
            1.1,
            "ms",
            WHY_KEYS,
        ),
        Claim(
            BOOK_TRAINING,
            "Llama-3-70B, 16 bits on TPU v5p, one axis: chips from which an MLP's exchanges take "
            "longer than its products, F / 2,550",
            28672 / 2550,
            edge,
            WITHIN,
            "chips",
        ),
    ]


def rates(
    folder: Path, lengths: tuple[int, int], chip: str, count: int, *, exchanges: bool = True
) -> list[float]:
    """Output tokens/s of the whole run, by number of chips.

    exchanges: if False, chips share the work of the model and send nothing.
    """
    prompt, output = lengths
    if exchanges:
        meshes = ", ".join(f"{{tensor: {n}}}" for n in SIZES)
        sizes = (f"sweep.grid.simulate.mesh=[{meshes}]",)
    else:
        sizes = ("simulate.mesh=null", f"sweep.grid.simulate.chips={list(SIZES)}")
    points = simulated(
        folder / "config.yaml",
        f"simulate.chip={chip}",
        *sizes,
        f"workload={{kind: synthetic, count: {count}, prompt: {{dist: fixed, value: {prompt}}}, "
        f"output: {{dist: fixed, value: {output}}}}}",
    )
    return [runs[0]["output_tokens_per_s"] for _, runs in points]


def share_of_base(rates_by_size: Sequence[float], n: int) -> float:
    """Throughput of a chip on n chips, over that on BASE chips."""
    by_size = dict(zip(SIZES, rates_by_size, strict=True))
    return (by_size[n] / n) / (by_size[BASE] / BASE)


def table_claims(rates_by_chip: Rates) -> list[Claim]:
    claims = []
    for (lengths, chip), chip_rates in rates_by_chip.items():
        published = PUBLISHED[lengths][chip]
        for n in SIZES:
            if n == BASE:
                continue
            quantity = (
                f"{chip.upper()}, {lengths[0]} tokens in, {lengths[1]} out: throughput of a chip "
                f"on {n}, over that on {BASE}"
            )
            why = WHY_MEMORY if chip == "h100" and n < BASE else WHY_TABLE
            claims.append(
                Claim(
                    TABLE,
                    quantity,
                    share_of_base(published, n),
                    exactly(share_of_base(chip_rates, n)),
                    WITHIN,
                    "x",
                    why,
                )
            )
    return claims


def run(folder: Path, quick: bool) -> Findings:
    steps = grid()
    rates_by_chip: Rates = {
        (lengths, chip): rates(folder, lengths, chip, FEW_REQUESTS if quick else REQUESTS[lengths])
        for lengths, chips in PUBLISHED.items()
        for chip in chips
    }
    ideal_rates: Rates = {
        (IDEAL_LENGTHS, chip): rates(
            folder,
            IDEAL_LENGTHS,
            chip,
            FEW_REQUESTS if quick else REQUESTS[IDEAL_LENGTHS],
            exchanges=False,
        )
        for chip in PUBLISHED[IDEAL_LENGTHS]
    }
    panels = {
        panel(steps, model, chip): lines(steps, model, chip) for model in MODELS for chip in SERVED
    }
    figure = figures.curves(panels, "ms a token", "tokens/s of a chip", log_x=2, log_y=10)
    claims = [*table_claims(rates_by_chip), *book_claims()]
    return Findings(
        claims,
        answer(steps, ideal_rates),
        {"pays.svg": figure},
        [decode_table(steps), rate_table(rates_by_chip, ideal_rates)],
    )


def lines(steps: Grid, model: str, chip: str) -> dict[str, list[tuple[float, float]]]:
    """The points (milliseconds a token, tokens/s of a chip), for each number of chips that has room
    for the model.
    """
    return {
        chips_text(n): [(1e3 * step.latency, step.per_chip) for step in steps[model, chip, n]]
        for n in SIZES
        if (model, chip, n) in steps
    }


def panel(steps: Grid, model: str, chip: str) -> str:
    """The title of a panel; one with a single line has no legend."""
    names = list(lines(steps, model, chip))
    title = f"{model}, {chip}"
    return f"{title}, {names[0]}" if len(names) == 1 else title


def chips_text(n: int) -> str:
    return "1 chip" if n == 1 else f"{n} chips"


def answer(steps: Grid, ideal_rates: Rates) -> list[str]:
    sentences = []
    for model, chip in (("llama-3-8b", "h100"), ("llama-3-70b", "h100"), ("llama-3-8b", "tpu-v5e")):
        steps_of_1 = steps[model, chip, 1]
        steps_of_8 = steps[model, chip, 8]
        faster = rounded(steps_of_1[0].latency / steps_of_8[0].latency)
        share = rounded(steps_of_8[-1].per_chip / steps_of_1[-1].per_chip)
        sentences.append(
            f"{model} on {chip}: eight chips decode one sequence {faster} times as fast as one. At "
            f"the largest batch that fits, of up to {BATCHES[-1]} sequences (eight chips: "
            f"{steps_of_8[-1].batch}, one chip: {steps_of_1[-1].batch}), a chip of eight gives "
            f"{share} times the tokens/s of one alone."
        )
    ideal = " and ".join(
        f"{rounded(share_of_base(chip_rates, 8))} ({chip})"
        for (_, chip), chip_rates in ideal_rates.items()
    )
    return [
        "It pays where the weights leave a chip little memory, or where a token must come sooner "
        "than one chip can give it. Where neither holds, an engine for each chip gives more "
        "tokens/s.",
        *sentences,
        f"If exchanges took no time, the throughput of a chip on 8, over that on {BASE}, would be "
        f"{ideal} with {IDEAL_LENGTHS[0]} tokens in and {IDEAL_LENGTHS[1]} out; the claims have it "
        "with exchanges.",
        "Ours differs from TensorRT-LLM in both directions. Its products are of 8 bits and twice "
        "as fast, and its sums are of 16 bits, where ours are of float32 and carry twice the "
        "bytes. Its kernels and links reach less than their data sheets, which a roofline does. "
        "Ratios of numbers of chips are claims for that reason, and tokens/s are not; and that "
        "they agree does not show that links reach what ours do.",
        "Hops of NVLink take no time here, because no data sheet gives it: times on GPUs are "
        "lower bounds.",
        "No source that we could verify gives latency against throughput for both models on 1 to 8 "
        "chips, so the figure and the first table are results without a claim.",
    ]


def decode_table(steps: Grid) -> str:
    """The best number of chips for each limit of latency."""
    rows = []
    for model in MODELS:
        for chip in SERVED:
            for limit in LIMITS_MS:
                choice = best(steps, model, chip, limit / 1e3)
                if choice is None:
                    cells = ("none", "", "", "")
                else:
                    n, step = choice
                    cells = (str(n), str(step.batch), *step_cells(step))
                rows.append((model, chip, f"{limit:g}", *cells))
    head = (
        "model",
        "chip",
        "most ms a token",
        "best: chips",
        "batch",
        "tokens/s of a chip",
        "exchanges, % of a step",
    )
    return markdown(head, rows)


def step_cells(step: Decode) -> tuple[str, str]:
    """Two cells: tokens/s of a chip, and the per cent of the time that exchanges take."""
    return rounded(step.per_chip), rounded(100 * step.exchanged, 2)


def rate_table(rates_by_chip: Rates, ideal_rates: Rates) -> str:
    rows = [
        (
            chip,
            f"{lengths[0]} / {lengths[1]}",
            n,
            rounded(PUBLISHED[lengths][chip][i]),
            rounded(chip_rates[i]),
            rounded(ideal_rates[lengths, chip][i]) if (lengths, chip) in ideal_rates else "",
        )
        for (lengths, chip), chip_rates in rates_by_chip.items()
        for i, n in enumerate(SIZES)
    ]
    head = (
        "chip",
        "tokens in / out",
        "chips",
        "TensorRT-LLM, tokens/s",
        "ours, tokens/s",
        "without exchanges",
    )
    return markdown(head, rows)
