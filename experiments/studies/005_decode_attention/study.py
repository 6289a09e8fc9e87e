"""005: a decode step without a cache, with a contiguous and with a paged cache, on JAX's device.

It has no config, because nothing is served; timed.py measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments.analysis import figures
from experiments.simulation.cost import CHIPS, SHAPES, Chip, Roofline, Shape, Work, shape_of
from experiments.studies.findings import Claim, Findings, exactly, markdown, rounded, span
from pagedjax import load_model
from pagedjax.engine import compilations
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.pretrained import DEFAULT_MODEL

from .timed import (
    AGAIN,
    BEST,
    CACHED,
    ONE_BLOCK,
    SIZES,
    Cell,
    Device,
    Grid,
    Times,
    attention_times,
    paged_name,
    serving_impls,
    slower,
    step_times,
)

QUESTION = (
    "What does a decode step cost without a KV cache, with a contiguous and with a paged "
    "one, and what binds it?"
)
PAPER = "PagedAttention, Fig. 18a"
FIG_18A = ((8, 64), (8, 128), (8, 256), (32, 64), (32, 128), (32, 256))  # batch and context
LECTURE = "gpt2-xl, a lecture's example"

FULL = Grid(
    contexts=(64, 128, 256, 512, 1024, 2048),
    batches=(1, 8, 32),
    most_tokens=2048,
    repeats=7,
    again_repeats=3,
)
QUICK = Grid(contexts=(64, 256, 1024), batches=(1, 8), most_tokens=512, repeats=3, again_repeats=2)


class Demand(NamedTuple):
    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte read."""
        return self.operations / self.bytes


def decode(batch: int, context: int) -> Work:
    """The work of a step that computes one token of each sequence, the last one of `context`."""
    return Work(
        tokens=batch,
        sequences=batch,
        sampled=batch,
        context=batch * context,
        pairs=batch * context,
    )


def again(batch: int, context: int) -> Work:
    """The work of the same step without a cache: it computes all tokens of every sequence again."""
    return Work(
        tokens=batch * context,
        sequences=batch,
        sampled=batch,
        context=batch * context,
        pairs=batch * context * (context + 1) // 2,
    )


def demand(shape: Shape, work: Work) -> Demand:
    """The operations and bytes of a step, as in cost.Roofline."""
    scores = 4 * shape.layers * shape.heads * shape.head_dim * work.pairs
    operations = shape.products(work.tokens, work.sampled) + scores
    return Demand(operations, shape.read_bytes(work.tokens) + shape.token_bytes * work.context)


# --- claims and answers ---------------------------------------------------------------------------


def lecture() -> list[Claim]:
    """gpt2-xl on an A100, calculated: operations per byte of a step over those of the chip."""
    shape = SHAPES["gpt2-xl"]
    chip = CHIPS["a100-80g"]
    ridge = chip.rate / chip.bandwidth
    longest = shape.longest
    position = exactly(shape.token_bytes / 1e3)
    claims = [Claim(LECTURE, "keys and values of a position, 16 bit", 306.0, position, 1.01, "kB")]
    kinds = [
        ("no cache", 1, again, (1.0, 1e3)),
        ("cache", 1, decode, (0.0, 1.0)),
        ("cache", 64, decode, (0.0, 1.0)),
    ]
    for name, batch, work, published in kinds:
        share = exactly(demand(shape, work(batch, longest)).intensity / ridge)
        bound = "compute-bound" if published[0] else "memory-bound"
        quantity = (
            f"{name}, batch of {batch}, {longest:,} tokens: {bound}, operations a byte over an "
            f"A100's {ridge:.0f}"
        )
        claims.append(Claim(LECTURE, quantity, published, share, 1.0, "x"))
    return claims


def crossing(shape: Shape, chip: Chip) -> int:
    """The shortest context at which arithmetic binds a step of one sequence without a cache."""
    ridge = chip.rate / chip.bandwidth
    return next(
        n for n in range(1, shape.longest + 1) if demand(shape, again(1, n)).intensity > ridge
    )


def milliseconds(seconds: Sequence[float]) -> str:
    """The median and the range of some times, in milliseconds, as text."""
    middle = rounded(1e3 * statistics.median(seconds))
    low = rounded(1e3 * min(seconds), 2)
    high = rounded(1e3 * max(seconds), 2)
    return f"{middle} ({low} to {high})"


