"""Counts the bundles (instruction words) that a row of a TPU kernel executes.

They are counted in the text of libtpu's final schedule. The length of a schedule says little about
a row, because most of a row's time is in loops. The text marks the beginning of a loop by "LB:",
with one ">" for each loop around and including it. It marks a predicated region by a branch to
"$regionN", and its end by "empty region N". Each bundle is counted as often as the loops around it
turn. The result is a count and not a time: a wait for memory is one bundle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s*(LB|PF|PB|LH|LE)?\s*:\s*(>*)\s*(.*)")
PRODUCT = re.compile(r"mxu|vmatmul|vmatpush")
COPY = re.compile(r"dma\.hbm_to_vmem")
WAIT = re.compile(r"vsyncadd")
# The depth of the loops over items and over steps; that of the grid is 1
ITEM = 2
STEP = 3
DELAY = 4  # most bundles after a branch that are still executed


class Bundle(NamedTuple):
    """One line of a schedule."""

    mark: str  # LB: a loop begins; PF: a predicated region has ended
    depth: int  # loops around it
    text: str


class Trips(NamedTuple):
    """How often the loops of a row turn."""

    steps: int  # of the row
    pages: int  # of a step
    heads: int  # turns of the loop over key heads


def of_a_row(schedule: str, trips: Trips) -> int:
    """Returns the bundles that a row executes, from a `final_bundles.txt` of the attention kernel.

    It is 0, which means not known, if the loop over steps is not found. The row's context fills its
    steps, so the regions that clear values are not executed. Every step also starts the copies of a
    later step.

    Raises:
        ValueError: the text has no loop with products in it, so it is no such schedule.
    """
    lines = map(LINE.match, schedule.splitlines())
    bundles = [Bundle(line[1] or "", len(line[2]), line[3]) for line in lines if line]
    item_loops = [
        loop for loop in _loops(bundles, ITEM, 0, len(bundles)) if _has(bundles, loop, PRODUCT)
    ]
    if not item_loops:
        raise ValueError("libtpu's schedule has no loop with products; has its text another form?")
    item_loop = item_loops[0]
    counts = [1] * len(bundles)  # how often each bundle is executed
    loops = list(_loops(bundles, STEP, *item_loop))
    if not any(_has(bundles, loop, COPY) and _has(bundles, loop, PRODUCT) for loop in loops):
        return 0
    for loop in loops:
        is_step_loop = _has(bundles, loop, COPY)
        _repeat(counts, loop, trips.steps if is_step_loop else trips.heads)
        if not is_step_loop:
            continue
        for inner in _loops(bundles, STEP + 1, *loop):
            if _has(bundles, inner, PRODUCT):
                _repeat(counts, inner, trips.heads)
            elif _has(bundles, inner, COPY) or _has(bundles, inner, WAIT):
                _repeat(counts, inner, trips.pages)
        for region in _regions(bundles, *loop):
            if not any(_has(bundles, region, pattern) for pattern in (PRODUCT, COPY, WAIT)):
                _repeat(counts, region, 0)
    return sum(counts[slice(*item_loop)])


def _repeat(counts: list[int], span: tuple[int, int], turns: int) -> None:
    """Multiplies the counts of the bundles of a span, in place."""
    for i in range(*span):
        counts[i] *= turns


def _has(bundles: list[Bundle], span: tuple[int, int], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(bundle.text) for bundle in bundles[slice(*span)])


def _loops(bundles: list[Bundle], depth: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last + 1) of the loops of a depth.

    A loop goes from its mark to the branch back, with the bundles that still run after the branch.
    """
    for i in range(begin, end):
        if bundles[i].mark == "LB" and bundles[i].depth == depth:
            names = "|".join(re.findall(r"Start region (\d+)", bundles[i].text))
            back = re.compile(rf"sbr\.rel .*target = \$region({names})\b")
            last = next((j for j in range(i, end) if names and back.search(bundles[j].text)), None)
            if last is not None:
                delayed = range(last + 1, min(last + 1 + DELAY, end))
                yield i, next((j for j in delayed if bundles[j].mark), delayed.stop)


def _regions(bundles: list[Bundle], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last + 1) of the predicated regions."""
    for i in range(begin, end):
        target = re.search(r"sbr\.rel \(.*?target = \$region(\d+)", bundles[i].text)
        if target:
            ended = re.compile(rf"empty region {target[1]}\b")
            past = (
                j
                for j in range(i + 1, end)
                if bundles[j].mark == "PF" and ended.search(bundles[j].text)
            )
            if (stop := next(past, None)) is not None:
                yield i + 1, stop