def middles(times: Times, batch: int, name: str) -> list[tuple[float, float]]:
    """(context, median milliseconds) of a batch size, where `name` was measured."""
    return [
        (context, 1e3 * statistics.median(seconds[name]))
        for (cell_batch, context), seconds in times.items()
        if cell_batch == batch and name in seconds
    ]


@compilations.disk_cache()
def run(folder: Path, quick: bool) -> Findings:
    grid = QUICK if quick else FULL
    model = load_model(DEFAULT_MODEL, progress=False).model
    number_bytes = jnp.dtype(model.dtype).itemsize
    shape = shape_of(open_checkpoint(DEFAULT_MODEL).config, number_bytes, number_bytes)
    device = Device(model)
    alone = {}
    for cell in grid.cells:
        alone[cell] = attention_times(model, cell, grid)
        device.measure()
    attention_chip = device.chip()
    steps, packing = step_times(model, grid, device)
    chip = device.chip()
    roof = Roofline(shape, chip)

    kernel = paged_name(serving_impls(model, SIZES[0])[0], SIZES[0])
    cells = [cell for cell in FIG_18A if cell in alone]
    kernels = kernel_claims(alone, cells, kernel, shape, attention_chip)
    claims = [*kernels, packing_claim(packing, steps, grid), *lecture()]
    plots = {
        "attention.svg": attention_figure(alone, grid, shape, attention_chip),
        "steps.svg": steps_figure(steps, grid, roof),
        "roofline.svg": roofline_figure(steps, shape, chip),
    }
    tables = [attention_table(alone), steps_table(steps, roof)]
    return Findings(claims, answers(steps, grid, shape, chip, kernels), plots, tables)


def attention_table(alone: Times) -> str:
    head = ("batch", "context", *(f"{name}, ms" for name in next(iter(alone.values()))))
    rows = [(*cell, *map(milliseconds, by_name.values())) for cell, by_name in alone.items()]
    return markdown(head, rows)


def steps_table(steps: Times, roof: Roofline) -> str:
    head = (
        "batch",
        "context",
        "whole step, no cache, ms",
        "with the paged cache, ms",
        "its roofline, ms",
    )
    rows = [
        (
            *cell,
            milliseconds(by_name[AGAIN]) if AGAIN in by_name else "",
            milliseconds(by_name[CACHED]),
            1e3 * roof(decode(*cell)),
        )
        for cell, by_name in steps.items()
    ]
    return markdown(head, rows)


def kernel_claims(
    alone: Times, cells: Sequence[Cell], kernel: str, shape: Shape, chip: Chip
) -> list[Claim]:
    """How many times as long the paged kernel takes as contiguous attention."""

    def reached(name: str) -> float:
        """Per cent of the bandwidth of reading weights, the mean over cells."""
        rates = []
        for batch, context in cells:
            seconds = statistics.median(alone[batch, context][name])
            rates.append(shape.token_bytes * batch * context / seconds)
        return 100 * statistics.fmean(rates) / chip.bandwidth

    whys = {
        BEST: "the published pair are two GPU kernels, and ours are those of JAX on this device: "
        "the contiguous one reads at {:.0f} % of the bandwidth, the paged one at {:.0f} %",
        ONE_BLOCK: "the published pair are two kernels of a GPU, and this is one: it reads at "
        "{:.0f} % of the bandwidth if one block has the whole sequence, and at {:.0f} % if it "
        "follows a block table",
    }
    claims = []
    for name, why in whys.items():
        if all(name in alone[cell] for cell in cells):
            batches = spell(batch for batch, _ in cells)
            contexts = spell(context for _, context in cells)
            quantity = f"{kernel}, over {name}: batches {batches}, contexts {contexts}"
            # repeats of one process are not independent
            slowdown = span(slower(alone, cells, kernel, name))
            claims.append(
                Claim(
                    PAPER,
                    quantity,
                    (1.20, 1.26),
                    slowdown,
                    1.1,
                    "x",
                    why.format(reached(name), reached(kernel)),
                )
            )
    return claims


def spell(numbers: Any) -> str:
    return ", ".join(map(str, sorted(set(numbers))))


def packing_claim(shares: Sequence[float], steps: Times, grid: Grid) -> Claim:
    batch, context = grid.cells[-1]
    seconds = statistics.median(steps[grid.cells[-1]][CACHED])
    quantity = (
        f"block tables and all other inputs of a decode step: batch of {batch}, context {context:,}"
    )
    why = (
        f"the published share is of a step on an A100, and this one takes {1e3 * seconds:.0f} ms; "
        "a row of a table is made when it grows, not in each step"
    )
    return Claim("vAttention, block tables", quantity, (10.0, 30.0), span(shares), 1.1, "%", why)


def answers(
    steps: Times, grid: Grid, shape: Shape, chip: Chip, kernels: Sequence[Claim]
) -> list[str]:
    batch = grid.batches[0]
    context = max(context for context in grid.contexts if grid.computes((batch, context)))
    without = statistics.median(steps[batch, context][AGAIN])
    cached = statistics.median(steps[batch, context][CACHED])
    ridge = chip.rate / chip.bandwidth
    demand_without = demand(shape, again(batch, context))
    demand_cached = demand(shape, decode(batch, context))
    rate = demand_without.operations / without / chip.rate
    bandwidth = demand_cached.bytes / cached / chip.bandwidth
    first = crossing(SHAPES["gpt2-xl"], CHIPS["a100-80g"])
    ratios = [
        f"{claim.ours.middle:.2f} times {claim.what.split('over ')[1].split(':')[0]}"
        for claim in kernels
    ]

    def binds(step_demand: Demand) -> str:
        return "arithmetic" if step_demand.intensity > ridge else "memory"

    return [
        f"A token that sees {context:,} takes {1e3 * without:,.0f} ms without a cache and "
        f"{1e3 * cached:,.0f} ms with one, batch of {batch}.",
        f"Without it a step asks for {demand_without.intensity:,.0f} operations a byte, which is "
        f"bound by {binds(demand_without)}, with it for {demand_cached.intensity:.2g}, which is "
        f"bound by {binds(demand_cached)}: this device can do {ridge:.0f} "
        f"({chip.bandwidth / 1e9:,.1f} GB/s, {chip.rate / 1e9:,.0f} Gop/s). The one reaches "
        f"{100 * rate:.0f} % of the rate of plain products, the other "
        f"reads at {100 * bandwidth:.0f} % of the bandwidth of reading weights.",
        f"Attention alone over blocks of {SIZES[0]} takes {' and '.join(ratios)}.",
        f"gpt2-xl on an A100 is bound by arithmetic without a cache from {first} "
        "tokens on; below that, by reading the weights.",
    ]


def attention_figure(alone: Times, grid: Grid, shape: Shape, chip: Chip) -> str:
    roof = "the bandwidth"
    panels = {}
    for batch in grid.batches:
        lines = {name: middles(alone, batch, name) for name in next(iter(alone.values()))}
        lines[roof] = [
            (c, 1e3 * shape.token_bytes * batch * c / chip.bandwidth) for c in grid.contexts
        ]
        panels[f"attention of all layers, batch of {batch}"] = lines
    return figures.curves(panels, "tokens of context", "ms", log_x=2, log_y=10, dashed=(roof,))


def steps_figure(steps: Times, grid: Grid, roof: Roofline) -> str:
    dashed = (f"{AGAIN}, roofline", f"{CACHED}, roofline")
    panels = {}
    for batch in grid.batches:
        lines = {name: middles(steps, batch, name) for name in (AGAIN, CACHED)}
        for name, work in zip(dashed, (again, decode), strict=True):
            lines[name] = [(c, 1e3 * roof(work(batch, c))) for c in grid.contexts]
        panels[f"whole step, batch of {batch}"] = {
            name: line for name, line in lines.items() if line
        }
    return figures.curves(panels, "tokens of context", "ms", log_x=2, log_y=10, dashed=dashed)


def roofline_figure(steps: Times, shape: Shape, chip: Chip) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for (batch, context), by_name in steps.items():
        for name, seconds in by_name.items():
            if name == AGAIN:
                line = AGAIN
                step_demand = demand(shape, again(batch, context))
            else:
                line = f"{CACHED}, batch of {batch}"
                step_demand = demand(shape, decode(batch, context))
            gops = step_demand.operations / statistics.median(seconds) / 1e9
            lines.setdefault(line, []).append((step_demand.intensity, gops))
    lines = {name: sorted(points) for name, points in lines.items()}
    intensities = [intensity for points in lines.values() for intensity, _ in points]
    ridge = chip.rate / chip.bandwidth
    corners = [min(intensities), ridge, max(*intensities, ridge)]
    lines["roofline"] = [(x, min(x * chip.bandwidth, chip.rate) / 1e9) for x in corners]
    title = {"whole steps under the roofline": lines}
    return figures.curves(
        title, "operations a byte", "Gop/s", log_x=10, log_y=10, dashed=("roofline",)
    )
